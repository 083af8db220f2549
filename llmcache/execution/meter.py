"""Asks the cost model about each call, and tells it what the call took."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import compress
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from llmcache.execution.components import Components
from llmcache.execution.cost import PROBE, none_held
from llmcache.execution.length_costs import Times
from llmcache.execution.old_call import Call
from llmcache.execution.recorder import Prepared
from llmcache.models.tracing import is_traced


@dataclass(frozen=True, slots=True)
class Passing:
    """A bypassed call, on the host.

    Attributes:
        started: Clock at its beginning.
        asking_s: Seconds spent on asking whether it can be recorded.
        kept: What is known of it before it is computed, if it is to be recorded.
        is_timed: The cost model wants to know what it takes.
    """

    started: float
    asking_s: float
    kept: Prepared | None
    is_timed: bool


class Meter:
    """Between the calls of one wrapped model and its cost model. Thread-safe.

    On an accelerator, kernels run after the host has gone on, so that the host's clock means something only once they
    are waited for. That is done for one call in 64; tokens are not read, which would wait as well.
    """

    def __init__(
        self,
        parts: Components,
        clock: Callable[[], float] = perf_counter,
        wait: Callable[[torch.device], None] = torch.accelerator.synchronize,
    ) -> None:
        """Prepare for calls.

        Args:
            parts: What calls are served with.
            clock: Seconds.
            wait: Returns once an accelerator has done what it was given. Not called where all is on the host.
        """
        self._components = parts
        self._clock = clock
        self._wait = wait
        self._n_begun = 0

    def lets_pass(self, ids: Any, namespace: str) -> bool:
        """Whether a call is bypassed without a further look at it: a short way for most that are.

        Args:
            ids: What the trunk was passed as `input_ids`.
            namespace: In force for the call.
        """
        parts = self._components
        cost, recorder = parts.cost, parts.recorder
        if cost is None or not cost.has_bypassed or parts.observer is not None or parts.audit is not None:
            return False
        if type(ids) is not Tensor or not ids.is_cpu or torch.is_grad_enabled() or parts.trunk.module.training:
            return False
        if torch._C._is_tracing() or is_traced() or self._is_learning:
            return False
        rows = ids.tolist()
        if len(rows) != 1:
            return False
        request = _hash(namespace, rows[0])
        if (
            recorder is not None and request in recorder
        ):  # which a cost model does not know that has forgotten who asked
            return False
        return cost.lets_pass(len(rows[0]), request)

    def ask(self, call: Call) -> str | None:
        """Why a call is to bypass the cache, or None; starts the clock of one that is not."""
        cost, ids = self._components.cost, call.inputs.arguments["input_ids"]
        if cost is None or ids.numel() == 0 or self._components.is_collecting:
            return None
        if self._is_learning:
            cost.restart()  # what was seen before does not hold of what can be served afterwards
            return None
        started = self._clock()
        call.progress.hashes = _hashes(call) if ids.is_cpu else ()
        recorder = self._components.recorder
        held = none_held if recorder is None else recorder.count
        searches = self._components.fingerprint is not None
        compares = ids.is_cpu and self._compares and not call.inputs.is_only_if_cached
        verdict = cost.judge(ids.numel(), ids.shape[0], call.progress.hashes, held, compares, searches)
        if not verdict.is_worthwhile:
            if ids.is_cpu and (verdict.is_recorded or verdict.is_timed):
                asked = self._clock()
                kept = recorder.prepare(call) if recorder is not None and verdict.is_recorded else None
                begun = self._clock()
                call.progress.passing = Passing(begun, begun - asked, kept, verdict.is_timed)
            return "compared" if verdict.is_compared else "not_worthwhile"
        if recorder is not None:
            recorder.admit(call, call.progress.hashes)
        call.progress.is_metered, call.progress.is_foretold = True, verdict.is_foretold
        if ids.is_cpu:
            call.progress.started = started
            call.progress.lookup_s += self._clock() - started
        elif verdict.is_probe:
            call.progress.started = self._done(ids)
        return None

    def may_be_held(self, call: Call) -> bool:
        """Whether it is worth looking for a call that is answered from the cache or not at all.

        It is not where such calls are bypassed and none of its requests is known. What was recorded of them is stored.
        """
        cost, recorder, ids = self._components.cost, self._components.recorder, call.inputs.arguments["input_ids"]
        if cost is None or recorder is None:
            return True
        if not ids.is_cpu:  # what is known is not asked, which would wait
            return not (call.inputs.may_leave_out and cost.is_bypassed(ids.numel()))
        hashes = call.progress.hashes = _hashes(call)
        if cost.is_bypassed(ids.numel()):
            if not recorder.count(hashes):
                return False
            call.progress.is_foretold = True
        recorder.admit(call, hashes)
        return True

    def ask_late(self, call: Call) -> None:
        """Tell the cost model of such a call, which is answered: whatever it says of others like it."""
        if call.plan.left_out:
            self.spent(call, (self._clock() - call.inputs.opened) * len(call.plan.left_out) / len(call.read.rows))
        if self.ask(call) is None and call.progress.started is not None:
            call.progress.started = call.inputs.opened

    def missed(self, call: Call) -> None:
        """Tell it of such a call that is not answered, whose requests are then computed.

        Whoever computes them tells of them, unless rows may be left out: then they come within `looked_up`.
        """
        self.spent(call, self._clock() - call.inputs.opened)
        is_to_tell = call.inputs.may_leave_out and call.plan.was_asked and not call.inputs.is_looked_up
        if is_to_tell and not call.plan.reused and self.ask(call) is None:
            call.progress.started = None
            self.took(call, 0.0)

    def begin(self, call: Call) -> None:
        """Start the clock of a call whose requests were looked up by another one, which told of them."""
        ids = call.inputs.arguments["input_ids"]
        if self._components.cost is None or self._is_learning:
            return
        call.progress.is_metered = True
        self._n_begun += 1
        if ids.is_cpu:
            call.progress.hashes, call.progress.started = _hashes(call), self._clock()
        elif self._n_begun % PROBE == 0:
            call.progress.started = self._done(ids)

    def passed(self, call: Call, output: Any) -> None:
        """Take in a call that has been bypassed, with the trunk's output, None where that failed."""
        cost, recorder, passing = self._components.cost, self._components.recorder, call.progress.passing
        if cost is None or passing is None or output is None:
            return
        ended, recording_s = self._clock(), None
        if recorder is not None and passing.kept is not None:
            recorder.take(call, passing.kept, output)
            recording_s = passing.asking_s + self._clock() - ended
        if recording_s is None and not passing.is_timed:
            return
        cost.passed(call.inputs.arguments["input_ids"].numel(), ended - passing.started, recording_s)

    def spent(self, call: Call, seconds: float) -> None:
        """Take in what else was done for the cache's sake, before a call or after it."""
        if self._components.cost is not None:
            self._components.cost.spent(call.inputs.arguments["input_ids"].numel(), seconds)

    def waited(self, call: Call, seconds: float) -> None:
        """Leave out of what a call takes a time in which others had the model."""
        if call.progress.started is not None:
            call.progress.started += seconds

    def now(self, call: Call) -> float:
        """The time at which the call's work so far is done, if the call is timed."""
        return self._clock() if call.progress.started is None else self._done(call.inputs.arguments["input_ids"])

    def took(self, call: Call, ended: float) -> None:
        """Tell what became of a call that took the whole way, until that time."""
        cost, ids = self._components.cost, call.inputs.arguments["input_ids"]
        if cost is None or not call.progress.is_metered:
            return
        times = (
            None
            if call.progress.started is None
            else Times(ended - call.progress.started, call.progress.lookup_s, call.progress.storing_s)
        )
        n_hits = len(call.plan.reused) + len(call.served)
        if call.inputs.is_computed:
            cost.computed(ids.numel(), times)
        else:
            n_rows = call.n_rows if call.inputs.is_looked_up else ids.shape[0]
            would_record = partial(self._would_record, call)
            cost.took(ids.numel(), n_rows, n_hits, times, call.progress.is_foretold, would_record)
        if self._components.recorder is not None and (hashes := call.progress.hashes):
            held = [row for row in call.rows if row.number in call.plan.reused or not call.inputs.is_only_if_cached]
            self._components.recorder.stored([hashes[row.number] for row in held], [row.key for row in held])

    def _would_record(self, call: Call) -> bool:
        """Whether a call could have been recorded, so that its repeats had been served; others would not have been."""
        recorder = self._components.recorder
        return recorder is not None and self._components.fingerprint is None and recorder.takes(call)

    def _done(self, ids: Tensor) -> float:
        """The time at which the device of these ids has done what it was given."""
        if not ids.is_cpu:
            self._wait(ids.device)
        return self._clock()

    @property
    def _compares(self) -> bool:
        """Whether calls are to be bypassed now and then, to be compared with those that are searched for and audited.

        These cost more than can be told from within calls. An accelerator would have to be waited for.
        """
        return self._components.calibrated is not None and self._components.calibrated.is_serving(
            self._components.weights.latest
        )

    @property
    def _is_learning(self) -> bool:
        """Whether calls are computed so that something is learned of them: what they cost now says nothing of later."""
        parts = self._components
        if parts.calibrated is not None:
            return parts.calibrated.is_learning
        return parts.fingerprint is not None and parts.fingerprint.n_fit > 0


def _hashes(call: Call) -> list[int]:
    """What tells the requests of a call apart, by row; its tokens are on the host."""
    ids, mask = call.inputs.arguments["input_ids"], call.inputs.arguments.get("attention_mask")
    rows = ids.tolist()
    if mask is None or len(rows) == 1:
        return [_hash(call.inputs.namespace, row) for row in rows]
    # The padding of a row in a batch hangs on the others.
    return [_hash(call.inputs.namespace, compress(row, valid)) for row, valid in zip(rows, mask.tolist(), strict=True)]


def _hash(namespace: str, tokens: Iterable[int]) -> int:
    return hash((namespace, *tokens))  # of a list: to make an array of NumPy's takes thrice as long
