"""llmcache itself, as a method."""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.methods.base import BYPASSED, COMPUTED, Method, Served, twin
from experiments.support.progress import tracked
from experiments.tasks.workload import Answer, Workload
from llmcache import CacheConfig, ConfigError, LLMCache, Outcome, Stats

_IDLE_EVERY = 500  # requests: about two seconds with a small model; looks wait at most five


class Cached(Method):
    """Serves from a cache wrapped around the model. Options are those of `llmcache.CacheConfig`.

    Auto-bypass is off unless set in the options: the cache is measured whether or not it pays. Audited requests are
    recomputed after every `_IDLE_EVERY` requests, as in idle moments of a service, and after the last one, never while
    another method answers. The time is added to the preceding request.
    """

    def __init__(self, workload: Workload, options: Mapping[str, Any]) -> None:
        self._config = configure(workload, options)
        self._workload = workload
        self._module = twin(workload.module)
        self._cache: LLMCache | None = None
        self._seen = Stats()
        self._asked = 0
        self._evicted = 0
        self._numbers: dict[str, int] = {}  # request number by key, to identify sources
        self.begin()  # refuses unsuitable options before anything is measured
        self.end()

    @classmethod
    def check(cls, options: Mapping[str, Any], name: str) -> None:
        """Raise `ConfigError` for wrong llmcache settings, naming them below `name`."""
        try:
            CacheConfig.make(dict(options))
        except ConfigError as error:
            raise ConfigError(f"{name}.{error}") from error

    def begin(self) -> None:
        self.end()
        self._cache = LLMCache.wrap(self._module, config=self._config, tokenizer=self._workload.tokenizer)
        self._evicted = 0
        self._numbers.clear()

    def ask(self, number: int) -> Answer:
        """Run the wrapped model on a request; now and then, also do the pending recomputations."""
        assert self._cache is not None
        self._asked = number
        answer = super().ask(number)
        if (number + 1) % _IDLE_EVERY == 0 or number + 1 == len(self._workload.requests):
            self._cache.drain()
        return answer

    def last(self) -> Served:
        """Return the outcome of the request's row that was served least exactly."""
        assert self._cache is not None
        evicted = self._cache.stats().n_evicted_total
        is_evicting, self._evicted = evicted > self._evicted, evicted
        outcomes = self._cache.last
        for outcome in outcomes:
            if outcome.source != outcome.key:  # else the request repeats the source
                self._numbers[outcome.key] = self._asked
        served = [outcome for outcome in outcomes if outcome.rung is not None]
        if not served:
            is_bypassed = any(outcome.bypassed for outcome in outcomes)
            nearest = max((one.similarity for one in outcomes if one.similarity is not None), default=None)
            return Served(BYPASSED if is_bypassed else COMPUTED, None, nearest, is_evicting)
        told = min(served, key=lambda outcome: (outcome.source == outcome.key, outcome.similarity or 0.0))
        source = None if told.source is None else self._numbers.get(told.source)
        share = len(served) / len(outcomes)
        rung = "exact" if told.source == told.key else str(told.rung)
        return Served(rung, source, told.similarity, is_evicting, share, told.n_prefix)

    def end(self) -> None:
        if self._cache is not None:
            self._seen = self._cache.stats()
            self._cache.unwrap()
            self._cache = None

    @property
    def stats(self) -> Stats:
        """The cache's own counters, also after `end`."""
        return self._seen if self._cache is None else self._cache.stats()

    @property
    def payload(self) -> str:
        """What entries keep; known between `begin` and `end`."""
        assert self._cache is not None
        return self._cache.payload

    @property
    def nbytes(self) -> int:
        """Bytes of entries, of their fingerprints, and of prefix blocks."""
        return self.stats.held_nbytes

    @property
    def n_entries(self) -> int:
        return self.stats.n_stored


def configure(workload: Workload, options: Mapping[str, Any], audits_in_background: bool = False) -> CacheConfig:
    """Return a cache's settings for a workload's model; its payload must be what the head reads."""
    keeps_tokens = options.get("tau") is not None and options.get("layers") != "last"
    if workload.payload is not None and not keeps_tokens:
        options = {"payload": workload.payload, **options}
    config = CacheConfig.make({"auto_bypass": False, **options})
    if config.tau is None and "in_background" not in config.audit.model_fields_set:
        audit = config.audit.model_copy(update={"in_background": audits_in_background})
        config = config.model_copy(update={"audit": audit})
    if workload.payload not in (None, config.payload) and config.payload not in ("sequence", "auto"):
        raise ConfigError(f"payload: the head reads {workload.payload!r} (got {config.payload!r}); leave it out")
    return config


def serve_from(cache: LLMCache, workload: Workload, first: int, what: str) -> Iterator[tuple[Answer, Outcome]]:
    """Serve requests of one row from number `first` on, untimed; yield each one's answer and outcome."""
    for number in tracked(range(first, len(workload.requests)), what):
        answer = workload.answer(cache(**workload.requests[number].inputs), number)
        yield answer, cache.last[0]
