"""llmcache itself."""

from collections.abc import Mapping
from typing import Any

from experiments.methods.base import BYPASSED, COMPUTED, Served, twin
from experiments.workload import Answer, Workload
from llmcache import CacheConfig, LLMCache, Stats
from llmcache.errors import ConfigError


class Cached:
    """Serves from a cache wrapped around the model. Options are those of `llmcache.CacheConfig`."""

    def __init__(self, workload: Workload, options: Mapping[str, Any]) -> None:
        """Take a copy of the model.

        Raises:
            ConfigError: The payload keeps another vector than the head reads.
        """
        if workload.payload is not None and options.get("mode") != "paper":  # which stores whole sequences
            options = {"payload": workload.payload, **options}
        self._config = CacheConfig.make(options)
        if workload.payload not in (None, self._config.payload) and self._config.payload not in ("sequence", "auto"):
            raise ConfigError(
                f"methods: payload: the head reads {workload.payload!r} (got {self._config.payload!r}); leave it out"
            )
        self._workload = workload
        self._module = twin(workload.module)
        self._cache: LLMCache | None = None
        self._seen = Stats()

    @classmethod
    def check(cls, options: Mapping[str, Any], name: str) -> None:
        """Check the cache's settings."""
        try:
            CacheConfig.make(dict(options))
        except ConfigError as error:
            raise ConfigError(f"{name}.{error}") from error

    def begin(self) -> None:
        """Wrap the model anew."""
        self.end()
        self._cache = LLMCache.wrap(self._module, config=self._config, tokenizer=self._workload.tokenizer)
        self._seen = self._cache.stats()

    def ask(self, number: int) -> Answer:
        """Ask the wrapped model."""
        return self._workload.answer(self._module(**self._workload.requests[number].inputs), number)

    def last(self) -> Served:
        """Told from the counters: what served any of the request's rows, the least exact rung first."""
        now, before = self.stats, self._seen
        self._seen = now
        rungs = [rung for rung, n in now.hits.items() if n > before.hits.get(rung, 0)]
        by = COMPUTED
        if rungs:
            by = next((rung for rung in rungs if rung != "exact"), rungs[0])
        elif sum(now.bypassed.values()) > sum(before.bypassed.values()):
            by = BYPASSED
        return Served(by, is_evicting=sum(now.n_evicted.values()) > sum(before.n_evicted.values()))

    def end(self) -> None:
        """Take the cache off."""
        if self._cache is not None:
            self._seen = self._cache.stats()
            self._cache.unwrap()
            self._cache = None

    @property
    def stats(self) -> Stats:
        """The cache's own counters, also after the end."""
        return self._seen if self._cache is None else self._cache.stats()

    @property
    def payload(self) -> str:
        """What the entries keep; known between `begin` and `end`."""
        if self._cache is None:
            raise RuntimeError("begin() comes first")
        return self._cache.payload

    @property
    def nbytes(self) -> int:
        """Bytes of the entries."""
        return self.stats.nbytes

    @property
    def n_entries(self) -> int:
        """Requests known."""
        return self.stats.n_stored
