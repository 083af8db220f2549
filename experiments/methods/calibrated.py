"""llmcache that begins by learning: the first requests are computed, and with the last of them it calibrates."""

from collections.abc import Mapping
from typing import Any

import torch

from experiments.methods.cached import Cached
from experiments.tasks.workload import Answer, Workload
from llmcache import Calibration
from llmcache.lab import Observation, RiskTarget


class Calibrated(Cached):
    """Learns in each round anew. The references of the workload are the labels that a claim on accuracy asks for."""

    def __init__(self, workload: Workload, options: Mapping[str, Any], learn: int, risk_target: RiskTarget) -> None:
        """Take a copy of the model; `learn` requests, which have one row each, are to show `risk_target`."""
        self.calibration: Calibration | None = None  # the latest one
        self._learn = learn
        self._risk_target = risk_target
        super().__init__(workload, options)

    def begin(self) -> None:
        """Wrap the model anew; nothing was seen yet."""
        super().begin()
        self._observed: list[Observation] = []

    def ask(self, number: int) -> Answer:
        """Compute and learn, or ask the wrapped model. The last request that is learned from waits for the fit."""
        if len(self._observed) == self._learn:
            return super().ask(number)
        assert self._cache is not None
        request = self._workload.requests[number]
        (case,) = self._cache.observe([request.inputs], labels=[request.reference])
        self._observed.append(case)
        self._numbers[case.row.key] = number  # what is observed leaves no outcome
        if len(self._observed) == self._learn:
            assert self._cache.calibrated is not None
            self.calibration = self._cache.calibrated.calibrate(self._observed, self._risk_target)
        return self._workload.answer(torch.from_numpy(case.output)[None], number)
