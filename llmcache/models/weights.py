"""Which weights produced a state: a digest of the trunk, made anew only of what changed.

Every call that is served compares the address and version counter of each tensor, the modules and what holds them, and
the settings in their attributes and configs (`attributes.py` says which); that costs some 70 microseconds for BERT-base
in a row, and five times as much after a model. So where nothing was edited for 64 looks, a miss waits: what it stores
serves only after a look that finds the weights as they were before it (`Bank.confirm`), 16 calls later at most. Each
tensor has a digest of its own, so that an edit costs hashing what was edited; the digests of the latest states are
kept, so that adapters or settings that take turns cost nothing. Fused optimizers write weights without moving the
counter. So after a forward with gradients all that takes gradients is hashed again, and while gradients are held, these
tensors are hashed in every call, or, where that takes long, the call is computed. Other edits without a trace (through
`.data`, by another process) are seen by samples (`samples.py`); after one everything is hashed again.

Not seen are edits without a trace that no sample meets, edits of a setting that are taken back before the call ends,
attributes of classes but their `forward`, and what functions read from globals: call `cache.clear()` after one.
"""

import hashlib
import threading
import uuid
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, ValuesView
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmcache.models.attributes import Attributes
from llmcache.models.hashing import digests, is_readable
from llmcache.models.rope import changes_with_length
from llmcache.models.samples import Samples
from llmcache.models.tuners import Tuner, activated, are_by_row, is_tuner
from llmcache.threads import forkable

# Read by the hundred in every call.
_VERSION = attrgetter("_version")
_TRAINING = itemgetter("training")
_FORWARD = attrgetter("forward")
_END = (object(),)
_CHANGED = (KeyError, TypeError, AttributeError, RuntimeError)  # an attribute is gone, or of another kind

_UNREADABLE = ("meta_weights", "unseen_weights")
_MAX_STATES = 16  # whose digests are kept
_STEADY = 64  # looks
_MOST_WAITED = 16  # calls without a look
MAX_HELD_BYTES = 16 << 20  # that hold gradients and are hashed in each call: some 10 ms


class Mark:
    """What every edit makes another one. Compared by identity where values may be anything."""

    __slots__ = ("contents", "era", "held", "numbers", "settings")

    def __init__(
        self, numbers: tuple[Any, ...], held: tuple[Any, ...], settings: tuple[Any, ...], contents: tuple[Any, ...]
    ) -> None:
        """Take addresses, versions, classes and sizes; modules and tensors; settings; contents of containers.

        `held` and `settings` end with `_END`: none is the beginning of another.
        """
        self.numbers = numbers
        self.held = held
        self.settings = settings
        self.contents = contents
        self.era = 0  # of the latest digests: it moves on whenever anything may have come between two of them

    def has_structure_of(self, other: "Mark") -> bool:
        """Whether all but settings are alike."""
        return self.numbers == other.numbers and all(map(is_, self.held, other.held))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mark):
            return NotImplemented
        is_like = self.has_structure_of(other) and all(map(is_, self.settings, other.settings))
        return is_like and self.contents == other.contents

    def __hash__(self) -> int:
        return hash((self.numbers, self.contents, *map(id, self.settings)))


class Look(NamedTuple):
    """The weights of one moment.

    Attributes:
        digest: See `Weights.digest`.
        mark: That came with it; None where others have come since.
        refusal: See `Weights.refusal`.
        activated: See `Weights.activated`.
        modules: Those that were watched, a list that is made anew whenever one of them is another.
        is_made: False if it is the look before, given again.
    """

    digest: str
    mark: Mark | None
    refusal: str | None
    activated: Sequence[int | None] | None
    modules: Sequence[nn.Module] = ()
    is_made: bool = True


class Weights:
    """Watches one module. Thread-safe."""

    def __init__(self, module: nn.Module, without: nn.Module | None = None) -> None:
        """Remember the module; nothing is read until `digest` is called.

        Args:
            module: The trunk, whose parameters alone decide its hidden states; or a whole model.
            without: A part of it that is not looked at: of a model without its trunk, the head is left. Numbers and
                strings do not count there: a model of the user's own may note in them what it did.
        """
        self._module = module
        self._without = without
        self._lock = forkable(threading.Lock())
        self._suspecting = forkable(threading.Lock())
        self._found = Attributes({})
        self._modules: list[nn.Module] = []
        self._holders: list[ValuesView[Any]] = []
        self._empty: list[dict[str, Any]] = []
        self._named: list[tuple[str, Tensor]] = []
        self._tensors: list[Tensor] = []
        self._pointers: list[Tensor] = []
        self._outer: list[Tensor] = []
        self._dropouts: list[dict[str, Any]] = []
        self._tuners: list[Tuner] = []
        self._left_out: list[str] = []
        self._ties: list[str] = []  # which paths lead to a tensor or module that has another name
        self._hooks: list[Any] = []  # of PEFT's layers
        self._first: Tensor | None = None
        self._hashed: dict[int, tuple[Tensor, Any, int, int, str]] = {}
        self._samples = Samples()
        self._suspects: set[int] = set()
        self._trained: list[Tensor] = []  # hold gradients, so that a step may follow at any time
        self._known: OrderedDict[Mark, tuple[str, str | None]] = OrderedDict()  # digest and refusal
        self._state: tuple[Mark | None, str] = (None, "")
        self._refusal: str | None = None
        self._rewritten: set[int] = set()
        self._n_alike = self._n_waited = 0

    def digest(self, is_kept: bool = False) -> str:
        """SHA-256 (hex) over names, types, tensors and settings; unlike any other where not all of them can be read.

        Args:
            is_kept: It goes with what outlives the process: all samples are looked at, not those of one place.
        """
        self._n_alike += 1
        if self._is_stale(is_kept):
            with self._lock:
                if self._is_stale(is_kept):  # another thread may have refreshed meanwhile
                    self._refresh()
        return self._state[1]

    def look(self, may_wait: bool = False) -> "Look":
        """What a call has to know of the weights, as they are now.

        Args:
            may_wait: Where nothing was edited for long, most looks are the one before; see `Look.is_made`. Whoever
                serves by one asks `stayed` first, and whoever stores by one waits until somebody has asked.
        """
        if (self._suspects or self._trained) and self.is_trained:
            return Look("", None, "gradients_held", None)
        mark, latest = self._state
        if waits := may_wait and self._n_waited < _MOST_WAITED and self.is_steady:
            self._n_waited, digest = self._n_waited + 1, latest
        else:
            self._n_waited, digest = 0, self.digest()
            mark, latest = self._state
        refusal, offsets = self._refusal, None
        if refusal is None and any(map(_TRAINING, self._dropouts)):  # although the model is not (Monte Carlo dropout)
            refusal = "training"
        if any(self._hooks):
            refusal = refusal or ("adapter_names" if are_by_row(self._hooks) else None)
            offsets = activated(self._hooks)
        return Look(digest, mark if latest == digest else None, refusal, offsets, self._modules, not waits)

    @property
    def latest(self) -> str:
        """The latest digest that was made, without a look at what has changed since; "" before the first."""
        return self._state[1]

    def mark_of(self, digest: str) -> Mark | None:
        """The mark that came with a digest; None where others have come since."""
        mark, latest = self._state
        return mark if latest == digest else None

    def stayed(self, mark: Mark | None, digest: str) -> bool:
        """Whether nothing was edited since a mark was taken, not even for a moment.

        Args:
            mark: Taken when the call began, see `mark_of`.
            digest: Of that time.
        """
        latest = self._state[0]
        if mark is None or latest is None or mark.era != latest.era:  # other weights were seen meanwhile
            return False
        if self._is_as(mark) and not (self._suspects or self._trained or self._samples.differ()):
            return True
        self._n_alike, now = 0, self.mark()
        return (now == mark or self._may_be_alike(mark, now)) and self.digest() == digest

    def differs_in_values(self, before: Mark) -> bool:
        """Whether nothing but values of tensors was edited since a mark was taken, and these in place."""
        after, n = self.mark(), len(self._tensors)
        rest = 2 * n + len(self._pointers) + len(self._modules)
        before_numbers, after_numbers = before.numbers, after.numbers
        if len(before_numbers) != len(after_numbers):
            return False
        is_alike = (
            before_numbers[:n] == after_numbers[:n] and before_numbers[2 * n : rest] == after_numbers[2 * n : rest]
        )
        return is_alike and Mark(after_numbers, before.held, before.settings, before.contents) == after

    def suspect(self) -> None:
        """Say that a forward with gradients ran, so that an optimizer may write the weights from now on."""
        with self._suspecting:
            self._suspects.update(id(tensor) for tensor in self._tensors if tensor.requires_grad)
            for inner, outer in self._found.wrapped.items():
                if outer.requires_grad:
                    self._suspects.add(inner)

    @property
    def is_steady(self) -> bool:
        """Whether nothing was edited between the latest looks, and nobody trains."""
        return self._n_alike > _STEADY and not (self._suspects or self._trained)

    @property
    def refusal(self) -> str | None:
        """Why states of these weights must not be cached, a key of `bypass.CURES`, as the latest digest found."""
        if self._refusal is not None:
            return self._refusal
        if any(map(_TRAINING, self._dropouts)):  # although the model is not (Monte Carlo dropout)
            return "training"
        return "adapter_names" if are_by_row(self._hooks) else None

    @property
    def activated(self) -> Sequence[int | None] | None:
        """How many of each row's last columns an activated LoRA is in force for, in the call under way; mostly None."""
        return activated(self._hooks)

    @property
    def is_training(self) -> bool:
        """Whether the module is in training mode, or one in it that drops at random what passes."""
        return self._module.training or any(map(_TRAINING, self._dropouts))

    @property
    def unreadable(self) -> str | None:
        """The refusal, where weights cannot be told from others at all."""
        return self._refusal if self._refusal in _UNREADABLE else None

    @property
    def is_trained(self) -> bool:
        """Whether so many bytes hold gradients that hashing them in each call takes longer than it is worth."""
        if not (self._suspects or self._trained):
            return False
        return sum(tensor.nbytes for tensor in self._tensors if _holds_gradient(tensor)) > MAX_HELD_BYTES

    # -- comparing -----------------------------------------------------------------------------------------------------

    def _is_stale(self, is_kept: bool) -> bool:
        before = self._state[0]
        if self._suspects or self._trained or before is None:
            return True
        return not self._is_as(before) or self._samples.differ() or bool(is_kept and self._samples.edited())

    def mark(self) -> Mark:
        """What every edit makes another one, also an edit that was taken back; no weight is read."""
        try:
            numbers, held, settings, contents = self._now()
            return Mark(numbers, tuple(held), tuple(settings), contents)
        except _CHANGED:
            return Mark((), (object(),), (), ())

    def _is_as(self, mark: Mark) -> bool:
        """Whether `mark()` would equal this one; nothing is built, since this is asked in each call."""
        try:
            numbers, held, settings, contents = self._now()
            return (
                numbers == mark.numbers
                and all(map(is_, held, mark.held))
                and all(map(is_, settings, mark.settings))
                and contents == mark.contents
            )
        except _CHANGED:
            return False

    def _now(self) -> tuple[tuple[Any, ...], Iterator[Any], Iterator[Any], tuple[Any, ...]]:
        """What a mark is made of; both iterators end with `_END`, so that none is the beginning of another."""
        found, tensors = self._found, self._tensors
        numbers = (
            *map(Tensor.data_ptr, tensors),
            *map(_VERSION, tensors),
            *map(Tensor.data_ptr, self._pointers),
            *map(type, self._modules),
            *map(_VERSION, self._outer),
            *map(len, found.spaces),
            any(self._empty),
            self._first is None or self._first.requires_grad,  # PEFT freezes a model before it writes to it
        )
        settings, within, contents = found.state()
        held = chain(*self._holders, map(_FORWARD, found.kinds), within, _END)
        return numbers, held, chain(settings, _END), contents

    def _may_be_alike(self, before: Mark, after: Mark) -> bool:
        """Whether all that changed may have left the digest as it was.

        Frequencies, which `longrope` writes in each call, mostly with what they were; attributes that came or went: a
        forward of ours, say, or a note of transformers'.
        """
        if len(before.numbers) != len(after.numbers):
            return False
        n = len(self._tensors)
        spaces = 2 * n + len(self._pointers) + len(self._modules) + len(self._outer)  # where their sizes begin
        changed = (i for i, (a, b) in enumerate(zip(before.numbers, after.numbers, strict=True)) if a != b)
        is_known = all(i >= spaces or (n <= i < 2 * n and id(self._tensors[i - n]) in self._rewritten) for i in changed)
        return is_known and Mark(after.numbers, before.held, before.settings, before.contents) == after

    # -- reading -------------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self._n_alike = 0
        with self._suspecting:  # before anything is read: what another thread suspects meanwhile must stay
            suspects, self._suspects = self._suspects, set()
        suspects.update(map(id, self._trained))
        if not self._samples.are_in_place:
            self._samples, self._state = Samples(), (None, self._state[1])
            self._hashed.clear()
            self._known.clear()
        if (known := self._recall()) is not None and not (suspects or self._samples.differ()):
            mark, (digest, self._refusal) = known
            self._become(mark, digest)
            return
        edited = self._samples.edited()
        if self._state[0] is None or self.mark() != self._state[0]:
            self._survey()
        # Before the tensors are hashed: what is written meanwhile has to differ from the samples.
        self._samples.take()
        if any(self._is_hashed(tensor) and id(tensor) not in suspects for tensor in edited):
            self._hashed.clear()  # written without a trace, so others may have been, too
            self._known.clear()
        mark = self.mark()
        if self._state[0] is None or not mark.has_structure_of(self._state[0]):
            self._known.clear()
        self._refusal = self._find_refusal()
        digest = self._no_digest() if self._refusal in _UNREADABLE else self._hash_what_changed(suspects)
        self._known[mark] = (digest, self._refusal)
        while len(self._known) > _MAX_STATES:
            self._known.popitem(last=False)
        if self._state[0] is not None:
            torch.clear_autocast_cache()  # which keeps casts of what was edited until the outermost block ends
        self._become(mark, digest)
        self._trained = [tensor for tensor in self._tensors if _holds_gradient(tensor)]

    def _become(self, mark: Mark, digest: str) -> None:
        """Take note of the latest mark; its era is that of the one before if nothing came between that decides states.

        Frequencies that are written anew come before layer 0, in the middle of a call.
        """
        before, known = self._state
        if before is not None:
            has_stayed = known == digest and self._may_be_alike(before, mark)
            mark.era = before.era + (not has_stayed)
        self._state = (mark, digest)

    def _recall(self) -> tuple[Mark, tuple[str, str | None]] | None:
        """Digest and refusal of a state that was there before."""
        mark = self.mark()
        known = self._known.get(mark)
        return None if known is None else (mark, known)

    def _survey(self) -> None:
        """Find out what there is to look at."""
        other = self._without
        left_out = [] if other is None else list(other.modules())
        excluded = set(left_out)
        named = {name: part for name, part in self._module.named_modules() if part not in excluded}
        self._found = Attributes(named, left_out, has_values=other is None)
        parts = self._found.parts
        self._modules = list(parts.values())
        holders = [
            holder
            for part in self._modules
            if not isinstance(part, torch.jit.ScriptModule)
            for holder in (part._parameters, part._buffers, part._modules)
        ]
        self._holders = [holder.values() for holder in holders if holder]
        self._empty = [holder for holder in holders if not holder]
        self._outer = list({id(outer): outer for outer in self._found.wrapped.values()}.values())
        self._find_tuners()
        self._named = self._name_tensors()
        place_of = {id(part): name for name, part in named.items()}
        every = self._module.named_modules(remove_duplicate=False)
        self._ties += [
            f"{name}: is {place_of[id(part)]}" for name, part in every if place_of.get(id(part), name) != name
        ]
        unwatched = {id(one) for one in self._found.tensors.values() if is_readable(one) and one.is_inference()}
        readable = [tensor for _, tensor in self._named if is_readable(tensor)]
        self._tensors = [tensor for tensor in readable if not tensor.is_inference()]
        self._pointers = [tensor for tensor in readable if id(tensor) in unwatched]
        # Under PEFT's layers, those that require gradients change whenever adapters take turns.
        leaves = (tensor for tensor in self._tensors if tensor.is_leaf and tensor.requires_grad)
        self._first = None if self._tuners else next(leaves, None)
        self._rewritten = {
            id(buffer) for part in self._modules if changes_with_length(part) for buffer in part._buffers.values()
        }
        self._samples = Samples(one for one in (*self._tensors, *self._pointers) if id(one) not in self._rewritten)
        self._dropouts = [vars(part) for part in self._modules if _drops(part)]

    def _name_tensors(self) -> list[tuple[str, Tensor]]:
        """Each tensor by one path, preferably of an adapter in force; notes which other paths are tied to it."""
        # Not state_dict(): buffers that are not saved (rotary tables) decide the output as well.
        own = (
            (f"{path}.{name}", tensor)
            for path, part in self._found.parts.items()
            if not isinstance(part, torch.jit.ScriptModule)
            for name, tensor in (*part._parameters.items(), *part._buffers.items())
            if tensor is not None
        )
        outer, named = set(map(id, self._outer)), dict[int, tuple[bool, str, Tensor]]()
        every = [*own, *self._found.tensors.items()]
        for path, tensor in every:
            place = (_begins(f"{path}:", self._left_out), path)
            if id(tensor) not in outer and (id(tensor) not in named or place < named[id(tensor)][:2]):
                named[id(tensor)] = (*place, tensor)
        place_of = {number: path for number, (_, path, _) in named.items()}
        self._ties = [f"{path}: is {place_of[id(one)]}" for path, one in every if place_of.get(id(one), path) != path]
        return [(path, tensor) for _, path, tensor in named.values()]

    def _find_tuners(self) -> None:
        """Look at PEFT's layers, and hash again what came under them or out, or was merged: that is written unseen."""
        before = {(id(tuner.module), tuner.merged): tuner for tuner in self._tuners}
        self._tuners = [Tuner(path, part) for path, part in self._found.parts.items() if is_tuner(part)]
        self._left_out = _shortest(chain.from_iterable(tuner.left_out for tuner in self._tuners))
        self._hooks = [tuner.module._forward_pre_hooks for tuner in self._tuners]
        now = {(id(tuner.module), tuner.merged): tuner for tuner in self._tuners}
        if changed := before.keys() ^ now.keys():
            self._known.clear()
            for key in changed:
                for tensor in (now.get(key) or before[key]).tensors:
                    self._hashed.pop(tensor, None)

    def _find_refusal(self) -> str | None:
        if self._found.unseen or not all(is_readable(tensor) for _, tensor in self._named):
            return "unseen_weights"
        if any(tensor.is_meta for _, tensor in self._named):
            return "meta_weights"
        elsewhere = set(map(id, self._found.tensors.values()))
        is_unwatched = any(tensor.is_inference() and id(tensor) not in elsewhere for _, tensor in self._named)
        return "inference_weights" if is_unwatched else None

    def _hash_what_changed(self, suspects: set[int]) -> str:
        try:
            self._hash(suspects)
        except (NotImplementedError, RuntimeError, TypeError):  # of a kind that nobody knew of
            self._refusal = "unseen_weights"
            return self._no_digest()
        return self._combine()

    def _no_digest(self) -> str:
        """Like no other, so that nothing saved or stored is taken for that of these weights."""
        return f"{self._refusal} {uuid.uuid4().hex}"

    def _hash(self, suspects: set[int]) -> None:
        """Make digests of tensors that have none yet, or may have changed."""
        hashed, fresh = {}, []
        for _, tensor in self._named:
            if self._is_hashed(tensor):
                hashed[id(tensor)] = self._hashed[id(tensor)]
            if id(tensor) not in hashed or id(tensor) in suspects:
                fresh.append((tensor, self._version_of(tensor)))
        for (tensor, version), digest in zip(fresh, digests([tensor for tensor, _ in fresh]), strict=True):
            if id(tensor) in hashed and hashed[id(tensor)][-1] != digest:
                self._known.clear()  # written without a trace: what was known of other settings no longer holds
            # Memory is kept alive as well: what replaces it can then not be mistaken for it by its address.
            hashed[id(tensor)] = (tensor, _storage(tensor), _address(tensor), version, digest)
        self._hashed = hashed

    def _is_hashed(self, tensor: Tensor) -> bool:
        """Whether no edit was counted since a tensor was hashed."""
        known, version = self._hashed.get(id(tensor)), self._version_of(tensor)
        return known is not None and version >= 0 and known[2:4] == (tensor.data_ptr(), version)

    def _version_of(self, tensor: Tensor) -> int:
        """Edits of a tensor, and of the one that wraps it; -1 where they are not counted."""
        if tensor.is_inference():
            return -1
        outer = self._found.wrapped.get(id(tensor))
        return tensor._version + (0 if outer is None else self._version_of(outer))

    def _combine(self) -> str:
        tensors = [
            f"{path}:{tensor.dtype}:{tuple(tensor.shape)}:{self._hashed[id(tensor)][-1]}"
            for path, tensor in self._named
        ]
        lines = chain(tensors, self._found.facts, self._ties)
        if self._tuners:
            in_force = (line for line in lines if not _begins(line, self._left_out))
            lines = chain(in_force, *(tuner.facts for tuner in self._tuners))
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _shortest(prefixes: Iterable[str]) -> list[str]:
    """Prefixes in order, without those that begin with another one."""
    shortest: list[str] = []
    for prefix in sorted(prefixes):
        if not (shortest and prefix.startswith(shortest[-1])):
            shortest.append(prefix)
    return shortest


def _begins(line: str, prefixes: Sequence[str]) -> bool:
    """Whether a line begins with one of `_shortest(...)`, which can only be the last that sorts before it."""
    place = bisect_right(prefixes, line)
    return place > 0 and line.startswith(prefixes[place - 1])


def _holds_gradient(tensor: Tensor) -> bool:
    return tensor.is_leaf and tensor.grad is not None


def _drops(part: nn.Module) -> bool:
    """Whether a module drops at random what passes, in training mode."""
    if isinstance(part, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._NormBase):  # or mixes the rows of a batch
        return True
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(part).items())


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # of a subclass that wraps others, which are looked at themselves
        return None


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0
