"""Outputs of bypassed calls, kept as they came out: a request that comes again is served although it was not stored.

Reading, keying and storing a request costs a small model's call a tenth of its time. While calls are bypassed, less is
done: its tokens and last states are copied, under a hash of the tokens. Once one of them comes again, the call it came
with is read, keyed and stored as any other would have been, and the exact rung serves it.

That takes calls of which nothing has to be known but tokens and last states: where the fast path knows how the trunk
packs its output, and no K/V is kept. Of others only hashes are known; they are stored when they come again.

Sizes: B rows, T tokens, D hidden width.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from llmcache.execution.fast_path import FastPath, Kind, OutputTemplate
from llmcache.execution.old_call import Call, Inputs
from llmcache.models.arguments import DECIDING
from llmcache.models.mark import Mark
from llmcache.threads import forkable

if TYPE_CHECKING:  # who import `parts`, which holds this
    from llmcache.execution.capture import StateCapture
    from llmcache.execution.components import Components
    from llmcache.execution.lookup import Lookup

_CHECKS_EVERY = 16  # records after which it looks at what banks have left, if it has not filled that before
_KNOWN = 65_536  # requests whose place is remembered


class Prepared(NamedTuple):
    """What is known of a call before it is computed.

    Attributes:
        template: How its output will be packed.
        setting: What else decides states: see `BypassRecorder._setting`.
        mark: Of the weights, whose digest is that of `template`.
        purges: How many there had been: `Purges.now`.
    """

    template: OutputTemplate
    setting: tuple[Kind, str, bool]
    mark: Mark
    purges: int


@dataclass(slots=True, eq=False)
class Recorded:
    """A call that was bypassed.

    Attributes:
        namespace: In force for it.
        arguments: The trunk's that decide states, copied, and how it was asked to pack its output.
        states: Last states (B, T, D), or what the payload takes of them; copied.
        kept: What was known of it before.
        hashes: Of its rows.
        nbytes: Bytes of its tensors.
    """

    namespace: str
    arguments: dict[str, Any]
    states: Tensor
    kept: Prepared
    hashes: Sequence[int]
    nbytes: int


class BypassRecorder:
    """Of one wrapped model. Thread-safe; what is held is within what banks have left of their budgets."""

    def __init__(self, parts: "Components", lookup: "Lookup", fast_path: FastPath, capture: "StateCapture") -> None:
        """Begin with none.

        Args:
            parts: What calls are served with.
            lookup: Reads calls.
            fast_path: Knows how the trunk packs its output.
            capture: Stores what is recorded.
        """
        self._components = parts
        self._lookup = lookup
        self._fast_path = fast_path
        self._capture = capture
        self._last = parts.trunk.depth - 1
        self._recorded: dict[Recorded, None] = {}  # oldest first
        self._places: dict[int, Recorded | str] = {}  # by hash: a record, or the key of a stored request
        self._lock = forkable(threading.RLock())
        self._can_record: tuple[Any, bool] | None = None  # with which fingerprint, and whether
        self._left = 0  # bytes that banks had left when that was looked at
        self.nbytes = 0
        self.n_rows = 0

    @property
    def can_record(self) -> bool:
        """Whether calls may be recorded at all: repeats are served losslessly, and no K/V is kept."""
        parts = self._components
        if self._can_record is None or self._can_record[0] is not parts.fingerprint:
            can_record = (
                parts.serves_repeats and self._last in parts.banks.layer_banks and not self._lookup.needs_states
            )
            self._can_record = (parts.fingerprint, can_record)
        return self._can_record[1]

    def __contains__(self, request: int) -> bool:
        """Whether it is known where a request is, or was, by its hash."""
        return request in self._places

    def count(self, hashes: Sequence[int]) -> int:
        """How many of these requests are stored or recorded, and could be served."""
        places, holds = self._places, self._components.holds
        found = (places.get(one) for one in hashes)
        return sum(place is not None and (not isinstance(place, str) or holds(place)) for place in found)

    def stored(self, hashes: Sequence[int], keys: Sequence[str]) -> None:
        """Take note that requests are stored, under these keys."""
        with self._lock:
            for one, key in zip(hashes, keys, strict=True):
                self._place(one, key)

    def takes(self, call: Call) -> bool:
        """Whether calls like this one are recorded when they are bypassed."""
        return self._template(call, self._fast_path.kind(call)) is not None

    def prepare(self, call: Call) -> Prepared | None:
        """What has to be known of a call that is about to be bypassed; None where it cannot be recorded."""
        weights, setting = self._components.weights, self._setting(call)
        if (template := self._template(call, setting[0])) is None:
            return None
        mark = weights.mark_of(template.weights)  # of the latest look at them; `take` looks whether it still holds
        if mark is None or weights.refusal is not None:
            return None
        return Prepared(template, setting, mark, self._components.banks.purges.now)

    def take(self, call: Call, kept: Prepared, output: Any) -> None:
        """Record a bypassed call, with the trunk's output."""
        states, template, ids, hashes = (
            output[0],
            kept.template,
            call.inputs.arguments["input_ids"],
            call.progress.hashes,
        )
        if states.dtype != template.dtype or states.shape != (*ids.shape, template.width):
            return
        if not self._components.weights.stayed(kept.mark, template.weights):  # edited since, be they restored
            return
        with torch.inference_mode(False), torch.no_grad():  # normal tensors, which a store can keep as they are
            states = (states[:, :1] if self._components.payload.name == "cls" else states).clone()
            arguments, nbytes = dict(call.inputs.arguments), states.nbytes
            for name in DECIDING:
                if (tensor := arguments.get(name)) is not None:
                    arguments[name] = tensor.clone()
                    nbytes += tensor.nbytes
        note = Recorded(call.inputs.namespace, arguments, states, kept, hashes, nbytes)
        with self._lock:
            if self._components.banks.purges.has_come(note.namespace, kept.purges):
                return
            self._recorded[note] = None
            self.nbytes += note.nbytes
            self.n_rows += len(hashes)
            for one in hashes:
                self._place(one, note)
            self._left -= nbytes
            if self._left < 0 or len(self._recorded) % _CHECKS_EVERY == 0:
                while self._recorded and self._is_over:
                    self._drop(next(iter(self._recorded)))

    def admit(self, call: Call, hashes: Sequence[int]) -> None:
        """Store what was recorded of the requests of a call, with all that they came with."""
        found = {place: None for one in hashes if isinstance(place := self._places.get(one), Recorded)}
        if not found:
            return
        weights = self._components.weights.digest()
        for note in found:
            if note.kept.setting == self._setting(call) and note.kept.template.weights == weights:
                self._admit(note)

    def clear(self, namespace: str | None = None) -> None:
        """Forget all, or what is of one namespace, whose requests have left the banks."""
        with self._lock:
            for note in [note for note in self._recorded if namespace in (None, note.namespace)]:
                self._drop(note)
            holds = self._components.holds
            left = [one for one, place in self._places.items() if isinstance(place, str) and not holds(place)]
            for one in list(self._places) if namespace is None else left:
                del self._places[one]

    def _admit(self, note: Recorded) -> None:
        call = Call(Inputs(note.arguments, note.namespace))
        reason = self._lookup.read(call, None, note.kept.template.entering)
        with self._lock:
            if note not in self._recorded:  # another thread did it, or its namespace is found to be purged only now
                return
            self._drop(note)
        if reason is None and call.read.scope.weights == note.kept.template.weights:
            self._capture.capture(call, self._last, note.states)
            self._capture.store(call)
            self.stored(note.hashes, [row.key for row in call.rows])

    def _template(self, call: Call, kind: Kind) -> OutputTemplate | None:
        """How the output of a call of that kind will be packed, where it can be recorded."""
        can_record = call.inputs.mask_4d is None and call.progress.hashes and self.can_record
        return self._fast_path.known(kind) if can_record else None

    def _setting(self, call: Call) -> tuple[Kind, str, bool]:
        """What decides states beside tokens and weights, and how they are packed."""
        return self._fast_path.kind(call), self._components.trunk.attention

    @property
    def _is_over(self) -> bool:
        """Whether more is held than banks have room for."""
        bank, banks = self._components.banks.layer_banks[self._last], self._components.banks
        self._left = sum(one.max_bytes for one in banks.layer_banks.values()) - banks.nbytes - self.nbytes
        return self._left < 0 or (bank.max_entries is not None and self.n_rows > bank.max_entries - len(bank))

    def _place(self, one: int, place: Recorded | str) -> None:
        self._places[one] = place
        if len(self._places) > _KNOWN:
            del self._places[next(iter(self._places))]

    def _drop(self, note: Recorded) -> None:
        del self._recorded[note]
        self.nbytes -= note.nbytes
        self.n_rows -= len(note.hashes)
        for one in note.hashes:
            if self._places.get(one) is note:
                del self._places[one]
