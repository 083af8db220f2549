"""What one forward call knows. Made per call and thread, never on the module.

    Inputs     what it was made with; frozen
    Read       what was read of it on the host; dropped when that no longer holds
    Plan       what was decided; dropped when it cannot be carried out
    Progress   how far it has come, what it computed, and what that took

Sizes: B rows, T tokens a row (padding included), n valid tokens of a row, D hidden width.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from llmcache.arrays import Floats
from llmcache.models.mark import Mark
from llmcache.request.prefill import Prefill
from llmcache.request.rows import Row, Scope

#: In place of the layer whose turn it is: one is being run; they were run in another order, and no decision holds.
WITHIN, OUT_OF_ORDER = -1, -2


@dataclass(slots=True)
class Reuse:
    """A decision: one row takes its state at one layer from an entry.

    Attributes:
        row: Row number.
        layer: The layer whose output is taken; it and those below that have not run yet are skipped.
        rung: Which rung decided.
        entry: The stored state at that layer, decoded.
        kv: K and V (H, n, D_h) of skipped layers, by layer; empty when the caller keeps no K/V.
        padding: The stored state at the places that are not valid (T - n, D); None: nothing is known of them.
        padding_kv: K and V of skipped layers at those places (H, T - n, D_h), by layer.
        key: Key of the stored request.
        similarity: How like the fingerprints are; 1.0 for exact reuse; None where they were not compared.
        stores_above: What the layers above compute on top of it is stored as the row's own.
        answer: Signature (S,) of the stored request's answer, where that is known.
        share: Of the risk that was allowed, 0 to 1; 1 where risks cannot be compared so.
        is_output: The entry is the trunk's output, put in when that is there, not at the layer; its tensors and those
            of K/V are this call's own.
    """

    row: int
    layer: int
    rung: str
    entry: Tensor
    kv: Mapping[int, tuple[Tensor, Tensor]]
    key: str
    similarity: float | None = 1.0
    stores_above: bool = False
    answer: Floats | None = None
    share: float = 1.0
    padding: Tensor | None = None
    padding_kv: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    is_output: bool = False


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a forward of the trunk was made with.

    Attributes:
        arguments: The trunk's arguments by name; the mask as 2-D.
        namespace: In force when the call began.
        mask_4d: The mask that was passed, bool (B, 1, T, M), where it is another one.
        n_read: How many columns, from the last on, are read of the output; None: maybe all.
        is_only_if_cached: It is answered from the cache, or not at all.
        may_leave_out: Then it is answered without the rows that are not there, where there are others.
        is_looked_up: Another call has looked its requests up in its namespace, found none, and told of them.
        prefixes_from: A namespace whose stored prefixes serve it as well, or None.
        opened: Clock at its beginning.
    """

    arguments: dict[str, Any]
    namespace: str
    mask_4d: Tensor | None = None
    n_read: int | None = None
    is_only_if_cached: bool = False
    may_leave_out: bool = False
    is_looked_up: bool = False
    prefixes_from: str | None = None
    opened: float = field(default_factory=perf_counter)

    @property
    def is_computed(self) -> bool:
        """Whether it computes all its requests, and looks up those alone that are to be checked."""
        return self.is_looked_up and not self.is_only_if_cached


@dataclass(slots=True)
class Read:
    """What was read of a call on the host.

    Attributes:
        rows: Its requests, with the reason for which one takes no part in caching.
        scope: Theirs.
        entering: Dtype of the states that enter layer 0.
        mark: Of the weights, when the scope was made.
        content: Which tokens carry content, bool (B, T) on the model's device; None where no fingerprint asks.
        features: What the fingerprint is projected from, float32 (B, F0), or None when nothing is searched.
        fingerprint_epoch: Of the banks' fingerprint, when the features were made.
        generation: Of the namespace in the store behind memory, before anything was computed; 0 without one.
        purges: `Purges.now` of the banks, likewise.
        is_whole: Its rows affect each other, so that all are served, of this very call, or none is.
        make: Makes fingerprints and forecasts of them, and notes of rows that have none why they take no part; None
            when nothing is searched.
    """

    rows: Sequence[Row]
    scope: Scope
    entering: torch.dtype
    mark: Mark | None = None
    content: Tensor | None = None
    features: Floats | None = None
    fingerprint_epoch: int = 0
    make: Callable[[], tuple[dict[int, Floats], Floats | None]] | None = None
    generation: int = 0
    purges: int = 0
    is_whole: bool = False
    _made: tuple[dict[int, Floats], Floats | None] | None = None

    def project(self) -> tuple[dict[int, Floats], Floats | None]:
        """Fingerprints and forecasts, which are made once, when first asked for: repeats are served without."""
        if self._made is None:
            self._made = ({}, None) if self.make is None else self.make()
        return self._made

    @property
    def fingerprints(self) -> dict[int, Floats]:
        """What each layer's bank is searched with, float32 (B, F), by layer; empty when nothing is searched.

        Where layers have fingerprints of their own, one is added when its layer is reached.
        """
        return self.project()[0]

    @property
    def forecasts(self) -> Floats | None:
        """What the fingerprint lets expect of the outputs, float32 (B, C), or None."""
        return self.project()[1]


@dataclass(slots=True)
class Plan:
    """What was decided.

    Attributes:
        was_asked: The rungs were asked what may be reused at layer 0.
        left_out: Numbers of the rows that the call is answered without: they are neither counted nor audited.
        reused: Latest decision by row number.
        reused_at: Layer of every decision, in order; in `paper` mode a row may have one at each layer.
        revalidated: Decisions that are not carried out: their rows are computed, and compared with the stored state.
        audited: What the audit knows of the rows that it drew (`Audited`), by number.
        limits: Largest risk that is allowed now, by layer, where that was asked for; else empty.
        choices: Who would serve a row semantically, whatever is allowed (`Choice` or None), by number of the rows that
            were searched for.
        nearest: Similarity of the nearest stored request that a search found, by row number.
        is_served: Every row takes its state at the last layer, so that all layers below are skipped.
        prefill: What the call has to do with blocks, or None.
    """

    was_asked: bool = False
    left_out: frozenset[int] = frozenset()
    reused: dict[int, Reuse] = field(default_factory=dict)
    reused_at: list[int] = field(default_factory=list)
    revalidated: dict[int, Reuse] = field(default_factory=dict)
    audited: dict[int, Any] = field(default_factory=dict)
    limits: Mapping[int, float] = field(default_factory=dict)
    choices: Mapping[int, Any] = field(default_factory=dict)
    nearest: dict[int, float] = field(default_factory=dict)
    is_served: bool = False
    prefill: Prefill | None = None

    def found(self, row: Row, similarity: float) -> None:
        """Take note of how like a stored request is to a row; the most alike counts."""
        self.nearest[row.number] = max(similarity, self.nearest.get(row.number, similarity))

    def cancel(self) -> None:
        """Reuse nothing after all; what was found stays known."""
        self.reused, self.reused_at, self.is_served, self.left_out = {}, [], False, frozenset()


@dataclass(slots=True)
class Progress:
    """How far a call has come, what it computed, and what that took.

    Attributes:
        turn: Number of the layer that is to be run next; or `WITHIN`, or `OUT_OF_ORDER`.
        has_begun: Layer 0 was reached, or the call was answered before.
        is_complete: All layers were passed, and what was decided is carried out.
        kv_cache: The caller's K/V cache object, or None.
        first_output: What layer 0 returned, where it was run for all rows before anything was looked up, else None.
        attention: Output of layer 0's self-attention (B, T, D), where it was asked for.
        states: Last states (B, T, D), as the trunk went on with them.
        captured: Payloads to store: row number, then layer, then named tensors.
        may_store: The weights are still those that it began with.
        n_skipped: Layer executions saved so far, summed over rows.
        lookup_s: Seconds spent on fingerprint, search and decision.
        storing_s: Seconds spent on keeping states and storing misses.
        started: Clock at its beginning, where it is timed for the cost model, else None.
        is_metered: The cost model wants to know how it comes out.
        hashes: Of its requests, where the cost model was asked about them; else empty.
        is_foretold: It takes the whole way since its requests were seen to be held.
        passing: Of a bypassed call, what the meter wants to know of it (`Passing`); else None.
        give_way: Stops the call, which is made by the way, when another one has come; None for other calls.
    """

    turn: int = 0
    has_begun: bool = False
    is_complete: bool = False
    kv_cache: Any = None
    first_output: Any = None
    attention: Tensor | None = None
    states: Tensor | None = None
    captured: dict[int, dict[int, dict[str, Tensor]]] = field(default_factory=dict)
    may_store: bool = True
    n_skipped: int = 0
    lookup_s: float = 0.0
    storing_s: float = 0.0
    started: float | None = None
    is_metered: bool = False
    hashes: Sequence[int] = ()
    is_foretold: bool = False
    passing: Any = None
    give_way: Callable[[], None] | None = None


class Call:
    """One forward of the trunk."""

    __slots__ = ("_read", "inputs", "plan", "progress")

    def __init__(self, inputs: Inputs) -> None:
        """Begin without anything read or decided."""
        self.inputs = inputs
        self._read: Read | None = None
        self.plan = Plan()
        self.progress = Progress()

    @property
    def is_read(self) -> bool:
        """Whether it was read."""
        return self._read is not None

    @property
    def read(self) -> Read:
        """What was read of it, once it was."""
        assert self._read is not None, "the call was not read yet"
        return self._read

    @read.setter
    def read(self, read: Read) -> None:
        self._read = read

    def drop(self) -> None:
        """Forget what was read and decided."""
        self._read, self.plan = None, Plan(prefill=self.plan.prefill)

    @property
    def rows(self) -> Sequence[Row]:
        """Its requests, but for those that are left out; empty until it was read."""
        if self._read is None:
            return ()
        left_out = self.plan.left_out
        return [row for row in self._read.rows if row.number not in left_out] if left_out else self._read.rows

    @property
    def n_rows(self) -> int:
        """B, but for the rows that are left out."""
        return len(self.rows)

    def leave_out_all_but(self, numbers: Collection[int]) -> None:
        """Go on with these rows alone."""
        self.plan.left_out = frozenset(row.number for row in self.read.rows if row.number not in numbers)

    @property
    def active_rows(self) -> list[Row]:
        """Rows that take part in caching."""
        return [row for row in self.rows if not row.bypass_reason]

    @property
    def passes_layers(self) -> bool:
        """Whether nothing is decided or kept at its layers: it is looked up and stored in blocks alone."""
        prefill = self.plan.prefill
        if prefill is None or prefill.served or prefill.repeats or not prefill.keeps_requests:
            return prefill is not None and bool(prefill.served)
        return all(prefill.fits(row) and not row.bypass_reason for row in self.rows)

    @property
    def served(self) -> Mapping[int, int]:
        """Tokens that a stored prefix serves, by row number."""
        return {} if self.plan.prefill is None else self.plan.prefill.served
