"""Recomputes served requests, in batches, with the weights that served them.

A batch costs a third of single rows. Whether a model answers alike for a padded batch is tried first: custom heads may
read padding, and some decoders refuse batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcache.errors import CalibrationError
from llmcache.models.adapters import Trunk
from llmcache.models.weights import Weights
from llmcache.request.counters import Counters
from llmcache.request.rows import Row
from llmcache.reuse.audit.account import Audited
from llmcache.reuse.audit.idle_worker import Preempted
from llmcache.reuse.audit.recompute import Origin, Recompute, RecomputeQueue, copy_row
from llmcache.reuse.calibration.calibrated_reuse import CalibratedReuse
from llmcache.reuse.calibration.observer import Observer, collect
from llmcache.reuse.call import Call
from llmcache.reuse.observation import Observation

#: `(namespace, engine, inputs)`: runs the model on tokenised inputs; keys are made for the engine.
Compute = Callable[[str, str, Mapping[str, Tensor]], Any]

_ROUNDING = 0.02  # share of the largest output by which a batch may differ from single rows, in 16 bits


@dataclass(eq=False)
class Recomputer:
    """Recomputes requests of one wrapped model. Thread-safe."""

    trunk: Trunk
    weights: Weights
    calibrated: CalibratedReuse
    observer: Observer
    counters: Counters
    compute: Compute  # in inference mode
    queue: RecomputeQueue

    def add(self, call: Call, row: Row, drawn: Audited) -> None:
        """Queue a hit of a finished call; the model may have been edited since."""
        scope = call.scope
        origin = Origin(scope.weights, self.calibrated.head.digest(), scope.attention)
        self.queue.add(copy_row(call, row, drawn, origin))

    def resume(self) -> list[Recompute]:
        """Requeue and return the requests that waited for other weights and can be computed now."""
        return self.queue.resume(self._origin(), self._has_ended) if self.queue.parked and self._can_compute else []

    def run(self) -> Iterator[tuple[Recompute, Observation | None]]:
        """Compute and store the oldest request's batch; yield each request with its observation, None if it failed."""
        tasks = self.queue.take()
        # A verdict needs the adapter that served, and no training mode. Both may come back, so the requests wait.
        if tasks and (tasks[0].origin != self._origin() or not self._can_compute):
            self.queue.park([] if self._has_ended(tasks[0].origin) else tasks)
            return
        left = list(tasks)
        try:
            yield from self._run_all(tasks, left)
        except Preempted:
            self.queue.put_back(left)
            raise

    def _run_all(
        self, tasks: Sequence[Recompute], left: list[Recompute]
    ) -> Iterator[tuple[Recompute, Observation | None]]:
        """Compute requests in a batch, or each alone if that fails; remove finished ones from `left`."""
        try:
            cases = self._recompute(tasks) if tasks else []
        except Exception as error:
            if len(tasks) > 1:  # one of them may be to blame
                for task in tasks:
                    yield from self._run_all([task], left)
                return
            left.remove(tasks[0])
            if self._can_compute:
                self.counters.look(error)
                yield tasks[0], None
            else:  # the model changed meanwhile; the failure says nothing about the hit
                self.queue.park(tasks)
            return
        for task in tasks:
            left.remove(task)
        if not cases:
            self.queue.park(tasks)
        for task, case in zip(tasks, cases, strict=False):
            if case.row.key == task.key:
                case.generation = task.generation
                with self.counters.guard("store an audited request"):
                    if not task.engine:  # states of two engines are not mixed
                        self._store(case)
                yield task, case
            else:
                self.counters.look(CalibrationError("a request that was served has another key now"))
                yield task, None

    def _recompute(self, tasks: Sequence[Recompute]) -> list[Observation]:
        """Compute requests; return none of them if the model was edited meanwhile."""
        origin = self._origin()
        snapshot = self.weights.snapshot_of(origin.weights)
        if self.queue.may_batch(tasks):
            cases = self._run(tasks[0], self.queue.inputs(tasks))
        else:
            cases = [case for task in tasks for case in self._run(task, self.queue.inputs([task]))]
            self.queue.note_trial(tasks, self._match_alone(tasks, cases))
        return cases if self.weights.stayed(snapshot, origin.weights) and self._origin() == origin else []

    def _run(self, task: Recompute, inputs: Mapping[str, Tensor]) -> list[Observation]:
        device, dtype, is_on = task.autocast
        with torch.autocast(device, dtype=dtype, enabled=is_on):
            compute = partial(self.compute, task.namespace, task.engine)
            return collect(compute, self.observer, [inputs], is_drafted=self.calibrated.may_learn)

    def _match_alone(self, tasks: Sequence[Recompute], alone: Sequence[Observation]) -> bool:
        """Whether a padded batch gives the same outputs as each row alone, but for rounding, and the same keys."""
        try:
            together = self._run(tasks[0], self.queue.inputs(tasks, is_trial=True))
        except Exception:  # the model may not take batches
            return False
        return all(
            batched.row.key == other.row.key
            and np.abs(batched.output - other.output).max() <= _ROUNDING * np.abs(other.output).max()
            for batched, other in zip(together, alone, strict=True)
        )

    def _store(self, case: Observation) -> None:
        """Store a computed request; if sources grow, make it one."""
        calibration, fitter = self.calibrated.calibration, self.calibrated.fitter
        fitter.bank.put([case.entry], case.generation)
        if self.calibrated.is_growing:
            self.calibrated.grow(calibration, {0: case}, {0: fitter.fingerprint.project([case.tokens])[0][0]})

    def _origin(self) -> Origin:
        return Origin(self.weights.digest(), self.calibrated.head.digest(), self.trunk.attention)

    @property
    def _can_compute(self) -> bool:
        """Whether the model computes as in service: it is not in training mode, for instance."""
        return self.weights.refusal is None and not self.weights.is_training

    def _has_ended(self, origin: Origin) -> bool:
        """Whether the calibration that served hits of an origin has ended, so that they need no audit."""
        calibration = self.calibrated.calibration
        return calibration is None or (calibration.weights, calibration.head) != (origin.weights, origin.head)
