"""Recomputes served requests with the weights that served them, several at once.

That costs a third of one by one. Whether a model answers the same for rows together, and padded, is tried first: heads
of the user's own may read padding, and some decoders refuse batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from llmcache.audit.account import Audited
from llmcache.audit.idle_worker import GaveWay
from llmcache.audit.recompute import Origin, Recompute, RecomputeQueue, look_at
from llmcache.bank import Bank
from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.observer import Observer, collect
from llmcache.counters import Counters
from llmcache.errors import CalibrationError
from llmcache.fingerprint import Learned
from llmcache.models.adapters import Trunk
from llmcache.models.weights import Weights
from llmcache.request.observation import Observation
from llmcache.request.rows import Row

if TYPE_CHECKING:
    from llmcache.request.call import Call

#: Runs the model in a namespace, its requests keyed for an engine, on tokenised inputs.
Compute = Callable[[str, str, Mapping[str, Tensor]], Any]

_ROUNDING = 0.02  # of the largest output: that much may differ between rows alone and together, in 16 bits


@dataclass(eq=False)
class Recomputer:
    """Recomputes requests of one wrapped model. Thread-safe."""

    bank: Bank
    fingerprint: Learned  # of the calibration
    trunk: Trunk
    weights: Weights
    calibrated: CalibratedReuse
    observer: Observer
    counters: Counters
    compute: Compute  # runs the model in a namespace on tokenised inputs, in inference mode
    queue: RecomputeQueue

    def add(self, call: "Call", row: Row, drawn: Audited) -> None:
        """Queue a hit of a call that has ended; the model may have been edited since."""
        scope = call.scope
        assert scope is not None
        origin = Origin(scope.weights, self.calibrated.head_digest(), scope.attention)
        self.queue.add(look_at(call, row, drawn, origin))

    def resume(self) -> list[Recompute]:
        """Return requests that waited for other weights and can be computed now."""
        return self.queue.resume(self._origin(), self._is_over) if self.queue.parked and self._can_compute else []

    def run(self) -> Iterator[tuple[Recompute, Observation | None]]:
        """Compute and store the oldest request and others with it; yield each with its observation, or None."""
        looks = self.queue.take()
        # Where adapters take turns, a verdict takes the one that served. Neither that nor training mode is for ever.
        if looks and (looks[0].origin != self._origin() or not self._can_compute):
            self.queue.park([] if self._is_over(looks[0].origin) else looks)
            return
        left = list(looks)
        try:
            yield from self._run_all(looks, left)
        except GaveWay:
            self.queue.put_back(left)
            raise

    def _run_all(
        self, looks: Sequence[Recompute], left: list[Recompute]
    ) -> Iterator[tuple[Recompute, Observation | None]]:
        """Compute requests together, or each alone if that fails; done ones are removed from `left`."""
        try:
            cases = self._compute_again(looks) if looks else []
        except Exception as error:
            if len(looks) > 1:  # one of them may be to blame
                for look in looks:
                    yield from self._run_all([look], left)
                return
            _take_out(looks[0], left)
            if self._can_compute:
                self.counters.look(error)
                yield looks[0], None
            else:  # by now; it tells nothing of the hit
                self.queue.park(looks)
            return
        for look in looks:
            _take_out(look, left)
        if not cases:
            self.queue.park(looks)
        for look, case in zip(looks, cases, strict=False):
            if case.row.key == look.key:
                with self.counters.guard("store what was audited"):
                    if not look.engine:  # states of two engines are not mixed
                        self._keep(case)
                yield look, case
            else:
                self.counters.look(CalibrationError("a request that was served is read as another one now"))
                yield look, None

    def _compute_again(self, looks: Sequence[Recompute]) -> list[Observation]:
        """Compute requests; returns none if the model was edited meanwhile."""
        origin = self._origin()
        mark = self.weights.mark_of(origin.weights)
        if self.queue.are_tried(looks):
            cases = self._run(looks[0], self.queue.inputs(looks))
        else:
            cases = [case for look in looks for case in self._run(look, self.queue.inputs([look]))]
            self.queue.tried(looks, self._come_out_alike(looks, cases))
        return cases if self.weights.stayed(mark, origin.weights) and self._origin() == origin else []

    def _run(self, look: Recompute, inputs: Mapping[str, Tensor]) -> list[Observation]:
        device, dtype, is_on = look.autocast
        with torch.autocast(device, dtype=dtype, enabled=is_on):
            return collect(partial(self.compute, look.namespace, look.engine), self.observer, [inputs])

    def _come_out_alike(self, looks: Sequence[Recompute], alone: Sequence[Observation]) -> bool:
        """Whether requests come out the same together, padded, as alone, but for rounding, and with the same keys."""
        try:
            together = self._run(looks[0], self.queue.inputs(looks, is_trial=True))
        except Exception:  # it takes no batches, maybe
            return False
        return all(
            one.row.key == other.row.key
            and np.abs(one.output - other.output).max() <= _ROUNDING * np.abs(other.output).max()
            for one, other in zip(together, alone, strict=True)
        )

    def _keep(self, case: Observation) -> None:
        """Store a computed request; where sources grow, make it one."""
        self.bank.put([case.entry], case.generation)
        made = self.calibrated.calibration
        if self.calibrated.is_growing:
            self.calibrated.grow(made, {0: case}, {0: self.fingerprint.project([case.tokens])[0][0]})

    def _origin(self) -> Origin:
        """Return the present origin: weights, head and attention."""
        return Origin(self.weights.digest(), self.calibrated.head_digest(), self.trunk.attention)

    @property
    def _can_compute(self) -> bool:
        """Whether the model can be run as it was when it served: it is not in training mode, say."""
        return self.weights.refusal is None and not self.weights.is_training

    def _is_over(self, origin: Origin) -> bool:
        """Whether hits of an origin need no audit any more, since their calibration has ended."""
        made = self.calibrated.calibration
        return made is None or (made.weights, made.head) != (origin.weights, origin.head)


def _take_out(look: Recompute, left: list[Recompute]) -> None:
    left[:] = [other for other in left if other is not look]
