"""Turns approximate reuse on: makes a wrapped model ready to learn, runs it on requests, has these calibrated."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from llmcache.assembly import make_calibrated
from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.calibration import Calibration, check_size
from llmcache.calibration.inputs import Requests, n_rows, numbered, tokenised
from llmcache.calibration.observer import Observer, collect
from llmcache.calibration.risk_target import Metric, MetricName, RiskTarget, Sources
from llmcache.config import CacheConfig
from llmcache.errors import ConfigError, WrapError
from llmcache.execution.components import Components
from llmcache.execution.flow import Flow
from llmcache.matching.answers import Reading
from llmcache.models.hooks import Installed, install, watch
from llmcache.models.twin import make_replicas
from llmcache.request.observation import Observation
from llmcache.request.variables import setting
from llmcache.threads import forkable


@dataclass(eq=False)
class Calibrator:
    """Of one cache. One thread at a time calibrates or observes; the others wait. Nothing is hooked before `start`."""

    model: nn.Module
    config: CacheConfig
    components: Components  # what learns is added to them
    flow: Flow  # is told what the model puts out
    installed: Installed
    tokenizer: Any  # of requests that are texts
    answer_of: Reading  # finds the answer in what the model returned
    # Reentrant: requests that are given may be made by observing others.
    _lock: AbstractContextManager[Any] = field(
        init=False, default_factory=lambda: forkable(threading.RLock(), is_waited_for=False)
    )

    def start(self) -> None:
        if self.components.observer is not None:
            self._watch(self.components.observer)
        if self.config.learn is not None or self.config.share_calibration:
            self.begin()

    def begin(self) -> None:
        """Make the cache ready to be calibrated, unless it is: hook what it must hear of the model."""
        if self.components.calibrated is not None:
            return
        calibrated = make_calibrated(
            self.components, self.model, self.config, self.tokenizer, self.answer_of, self._compute_in
        )
        self._watch(calibrated.observer)
        calibrated.add_to(self.components)

    def calibrate(self, requests: Requests, labels: Sequence[Any] | None, risk_target: RiskTarget) -> Calibration:
        """Compute requests, learn from part of them, and choose what may be reused; see `LLMCache.calibrate`."""
        with self._lock:
            calibrated, observer = self._learners()
            calibrated.end()
            if self.components.cost is not None:
                self.components.cost.restart()  # what was seen so far does not hold of what can be served afterwards
            inputs = list(tokenised(requests, self.tokenizer, self.components.trunk))
            n = sum(map(n_rows, inputs))
            told = numbered(labels, n, self.model)
            check_size(n, risk_target.max_drop, risk_target.delta, risk_target.metric)
            # What the first answer can tell is not told after minutes of computing the others.
            observed = collect(self._compute, observer, inputs[:1], is_learned_from=True)
            calibrated.check(observed[0], told, risk_target)
            observed += collect(self._compute, observer, inputs[1:], first=1, is_learned_from=True)
            with calibrated.held():  # no purge comes between
                made = calibrated.calibrate(calibrated.remaining(_labelled(observed, told)), risk_target)
            self.components.share()
            return made

    def observe(self, requests: Requests, labels: Sequence[Any] | None) -> list[Observation]:
        with self._lock:
            observer = self._learners()[1]
            inputs = tokenised(requests, self.tokenizer, self.components.trunk)
            observed = collect(self._compute, observer, inputs, is_learned_from=True)
            return _labelled(observed, numbered(labels, len(observed), self.model))

    def _learners(self) -> tuple[CalibratedReuse, Observer]:
        if self.installed.is_empty:
            raise WrapError("this cache was unwrapped: wrap the model again, and calibrate that cache")
        self.begin()
        assert self.components.calibrated is not None and self.components.observer is not None
        return self.components.calibrated, self.components.observer

    def _compute(self, inputs: Mapping[str, Any], model: nn.Module | None = None) -> Any:
        """Call a model with tokenised inputs, which sentence-transformers takes in one argument."""
        model = self.model if model is None else model
        with torch.inference_mode():
            return model(dict(inputs)) if self.components.head.name == "sentence embedding" else model(**inputs)

    def _compute_in(self, namespace: str, inputs: Mapping[str, Any]) -> Any:
        with setting(self.flow.namespace, namespace):
            return self._compute(inputs, self._without_hooks())

    def _without_hooks(self) -> nn.Module:
        """A model of the same tensors that the cache sees, and hooks of users do not."""
        try:
            replicas = make_replicas(self.model)
        except ConfigError:  # only the model itself computes as it does
            return self.model
        trunk, observer = self.components.trunk, self.components.observer
        norm = None if trunk.norm is None else replicas[trunk.norm]
        layers = tuple(replicas[layer] for layer in trunk.layers)
        trunk = replace(trunk, module=replicas[trunk.module], layers=layers, norm=norm)
        install(trunk, self.flow)
        model = replicas[self.model]
        if observer is not None and not observer.answers.reads_payload:
            watch(model, self.flow, trunk)
        return model

    def _watch(self, observer: Observer) -> None:
        """See what the whole model puts out, where answers are read from that."""
        if not observer.answers.reads_payload:
            self.installed.add(watch(self.model, self.flow, self.components.trunk).remove)


def _labelled(observed: Sequence[Observation], labels: Sequence[Any]) -> list[Observation]:
    return [replace(case, label=label) for case, label in zip(observed, labels, strict=True)]


def make_claim(
    config: CacheConfig,
    max_drop: float | None,
    delta: float | None,
    metric: MetricName | Metric,
    sources: Sources | None,
    seed: int,
) -> RiskTarget:
    """What a calibration is to show; what is None is as in the settings."""
    risk_target = RiskTarget(
        config.max_drop if max_drop is None else max_drop,
        config.delta if delta is None else delta,
        metric,
        config.sources if sources is None else sources,
        seed,
    )
    if config.recalibrate is not None and risk_target.metric != "changed":
        raise ConfigError(
            f"recalibrate={config.recalibrate} with metric {risk_target.name!r}: requests in service come without "
            "labels; use metric 'changed', or leave recalibrate out"
        )
    return risk_target
