"""The replay that all kinds of models share.

Sizes: N served requests.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from llmcache.advice.advice import MARGIN, Advice, Way
from llmcache.calls.core import Core
from llmcache.config import CacheConfig
from llmcache.errors import ConfigError
from llmcache.models.arguments import takes_dict
from llmcache.models.callables import CallableModel
from llmcache.models.twin import make_replicas
from llmcache.reuse.calibration.bounds import share_upper
from llmcache.reuse.calibration.calibration import size_needed

LEAST = 200  # requests
_LEAST_OF_P99 = 200  # calls, below which a 99th percentile says little
_WARM = 8  # requests before a pass, of neither half
_LEARNING = 3  # most time of the model alone for the first half, as a multiple of that for the second
_UNKNOWN = 0.2  # largest share of tokens that the tokenizer may not know
#: A tokenizer of another language cuts words into letters: more tokens a word, and fewer letters a token, than these.
_TOKENS_A_WORD, _LETTERS_A_TOKEN = 3.5, 1.3
_N_READ = 200  # texts that are looked at for that

Run = Callable[[Mapping[str, Any]], Any]


class Trial(ABC):
    """One model and its requests, in two halves."""

    least_served = LEAST // 2  # requests
    learns = True  # from the first half

    def __init__(
        self, core: Core, config: CacheConfig, requests: Sequence[Any], max_drop: float, seconds: float
    ) -> None:
        """Prepare requests for the wrapped model of a core; `seconds` limits the time in which it serves them alone.

        Raises:
            ConfigError: There are too few requests, they are in another language than the tokenizer's, a request does
                not suit the model, or the model has no faithful copy.
            CalibrationError: A request is not valid.
        """
        self._wrapped, self._config, self._max_drop = core.wrapped, config, max_drop
        prepared = self._prepare(requests)
        if len(prepared) < LEAST:
            raise ConfigError(f"{len(prepared)} requests: advice needs at least {LEAST}, and bounds need more")
        self._refuse_another_language(requests, prepared)
        run = self._alone()
        with torch.inference_mode():
            ms = median([self._time(run, [one]) for one in prepared[: 2 * _WARM]][_WARM:])
        n, needed = len(prepared) - _WARM, size_needed(max_drop, config.delta)
        half = min(n // 2, max(needed, round(1e3 * _LEARNING * seconds / ms)))
        n_learned = needed if half < needed <= n - LEAST // 2 else half
        self._learned, later = prepared[:n_learned], prepared[n_learned:]
        self._warm_up, later = later[:_WARM], later[_WARM:]
        self._served = later[: max(self.least_served, round(1e3 * seconds / ms))]
        self._expected: list[Any] = []  # answers of the model alone
        self._bar: Any = None

    @property
    @abstractmethod
    def n_ways(self) -> int:
        """Number of ways to try."""

    @abstractmethod
    def _ways(self) -> Iterator[Way]:
        """Try all ways, the model alone first, and yield each when it was tried."""

    @abstractmethod
    def _prepare(self, requests: Sequence[Any]) -> list[Mapping[str, Any]]:
        """Return the model's inputs for each request."""

    @abstractmethod
    def _answer(self, output: Any) -> list[Any]:
        """Return the answers of a call's rows, which are compared."""

    @abstractmethod
    def _n_changed(self, answers: Sequence[Any]) -> int:
        """Return how many answers of a pass differ from those of the model alone."""

    def advise(self, on_way: Callable[[Advice], object] | None = None) -> Advice:
        """Try all ways, and the model alone once more; `on_way` gets what is known after each."""
        found: list[Way] = []
        with tqdm(total=(self.n_ways + 1) * len(self._served), unit="request", disable=None, leave=False) as self._bar:
            for way in self._ways():
                found.append(way)
                self._bar.n = len(found) * len(self._served)
                if on_way is not None:
                    on_way(self._so_far(found, is_partial=True))
            first = found[0]
            again = self._replay(first.name, first.code, self._alone(), self._served)
        passes = (first.mean_ms or 0.0, again.mean_ms or 0.0)
        found[0] = replace(first, mean_ms=fmean(passes))
        return self._so_far(found, is_partial=False, margin=max(MARGIN, max(passes) / min(passes)))

    def _so_far(self, ways: Sequence[Way], is_partial: bool, margin: float = MARGIN) -> Advice:
        n_learned = len(self._learned) if self.learns else 0
        return Advice(tuple(ways), self._max_drop, n_learned, len(self._served), margin, is_partial)

    def _refuse_another_language(self, requests: Sequence[Any], prepared: Sequence[Mapping[str, Any]]) -> None:
        tokenizer = self._wrapped.tokenizer
        unknown = getattr(tokenizer, "unk_token_id", None)
        ids = torch.cat([one["input_ids"][_mask_of(one)] for one in prepared])
        share = 0.0 if unknown is None else float((ids == unknown).double().mean())
        if share > _UNKNOWN:
            raise ConfigError(
                f"the tokenizer does not know {share:.0%} of the tokens: are these requests in its language?"
            )
        texts = [one for one in requests[:_N_READ] if isinstance(one, str)]
        if texts and getattr(tokenizer, "is_fast", False):
            made = tokenizer(texts, add_special_tokens=False)
            n_tokens = sum(map(len, made["input_ids"]))
            n_words = sum(len({*made.word_ids(row)}) for row in range(len(texts)))
            n_letters = sum(len("".join(text.split())) for text in texts)
            is_split = n_words >= sum(len(text.split()) for text in texts)  # some tokenizers take a text for one word
            if is_split and n_tokens > _TOKENS_A_WORD * n_words and n_letters < _LETTERS_A_TOKEN * n_tokens:
                each = n_tokens / n_words
                raise ConfigError(
                    f"the tokenizer makes {each:.1f} tokens of a word: are these requests in its language?"
                )

    def _copy(self) -> nn.Module:
        """Return a copy of the model that shares its weights and has no cache; `ConfigError` if there is none."""
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
        computing = {"engine": "eager", "draft": None}
        config = CacheConfig.make(self._config, **{**own, **computing, **settings})
        model = self._copy()
        core = Core(model, config, self._wrapped.tokenizer, self._wrapped.read, ())
        try:
            yield core, _caller(model)
        finally:
            core.close()

    def _time(self, run: Run, calls: Sequence[Any]) -> float:
        """Return the ms of some calls."""
        started = perf_counter()
        for call in calls:
            self._answer(run(call))
        return 1e3 * (perf_counter() - started)

    def _replay(
        self, name: str, code: str, run: Run, calls: Sequence[Any], core: Core | None = None, **more: Any
    ) -> Way:
        """Serve all requests, in calls, and return the figures; `more` are attributes of the way.

        If answers changed, a `bound` of 0 is replaced by the upper bound of their share.
        """
        n, ms, answers = len(self._served), list[float](), list[Any]()
        self._bar.set_description(name)
        with torch.inference_mode():
            self._time(run, self._warm_up)
            n_before = 0 if core is None else core.stats().n_hits
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
        n_changed = self._n_changed(answers)
        if more.get("bound") == 0 and n_changed:
            more["bound"] = share_upper(n_changed, n, self._config.delta)
        stats = None if core is None else core.stats()
        if stats is not None:
            more["nbytes"] = more.get("nbytes", 0) + stats.held_nbytes
        return Way(
            name,
            code,
            mean_ms=1e3 * seconds / n,
            p50_ms=median(ms),
            p99_ms=float(np.quantile(ms, 0.99)) if len(ms) >= _LEAST_OF_P99 else None,
            changed=n_changed / n,
            hit_rate=0.0 if stats is None else (stats.n_hits - n_before) / n,
            **more,
        )

    @property
    def _nbytes(self) -> int:
        """Bytes of the model's weights; of a session, of its file."""
        model = self._wrapped.model
        if isinstance(model, CallableModel):
            return model.nbytes
        return sum(one.numel() * one.element_size() for one in model.parameters())


def _mask_of(inputs: Mapping[str, Any]) -> Tensor:
    """Return which tokens of a call are no padding, bool (B, T)."""
    mask = inputs.get("attention_mask")
    return torch.ones_like(inputs["input_ids"], dtype=torch.bool) if mask is None else mask.bool()


def _caller(model: nn.Module) -> Run:
    if takes_dict(model):
        return lambda inputs: model(dict(inputs))
    return lambda inputs: model(**inputs)
