"""Time several arms on the same requests, interleaved: every arm answers a request before any sees the next.

The order of the arms alternates from request to request and from round to round. Each arm has its own copy of the
layers, whose weights are shared, and its own cache, which is cold when a round begins.

Sizes: R rounds, N requests.
"""

import copy
import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.heads import Classifier
from experiments.models import Inputs
from experiments.progress import tracked
from llmcache import CacheConfig, LLMCache, Stats

COMPUTED, BYPASSED = "computed", "bypassed"


@dataclass(frozen=True, slots=True)
class Trace:
    """What one arm did.

    Attributes:
        ms: Wall time of each request, milliseconds, (R, N).
        answers: Column of the highest logit, (R, N).
        served: The rung that served each request, else `COMPUTED` or `BYPASSED`, (R, N).
        evicting: Whether an entry had to leave for it, (R, N).
        stats: The cache's own counts at the end of the last round, or None for an arm without one.
    """

    ms: NDArray[np.float64]
    answers: NDArray[np.int64]
    served: NDArray[np.str_]
    evicting: NDArray[np.bool_]
    stats: Stats | None

    @property
    def is_hit(self) -> NDArray[np.bool_]:
        """Whether a rung served it, (R, N)."""
        return is_hit(self.served)


@dataclass(slots=True)
class _Log:
    ms: list[float] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    evicting: list[bool] = field(default_factory=list)


class Arm:
    """One way to answer: the model alone, or with a cache."""

    def __init__(self, classifier: Classifier, settings: CacheConfig | None) -> None:
        """Take a copy of the model that shares its weights.

        Args:
            classifier: The model; not wrapped.
            settings: Of the cache; None for none.
        """
        self._module = twin(classifier.module)
        self._tokenizer = classifier.tokenizer
        self._settings = settings
        self._cache: LLMCache | None = None
        self._seen = Stats()
        self._log = _Log()

    def begin(self, warmup: Sequence[Inputs]) -> None:
        """Start a round: a new, cold cache, after some requests that are not measured."""
        self.end()
        if self._settings is not None:
            self._cache = LLMCache.wrap(self._module, config=self._settings, tokenizer=self._tokenizer)
        for inputs in warmup:
            self._module(**inputs)
        if self._cache is not None:
            self._cache.clear()
            self._seen = self._cache.stats()

    def end(self) -> None:
        """Take the cache off."""
        if self._cache is not None:
            self._cache.unwrap()
            self._cache = None

    def answer(self, inputs: Inputs) -> None:
        """Answer one request (batch 1) and note what happened. Timed from the call to the answer, storing included."""
        started = perf_counter()
        answer = int(self._module(**inputs).argmax(dim=-1))
        elapsed = perf_counter() - started
        self._log.ms.append(elapsed * 1e3)
        self._log.answers.append(answer)
        self._note()

    def trace(self, n_rounds: int) -> Trace:
        """Everything noted so far."""
        shape = (n_rounds, -1)
        return Trace(
            ms=np.array(self._log.ms).reshape(shape),
            answers=np.array(self._log.answers, dtype=np.int64).reshape(shape),
            served=np.array(self._log.served).reshape(shape),
            evicting=np.array(self._log.evicting, dtype=bool).reshape(shape),
            stats=self._seen if self._settings is not None else None,
        )

    def _note(self) -> None:
        """Tell from the counters, outside the timed region, what served the last request."""
        served, evicting = COMPUTED, False
        if self._cache is not None:
            now = self._cache.stats()
            rungs = [rung for rung, n in now.hits.items() if n > self._seen.hits.get(rung, 0)]
            if rungs:
                served = rungs[0]
            elif sum(now.bypassed.values()) > sum(self._seen.bypassed.values()):
                served = BYPASSED
            evicting = sum(now.n_evicted.values()) > sum(self._seen.n_evicted.values())
            self._seen = now
        self._log.served.append(served)
        self._log.evicting.append(evicting)


def is_hit(served: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Whether a rung served each request, same shape."""
    hit: NDArray[np.bool_] = ~np.isin(served, (COMPUTED, BYPASSED))
    return hit


def twin(module: nn.Module) -> nn.Module:
    """A copy of an unwrapped model that shares its parameters, so that an arm more costs no memory."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


def measure(
    classifier: Classifier,
    settings: Mapping[str, CacheConfig | None],
    requests: Sequence[Inputs],
    rounds: int,
    warmup: int,
    budget_s: float = math.inf,
) -> dict[str, Trace]:
    """Run every arm over the stream.

    Args:
        classifier: The model.
        settings: Cache of each arm by name, None for none.
        requests: Tokenised, batch 1, at least one.
        rounds: How often the stream is run, at least 1.
        warmup: Requests, from the beginning, that each arm runs unmeasured before each round.
        budget_s: Seconds; a round after the first is only begun if, going by those before, it ends within them.

    Returns:
        Trace by arm.
    """
    arms = {name: Arm(classifier, config) for name, config in settings.items()}
    names, number, started = list(arms), 0, monotonic()
    with torch.inference_mode():
        while number == 0 or (number < rounds and (monotonic() - started) * (1 + 1 / number) <= budget_s):
            for arm in arms.values():
                arm.begin(requests[:warmup])
            gc.collect()
            what = f"Round {number + 1} of {rounds}"
            for i, inputs in enumerate(tracked(requests, len(requests), what)):
                for name in order_of(names, i, number):
                    arms[name].answer(inputs)
            number += 1
    for arm in arms.values():
        arm.end()
    return {name: arm.trace(number) for name, arm in arms.items()}


def order_of(names: Sequence[str], request: int, number: int) -> list[str]:
    """Order of the arms at one request: rotated by one a request, backwards in every other round."""
    first = request % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if number % 2 else order


def tokens_of(inputs: Inputs) -> Tensor:
    """Valid token ids (n,) of a request (batch 1)."""
    ids = inputs["input_ids"][0]
    mask = inputs.get("attention_mask")
    return ids if mask is None else ids[mask[0].bool()]
