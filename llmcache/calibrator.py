"""Turns approximate reuse on: makes a wrapped model ready to learn, runs it on requests, has these calibrated."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from llmcache.models.hooks import Installed, listen, watch
from llmcache.request.observation import Observation
from llmcache.request.variables import setting


class Calibrator:
    """Of one cache. One thread at a time calibrates or observes; the others wait."""

    def __init__(
        self,
        model: nn.Module,
        config: CacheConfig,
        parts: Components,
        flow: Flow,
        installed: Installed,
        tokenizer: Any,
        answer_of: Reading,
    ) -> None:
        """Prepare; nothing is hooked before `start`.

        Args:
            model: Wrapped.
            config: Settings.
            parts: What calls are served with; what learns is added to them.
            flow: Is told what the model puts out.
            installed: What hangs on the model.
            tokenizer: Of requests that are texts; None if there are none.
            answer_of: Finds the answer in what the model returned.
        """
        self._model = model
        self._config = config
        self._components = parts
        self._flow = flow
        self._installed = installed
        self._tokenizer = tokenizer
        self._answer_of = answer_of
        self._lock = threading.RLock()  # requests that are given may be made by observing others

    def start(self) -> None:
        """Do what the first call needs: hear the answers that decisions compare, or begin to learn.

        Raises:
            ConfigError: A setting is wrong, or does not suit the model.
            UnsafeReuseError: It is to learn, and the head answers token by token.
        """
        if self._components.observer is not None:
            self._watch(self._components.observer)
        if self._config.learn is not None:
            self.begin()

    def begin(self) -> None:
        """Make the cache ready to be calibrated, unless it is: hook what it must hear of the model, then rely on that.

        Raises:
            ConfigError: A setting is wrong, or rules out a calibration.
            UnsafeReuseError: The head answers token by token.
        """
        if self._components.calibrated is not None:
            return
        calibrated = make_calibrated(self._components, self._model, self._config, self._answer_of, self._compute_in)
        self._watch(calibrated.observer)
        if calibrated.attention is not None:
            self._installed.add(listen(calibrated.attention, self._flow))
        calibrated.add_to(self._components)

    def calibrate(self, requests: Requests, labels: Sequence[Any] | None, risk_target: RiskTarget) -> Calibration:
        """Compute requests, learn from part of them, and choose what may be reused; see `LLMCache.calibrate`."""
        with self._lock:
            calibrated, observer = self._learners()
            calibrated.end()
            if self._components.cost is not None:
                self._components.cost.restart()  # what was seen so far does not hold of what can be served afterwards
            inputs = list(tokenised(requests, self._tokenizer, self._components.trunk))
            n = sum(map(n_rows, inputs))
            told = numbered(labels, n, self._model)
            check_size(n, risk_target.max_drop, risk_target.delta, risk_target.metric)
            # What the first answer can tell is not told after minutes of computing the others.
            observed = collect(self._compute, observer, inputs[:1], is_learned_from=True)
            calibrated.check(observed[0], told, risk_target)
            observed += collect(self._compute, observer, inputs[1:], first=1, is_learned_from=True)
            return calibrated.calibrate(_labelled(observed, told), risk_target)

    def observe(self, requests: Requests, labels: Sequence[Any] | None) -> list[Observation]:
        """Compute requests, and keep all that a calibration looks at; see `LLMCache.observe`."""
        with self._lock:
            observer = self._learners()[1]
            inputs = tokenised(requests, self._tokenizer, self._components.trunk)
            observed = collect(self._compute, observer, inputs, is_learned_from=True)
            return _labelled(observed, numbered(labels, len(observed), self._model))

    def _learners(self) -> tuple[CalibratedReuse, Observer]:
        """Who learns from requests, and who sees them."""
        if self._installed.is_empty:
            raise WrapError("this cache was unwrapped: wrap the model again, and calibrate that cache")
        self.begin()
        assert self._components.calibrated is not None and self._components.observer is not None
        return self._components.calibrated, self._components.observer

    def _compute(self, inputs: Mapping[str, Any]) -> Any:
        """Call the model with tokenised inputs, which sentence-transformers takes in one argument."""
        with torch.inference_mode():
            if self._components.head.name == "sentence embedding":
                return self._model(dict(inputs))
            return self._model(**inputs)

    def _compute_in(self, namespace: str, inputs: Mapping[str, Any]) -> Any:
        """The same in a namespace."""
        with setting(self._flow.namespace, namespace):
            return self._compute(inputs)

    def _watch(self, observer: Observer) -> None:
        """See what the whole model puts out, where answers are read from that."""
        if not observer.answers.reads_payload:
            self._installed.add(watch(self._model, self._flow, self._components.trunk).remove)


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
    """What a calibration is to show; what is None is as in the settings.

    Raises:
        ConfigError: A value is wrong, or the metric needs labels, which there are none of when it is to be renewed.
    """
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
