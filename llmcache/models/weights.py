"""Which weights produced a state: a digest of the trunk, of which only edited parts are hashed again.

When weights are checked:

    at open       of each call, until 64 checks in a row found no edit; then the latest digest is taken as it is
    before hits   are served, if the call was opened without a check; if an edit is found, the call is opened again
    after misses  have run, before they are stored; if an edit is found, they are returned but not stored

So an edit that is undone after the call (a disabled adapter, `torch.func.functional_call`) is seen.

What a check compares: address and version counter of each tensor, the modules and their dicts of tensors and
submodules, and the settings in their attributes and configs (`attributes.py`). It takes some 70 microseconds for
BERT-base if repeated, four times that after a model ran. Each tensor has its own digest, so an edit costs hashing what
was edited. The digests of the latest states are kept, so adapters or settings that alternate cost nothing.

What moves no counter: fused optimizers. So after a forward with gradients, all tensors that require gradients are
hashed again. While gradients are held, these tensors are hashed in every call, or, if that takes long, the call is
computed. Other edits without a trace (through `.data`, by another process) are detected by samples (`samples.py`);
after one, everything is hashed again.

Not detected: edits without a trace that no sample meets, edits that both begin and are undone while the trunk runs,
attributes of classes other than `forward`, and globals that functions read. Call `cache.clear()` after one.
"""

import hashlib
import threading
import uuid
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from llmcache.models.attributes import Attributes
from llmcache.models.hashing import digests, is_readable
from llmcache.models.rope import changes_with_length
from llmcache.models.samples import Samples
from llmcache.models.tuners import Tuner, activated, are_by_row, is_tuner, without
from llmcache.support.threads import forkable

# Called hundreds of times in every call.
_VERSION = attrgetter("_version")
_TRAINING = itemgetter("training")
_FORWARD = attrgetter("forward")
_END = (object(),)
_CHANGED = (KeyError, TypeError, AttributeError, RuntimeError)  # raised if an attribute is gone or of another kind

_UNREADABLE = ("meta_weights", "unseen_weights")
_MAX_STATES = 16  # whose digests are kept
_STEADY = 64  # checks without an edit, after which a call may be opened without one
MAX_HELD_BYTES = 16 << 20  # of tensors that hold gradients and are hashed in each call: some 10 ms


class Numbers(NamedTuple):
    """The part of a snapshot that is compared by value."""

    places: tuple[Any, ...]  # addresses of tensors, classes of modules
    versions: tuple[int, ...]  # of tensors, and of those that wrap them
    sizes: tuple[Any, ...]  # numbers of attributes; flags


@dataclass(slots=True, eq=False)
class Snapshot:
    """A snapshot of a module that differs after any edit; `held` and `settings` are compared by identity.

    Both end with `_END`, so that neither can be a prefix of another.
    """

    numbers: Numbers
    held: tuple[Any, ...]  # modules and tensors
    settings: tuple[Any, ...]
    contents: tuple[Any, ...]  # of containers of settings, by value
    edits: int = 0  # seen before it, even momentary ones: between two snapshots with the same number there was none
    #: Digest of the same weights with no adapter active; None if one is active that is no activated LoRA.
    base: str | None = None

    def has_structure_of(self, other: "Snapshot") -> bool:
        """Whether all but settings and contents are equal."""
        return self.numbers == other.numbers and all(map(is_, self.held, other.held))

    def is_alike(self, other: "Snapshot") -> bool:
        """Whether all but numbers are equal, of which there are as many."""
        are_as_many = list(map(len, self.numbers)) == list(map(len, other.numbers))
        are_identical = all(map(is_, self.held, other.held)) and all(map(is_, self.settings, other.settings))
        return are_as_many and are_identical and self.contents == other.contents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self.numbers == other.numbers and self.is_alike(other)

    def __hash__(self) -> int:
        return hash((self.numbers, self.contents, *map(id, self.settings)))


class Look(NamedTuple):
    """The weights at one moment; see the properties of `Weights`."""

    digest: str
    snapshot: Snapshot | None  # None if the digest is no longer the latest
    refusal: str | None
    activated: Sequence[int | None] | None
    modules: Sequence[nn.Module] = ()  # the watched ones; another list whenever one of them is replaced
    is_made: bool = True  # False if the check was skipped and the latest digest is returned


class Weights:
    """Watches the weights and settings of one module. Thread-safe."""

    def __init__(self, module: nn.Module, without: nn.Module | None = None, has_values: bool = True) -> None:
        """Remember the trunk, whose parameters alone decide its hidden states, or a model; `digest` reads it first.

        `without` is a part to leave out: a model without its trunk is the head. `has_values`: numbers, strings and
        containers of them count, too. A custom head may note in them what it did.
        """
        self._module, self._without, self._has_values = module, without, has_values
        self._lock, self._suspects_lock = forkable(threading.Lock()), forkable(threading.Lock())
        self._hashed: dict[int, tuple[Tensor, Any, int, int, str]] = {}
        self._suspects: set[int] = set()
        self._trained: list[Tensor] = []  # they hold gradients: an optimizer step may follow at any time
        self._known: OrderedDict[Snapshot, tuple[str, str | None, str | None]] = OrderedDict()  # digest, refusal, base
        self._state: tuple[Snapshot | None, str] = (None, "")
        self._surveyed: Snapshot | None = None  # the snapshot of the latest survey; a known state needs none
        self._refusal: str | None = None
        self._is_doubted = False  # until all tensors were hashed again: other threads wait for that
        self._n_unchanged = 0
        self._samples = Samples()
        self._tuners: list[Tuner] = []
        self._watch({}, [])

    def digest(self, is_kept: bool = False) -> str:
        """Return the SHA-256 (hex) of names, types, tensors and settings, or a unique string if some cannot be read.

        If the digest will outlive the process (`is_kept`), all samples are checked, not those of one place.
        """
        self._n_unchanged += 1
        if self._is_stale(is_kept):
            with self._lock:
                if self._is_stale(is_kept):  # another thread may have refreshed meanwhile
                    self._refresh()
        return self._state[1]

    def look(self, may_skip_check: bool = False) -> "Look":
        """Return what a call needs to know of the present weights.

        With `may_skip_check` the check is skipped if nothing was edited for long (`Look.is_made`). Then call `stayed`
        before a hit is served and after a miss has run.
        """
        may_train = self._suspects or self._trained
        if may_train and sum(tensor.nbytes for tensor in self._tensors if _holds_gradient(tensor)) > MAX_HELD_BYTES:
            return Look("", None, "gradients_held", None)
        is_skipped = may_skip_check and self.is_steady
        digest = self._state[1] if is_skipped else self.digest()
        snapshot, latest = self._state
        refusal, offsets = self._refusal, None
        if refusal is None and any(map(_TRAINING, self._dropouts)):  # even if the model is not (Monte Carlo dropout)
            refusal = "training"
        if any(self._hooks):
            refusal = refusal or ("adapter_names" if are_by_row(self._hooks) else None)
            if snapshot is None or snapshot.base != digest:  # else no adapter is active
                offsets = activated(self._hooks)
        return Look(digest, snapshot if latest == digest else None, refusal, offsets, self._modules, not is_skipped)

    @property
    def latest(self) -> str:
        """The latest digest, without a check for later edits; "" before the first."""
        return self._state[1]

    def snapshot_of(self, digest: str) -> Snapshot | None:
        """Return the snapshot of a digest; None if the digest is no longer the latest."""
        snapshot, latest = self._state
        return snapshot if latest == digest else None

    def stayed(self, snapshot: Snapshot | None, digest: str) -> bool:
        """Whether nothing was edited, not even for a moment, since a snapshot was taken (`snapshot_of`)."""
        latest = self._state[0]
        if snapshot is None or latest is None or snapshot.edits != latest.edits:  # other weights were seen meanwhile
            return False
        doubts = self._suspects or self._trained or self._is_doubted
        if self._matches(snapshot) and not (doubts or self._samples.differ()):
            return True
        self._n_unchanged, now = 0, self.snapshot()
        return (now == snapshot or self._may_share_digest(snapshot, now)) and self.digest() == digest

    def differs_in_values(self, before: Snapshot) -> bool:
        """Whether nothing but tensor values, in place, was edited since a snapshot was taken."""
        after = self.snapshot()
        return before.numbers.places == after.numbers.places and before.is_alike(after)

    def suspect(self) -> None:
        """Note that a forward with gradients ran, so that an optimizer may write the weights from now on."""
        with self._suspects_lock:
            self._suspects.update(id(tensor) for tensor in self._tensors if tensor.requires_grad)
            for inner, outer in self._found.wrapped.items():
                if outer.requires_grad:
                    self._suspects.add(inner)

    def recheck(self) -> None:
        """Hash every tensor again at the next check: one may have been edited without a trace."""
        with self._suspects_lock:
            self._suspects.update(id(tensor) for _, tensor in self._named)
            self._is_doubted = True

    @property
    def is_steady(self) -> bool:
        """Whether the latest checks found no edit, and no optimizer may write the weights."""
        return self._n_unchanged > _STEADY and not (self._suspects or self._trained)

    @property
    def refusal(self) -> str | None:
        """Why states must not be cached, a key of `bypass.CURES`, as of the latest digest; None if they may be."""
        if self._refusal is not None:
            return self._refusal
        if any(map(_TRAINING, self._dropouts)):  # even if the model is not (Monte Carlo dropout)
            return "training"
        return "adapter_names" if are_by_row(self._hooks) else None

    def adapted(self) -> list[nn.Module]:
        """Return PEFT's layers, as they were when weights were last read; they are read now if they never were."""
        if self._state[0] is None:
            self.digest()
        return [tuner.module for tuner in self._tuners]

    @property
    def activated(self) -> Sequence[int | None] | None:
        """To how many last columns of each row an activated LoRA applies in the current call; mostly None."""
        return activated(self._hooks)

    @property
    def is_training(self) -> bool:
        """Whether the module, or a dropout or batch norm in it, is in training mode."""
        return self._module.training or any(map(_TRAINING, self._dropouts))

    @property
    def unreadable(self) -> str | None:
        """The refusal if weights cannot be told apart from others at all, else None."""
        return self._refusal if self._refusal in _UNREADABLE else None

    # -- comparing -----------------------------------------------------------------------------------------------------

    def _is_stale(self, is_kept: bool) -> bool:
        before = self._state[0]
        if self._suspects or self._trained or before is None or self._is_doubted:
            return True
        return not self._matches(before) or self._samples.differ() or bool(is_kept and self._samples.edited())

    def snapshot(self) -> Snapshot:
        """Return a snapshot, which differs after any edit, even an undone one; no weight is read."""
        try:
            numbers, held, settings, contents = self._current()
            return Snapshot(numbers, tuple(held), tuple(settings), contents)
        except _CHANGED:
            return Snapshot(Numbers((), (), ()), (object(),), (), ())

    def _matches(self, snapshot: Snapshot) -> bool:
        """Whether `snapshot()` would equal this snapshot; it builds nothing, since it runs in each call."""
        try:
            numbers, held, settings, contents = self._current()
            return (
                numbers == snapshot.numbers
                and all(map(is_, held, snapshot.held))
                and all(map(is_, settings, snapshot.settings))
                and contents == snapshot.contents
            )
        except _CHANGED:
            return False

    def _current(self) -> tuple[Numbers, Iterator[Any], Iterator[Any], tuple[Any, ...]]:
        """Return the parts of a snapshot as of now; both iterators end with `_END`, see `Snapshot`."""
        # PEFT freezes a model before it writes.
        is_trainable = self._first_trainable is None or self._first_trainable.requires_grad
        numbers = Numbers(
            (*map(Tensor.data_ptr, self._tensors), *map(Tensor.data_ptr, self._pointers), *map(type, self._modules)),
            (*map(_VERSION, self._tensors), *map(_VERSION, self._outer)),
            (*map(len, self._found.spaces), any(self._empty_holders), is_trainable),
        )
        settings, within, contents = self._found.state()
        held = chain(*self._holders, map(_FORWARD, self._found.kinds), within, _END)
        return numbers, held, chain(settings, _END), contents

    def _may_share_digest(self, before: Snapshot, after: Snapshot) -> bool:
        """Whether all changes are of a kind that may leave the digest as it was.

        These are frequencies, which `longrope` rewrites in each call, mostly with the same values, and attributes that
        were added or removed: a swapped forward, say, or a note of transformers.
        """
        if before.numbers.places != after.numbers.places or not before.is_alike(after):
            return False
        versions = zip((*self._tensors, *self._outer), before.numbers.versions, after.numbers.versions, strict=False)
        return all(first == last or id(tensor) in self._rewritten for tensor, first, last in versions)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self._n_unchanged = 0
        with self._suspects_lock:  # before reading: suspects that other threads add meanwhile must stay
            suspects, self._suspects = self._suspects, set()
        suspects.update(map(id, self._trained))
        if not self._samples.are_in_place:
            self._samples, self._state = Samples(), (None, self._state[1])
            self._hashed.clear()
            self._known.clear()
        snapshot = self.snapshot()
        if (known := self._known.get(snapshot)) is not None and not (suspects or self._samples.differ()):
            digest, self._refusal, snapshot.base = known
            self._set_state(snapshot, digest)
            return
        edited = self._samples.edited()
        if self._state[0] is None or self.snapshot() != self._surveyed:
            self._survey()
        # Before the tensors are hashed, so that a write during hashing differs from the samples.
        self._samples.take()
        if any(self._is_hashed(tensor) and id(tensor) not in suspects for tensor in edited):
            self._hashed.clear()  # written without a trace: others may have been, too
            self._known.clear()
        snapshot = self.snapshot()
        if self._state[0] is None or not snapshot.has_structure_of(self._state[0]):
            self._known.clear()
        self._refusal = self._find_refusal()
        digest = self._no_digest() if self._refusal in _UNREADABLE else self._hash_what_changed(suspects)
        snapshot.base = self._base_of(digest) if self._refusal is None else None
        self._known[snapshot], self._surveyed = (digest, self._refusal, snapshot.base), snapshot
        while len(self._known) > _MAX_STATES:
            self._known.popitem(last=False)
        if self._state[0] is not None:
            torch.clear_autocast_cache()  # it keeps casts of edited tensors until the outermost autocast ends
        self._set_state(snapshot, digest)
        self._trained = [tensor for tensor in self._tensors if _holds_gradient(tensor)]

    def _set_state(self, snapshot: Snapshot, digest: str) -> None:
        """Set the latest snapshot and digest; its number of edits stays if nothing that decides states changed.

        A rewrite of frequencies, before layer 0 in the middle of a call, keeps it.
        """
        before, known = self._state
        if before is not None:
            has_stayed = known == digest and self._may_share_digest(before, snapshot)
            snapshot.edits = before.edits + (not has_stayed)
        self._state = (snapshot, digest)
        self._is_doubted = bool(self._suspects)

    def _survey(self) -> None:
        left_out = [] if self._without is None else list(self._without.modules())
        excluded = set(left_out)
        named = {name: part for name, part in self._module.named_modules() if part not in excluded}
        self._watch(named, left_out)
        place_of = {id(part): name for name, part in named.items()}
        self._ties += [
            f"{name}: is {place_of[id(part)]}"
            for name, part in self._module.named_modules(remove_duplicate=False)
            if place_of.get(id(part), name) != name
        ]

    def _watch(self, named: Mapping[str, nn.Module], left_out: Sequence[nn.Module]) -> None:
        """Watch these modules, by path, and what is found in them but for modules that are left out."""
        self._found = Attributes(named, left_out, self._has_values)
        parts = self._found.parts
        self._modules = list(parts.values())
        holders = [
            holder
            for part in self._modules
            if not isinstance(part, torch.jit.ScriptModule)
            for holder in (part._parameters, part._buffers, part._modules)
        ]
        self._holders = [holder.values() for holder in holders if holder]
        self._empty_holders = [holder for holder in holders if not holder]
        self._outer = list({id(outer): outer for outer in self._found.wrapped.values()}.values())
        self._find_tuners()
        self._named = self._name_tensors()
        unwatched = {id(one) for one in self._found.tensors.values() if is_readable(one) and one.is_inference()}
        readable = [tensor for _, tensor in self._named if is_readable(tensor)]
        self._tensors = [tensor for tensor in readable if not tensor.is_inference()]
        self._pointers = [tensor for tensor in readable if id(tensor) in unwatched]
        # With PEFT, which tensors require gradients changes whenever adapters alternate.
        leaves = (tensor for tensor in self._tensors if tensor.is_leaf and tensor.requires_grad)
        self._first_trainable = None if self._tuners else next(leaves, None)
        self._rewritten = {
            id(buffer) for part in self._modules if changes_with_length(part) for buffer in part._buffers.values()
        }
        self._samples = Samples(one for one in (*self._tensors, *self._pointers) if id(one) not in self._rewritten)
        self._dropouts = [vars(part) for part in self._modules if _changes_in_training(part)]

    def _name_tensors(self) -> list[tuple[str, Tensor]]:
        """Return each tensor with one path, preferably of an active adapter; note its other paths in `_ties`."""
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
            place = (_has_prefix(f"{path}:", self._left_out), path)
            if id(tensor) not in outer and (id(tensor) not in named or place < named[id(tensor)][:2]):
                named[id(tensor)] = (*place, tensor)
        place_of = {number: path for number, (_, path, _) in named.items()}
        #: Other paths to a tensor or module, with the path it is named by.
        self._ties = [f"{path}: is {place_of[id(one)]}" for path, one in every if place_of.get(id(one), path) != path]
        return [(path, tensor) for _, path, tensor in named.values()]

    def _find_tuners(self) -> None:
        """Find PEFT's layers; forget the digests of layers that were added, removed or merged: that leaves no trace."""
        before = {(id(tuner.module), tuner.merged): tuner for tuner in self._tuners}
        self._tuners = [Tuner(path, part) for path, part in self._found.parts.items() if is_tuner(part)]
        self._left_out = _shortest(chain.from_iterable(tuner.left_out for tuner in self._tuners))
        self._hooks: list[Any] = [tuner.module._forward_pre_hooks for tuner in self._tuners]
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
        except (NotImplementedError, RuntimeError, TypeError):  # of an unknown kind of tensor
            self._refusal = "unseen_weights"
            return self._no_digest()
        return self._combine(self._tuners, self._left_out)

    def _no_digest(self) -> str:
        """Return a unique digest, so that no saved or stored state matches these weights."""
        return f"{self._refusal} {uuid.uuid4().hex}"

    def _hash(self, suspects: set[int]) -> None:
        """Hash the tensors that have no digest yet or may have changed."""
        hashed, fresh = {}, []
        for _, tensor in self._named:
            if self._is_hashed(tensor):
                hashed[id(tensor)] = self._hashed[id(tensor)]
            if id(tensor) not in hashed or id(tensor) in suspects:
                fresh.append((tensor, self._version_of(tensor)))
        for (tensor, version), digest in zip(fresh, digests([tensor for tensor, _ in fresh]), strict=True):
            if id(tensor) in hashed and hashed[id(tensor)][-1] != digest:
                self._known.clear()  # written without a trace: digests known for other settings no longer hold
            # The storage is kept alive, so that no replacement gets its address.
            hashed[id(tensor)] = (tensor, *_place_of(tensor), version, digest)
        self._hashed = hashed

    def _is_hashed(self, tensor: Tensor) -> bool:
        """Whether a tensor was hashed, with no edit counted since."""
        known, version = self._hashed.get(id(tensor)), self._version_of(tensor)
        return known is not None and version >= 0 and known[2:4] == (tensor.data_ptr(), version)

    def _version_of(self, tensor: Tensor) -> int:
        """Return the number of edits of a tensor and of the tensors that wrap it; -1 if they are not counted."""
        if tensor.is_inference():
            return -1
        outer = self._found.wrapped.get(id(tensor))
        return tensor._version + (0 if outer is None else self._version_of(outer))

    def _base_of(self, digest: str) -> str | None:
        """Return the digest of these weights with no adapter active; see `Snapshot.base`."""
        if not any(tuner.active for tuner in self._tuners):
            return digest
        if not all(tuner.is_activated for tuner in self._tuners):
            return None
        tuners = [Tuner(tuner.path, tuner.module, is_off=True) for tuner in self._tuners]
        left_out = _shortest(chain.from_iterable(tuner.left_out for tuner in tuners))
        kept = [tie.partition(": is ")[2] for tie in self._ties if not _has_prefix(tie, left_out)]
        is_named_by_adapter = any(_has_prefix(f"{path}:", left_out) for path in kept)  # a tensor of the base
        return None if is_named_by_adapter else self._combine(tuners, left_out)

    def _combine(self, tuners: Sequence[Tuner], left_out: Sequence[str]) -> str:
        """Return the digest, given PEFT's layers and the prefixes of lines that do not count."""
        tensors = [
            f"{path}:{tensor.dtype}:{tuple(tensor.shape)}:{self._hashed[id(tensor)][-1]}"
            for path, tensor in self._named
        ]
        lines = chain(tensors, self._found.facts, self._ties)
        if tuners:
            bases = sorted((tuner.base for tuner in tuners if tuner.base), key=len, reverse=True)
            in_force = (without(line, bases) for line in lines if not _has_prefix(line, left_out))
            lines = chain(in_force, *(tuner.facts for tuner in tuners))
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _shortest(prefixes: Iterable[str]) -> list[str]:
    """Return the prefixes in order, without those that begin with another one."""
    shortest: list[str] = []
    for prefix in sorted(prefixes):
        if not (shortest and prefix.startswith(shortest[-1])):
            shortest.append(prefix)
    return shortest


def _has_prefix(line: str, prefixes: Sequence[str]) -> bool:
    """Whether a line begins with a prefix of `_shortest(...)`; only the last one that sorts before it can match."""
    place = bisect_right(prefixes, line)
    return place > 0 and line.startswith(prefixes[place - 1])


def _holds_gradient(tensor: Tensor) -> bool:
    return tensor.is_leaf and tensor.grad is not None


def _changes_in_training(part: nn.Module) -> bool:
    """Whether training mode makes a module drop values at random, or mix the rows of a batch."""
    if isinstance(part, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._NormBase):
        return True
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(part).items())


def _place_of(tensor: Tensor) -> tuple[Any, int]:
    """Return a tensor's storage and address."""
    try:
        return tensor.untyped_storage(), tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass that wraps other tensors, which are watched themselves
        return None, 0
