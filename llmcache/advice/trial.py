"""The replay that all kinds of models share.

Sizes: N served requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from llmcache.advice.advice import Advice, Way
from llmcache.calls.core import Core
from llmcache.config import CacheConfig
from llmcache.errors import ConfigError
from llmcache.models.arguments import takes_dict
from llmcache.models.callables import CallableModel
from llmcache.models.twin import make_replicas
from llmcache.reuse.calibration.calibration import size_needed

LEAST = 200  # requests, below which percentiles and shares say little
_WARM = 8  # requests before a pass
_UNKNOWN = 0.2  # largest share of tokens that the tokenizer may not know

Run = Callable[[Mapping[str, Tensor]], Any]


class Trial(ABC):
    """One model and its requests, in two halves."""

    def __init__(
        self, core: Core, config: CacheConfig, requests: Sequence[Any], max_drop: float, seconds: float
    ) -> None:
        """Prepare requests for the wrapped model of a core; `seconds` limits the time in which it serves them alone.

        Raises:
            ConfigError: There are too few requests, or the tokenizer does not know their language.
        """
        self._wrapped, self._config, self.max_drop = core.wrapped, config, max_drop
        if len(requests) < LEAST:
            raise ConfigError(f"{len(requests)} requests: advice needs at least {LEAST}, and bounds need more")
        self._requests = self._prepare(requests)
        self._refuse_unknown(torch.cat([one["input_ids"].flatten() for one in self._requests]))
        n, needed = len(self._requests), size_needed(max_drop, config.delta)
        n_learned = needed if n // 2 < needed <= n - LEAST // 2 else n // 2
        self.learned, later = self._requests[:n_learned], self._requests[n_learned:]
        run = self._alone()
        with torch.inference_mode():
            times = [self._time(run, [one]) for one in self.learned[: 2 * _WARM]]
        self.served = later[: max(LEAST // 2, round(1e3 * seconds / median(times[_WARM:])))]
        self._expected: list[Any] = []  # answers of the model alone
        self._bar: Any = None

    @abstractmethod
    def _prepare(self, requests: Sequence[Any]) -> list[Mapping[str, Tensor]]:
        """Return the model's inputs for each request."""

    @property
    @abstractmethod
    def n_ways(self) -> int:
        """Number of ways to try."""

    @abstractmethod
    def ways(self) -> Iterator[Way]:
        """Try all ways, and yield each when it was tried."""

    @abstractmethod
    def _answer(self, output: Any) -> Any:
        """Return what is compared, of the rows of a call."""

    @abstractmethod
    def _n_changed(self, answers: Sequence[Any]) -> int:
        """Return how many answers of a pass differ from those of the model alone."""

    def advise(self, on_way: Callable[[Advice], object] | None = None) -> Advice:
        """Try all ways; `on_way` gets what is known after each."""
        found: list[Way] = []
        with tqdm(total=self.n_ways * len(self.served), unit="request", disable=None, leave=False) as self._bar:
            for way in self.ways():
                found.append(way)
                self._bar.n = len(found) * len(self.served)
                if on_way is not None:
                    on_way(self._so_far(found, is_partial=True))
        return self._so_far(found, is_partial=False)

    def _so_far(self, ways: Sequence[Way], is_partial: bool) -> Advice:
        return Advice(tuple(ways), self.max_drop, len(self.learned), len(self.served), is_partial)

    def _refuse_unknown(self, ids: Tensor) -> None:
        unknown = getattr(self._wrapped.tokenizer, "unk_token_id", None)
        share = 0.0 if unknown is None else float((ids == unknown).double().mean())
        if share > _UNKNOWN:
            raise ConfigError(
                f"the tokenizer does not know {share:.0%} of the tokens: are these requests in its language?"
            )

    def _copy(self) -> nn.Module:
        """Return a copy of the model that shares its weights and has no cache."""
        model = self._wrapped.model
        return model.copy(self._wrapped.tokenizer) if isinstance(model, CallableModel) else make_replicas(model)[model]

    def _alone(self) -> Run:
        """Return the model's call without a cache."""
        model = self._copy()
        if isinstance(model, CallableModel):
            return lambda inputs: model.trunk.function(inputs, {})
        return _caller(model)

    @contextmanager
    def _cached(self, **settings: Any) -> Iterator[tuple[Core, Run]]:
        """Within this context, give a cache of its own on a copy of the model, and the copy's call."""
        own = {"store": "memory", "share_calibration": False, "learn": None, "recalibrate": None}
        model, config = self._copy(), CacheConfig.make(self._config, **own, **settings)
        read = model.read if isinstance(model, CallableModel) else self._wrapped.read
        core = Core(model, config, self._wrapped.tokenizer, read, ())
        try:
            yield core, _caller(model)
        finally:
            core.close()

    def _time(self, run: Callable[[Any], Any], calls: Sequence[Any]) -> float:
        """Return the ms of some calls."""
        started = perf_counter()
        for call in calls:
            self._answer(run(call))
        return 1e3 * (perf_counter() - started)

    def _replay(
        self,
        name: str,
        code: str,
        run: Callable[[Any], Any],
        calls: Sequence[Any],
        core: Core | None = None,
        nbytes: int = 0,
        **more: Any,
    ) -> Way:
        """Serve all requests, in calls, and return the figures; `more` are attributes of the way."""
        n, ms, answers = len(self.served), list[float](), list[Any]()
        self._bar.set_description(name)
        with torch.inference_mode():
            self._time(run, self.learned[:_WARM])
            before = 0 if core is None else core.stats().n_hits
            started = perf_counter()
            for call in calls:
                begun = perf_counter()
                answers += (made := self._answer(run(call)))
                ms.append(1e3 * (perf_counter() - begun) / len(made))
                self._bar.update(len(made))
            if core is not None:
                core.drain()
        seconds = perf_counter() - started
        if not self._expected:
            self._expected = answers
        held = 0 if core is None else core.stats().held_nbytes
        hits = 0 if core is None else core.stats().n_hits - before
        p50_ms, p99_ms = np.quantile(ms, (0.5, 0.99)).tolist()
        figures = {"mean_ms": 1e3 * seconds / n, "p50_ms": p50_ms, "p99_ms": p99_ms, "hit_rate": hits / n}
        return Way(name, code, **figures, changed=self._n_changed(answers) / n, nbytes=nbytes + held, **more)

    @property
    def _nbytes(self) -> int:
        """Bytes of the model's weights."""
        return sum(one.numel() * one.element_size() for one in self._wrapped.model.parameters())


def _caller(model: nn.Module) -> Run:
    if takes_dict(model):
        return lambda inputs: model(dict(inputs))
    return lambda inputs: model(**inputs)
