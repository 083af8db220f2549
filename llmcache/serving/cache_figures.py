"""The cache's statistics as Prometheus metrics, read once per scrape."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmcache.cache import LLMCache
from llmcache.stats import AuditStats, Stats

Value = float | Mapping[Any, float | None] | None


class Figure(NamedTuple):
    """One metric family: name without `llmcache_`, help text, function that reads it, label name or None."""

    name: str
    text: str
    read: Callable[[Stats], Value]
    label: str | None = None


def _from_audit(read: Callable[[AuditStats], Value]) -> Callable[[Stats], Value]:
    return lambda stats: None if stats.audit is None else read(stats.audit)


#: Monotonic, except the audit's counters, which restart with each calibration.
COUNTERS: Final = (
    Figure("cache_requests", "Rows seen by the cache, bypassed ones included.", lambda s: s.n_requests),
    Figure("hits", "Rows served from the cache, by rung.", lambda s: s.hits, "rung"),
    Figure("misses", "Rows computed in full.", lambda s: s.n_misses),
    Figure("revalidated", "Rows computed to check an entry.", lambda s: s.n_revalidated),
    Figure("bypassed", "Rows computed as if there were no cache, by reason.", lambda s: s.bypassed, "reason"),
    Figure("decode_steps", "Rows of decode steps, which are always computed.", lambda s: s.n_decode_steps),
    Figure("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.n_prompt_tokens),
    Figure("prefix_cache_hits", "Prompt tokens that no layer ran on.", lambda s: s.n_saved_tokens),
    Figure("computed_prompt_tokens", "Prompt tokens that the layers ran on.", lambda s: s.n_computed_tokens),
    Figure("layers_skipped", "Layer executions saved.", lambda s: s.n_layers_skipped),
    Figure("evicted", "Entries evicted for others, by layer.", lambda s: s.n_evicted, "layer"),
    Figure("expelled", "Entries expelled whatever the budget, by layer.", lambda s: s.n_expelled, "layer"),
    Figure("evicted_blocks", "Prefix blocks evicted for others.", lambda s: s.n_blocks_evicted),
    Figure("too_large", "Requests too large for the budget.", lambda s: s.n_too_large),
    Figure("lookup_seconds", "Time in fingerprint, search and decision.", lambda s: s.lookup_ms / 1e3),
    Figure("computing_seconds", "Time in the trunk, for computed rows.", lambda s: s.computing_ms / 1e3),
    Figure("storing_seconds", "Time storing entries.", lambda s: s.storing_ms / 1e3),
    Figure("audit_seconds", "Time in recomputing hits.", _from_audit(lambda a: a.recomputing_ms / 1e3)),
    Figure("errors", "Failures of the cache that were computed around.", lambda s: s.errors),
    Figure("alarms", "Alarms of the audit.", _from_audit(lambda a: a.n_alarms)),
)

GAUGES: Final = (
    Figure("bank_bytes", "Bytes of entries, by layer.", lambda s: s.nbytes_by_layer, "layer"),
    Figure("bank_max_bytes", "Budget of a bank, by layer.", lambda s: s.max_nbytes_by_layer, "layer"),
    Figure("prefix_bytes", "Bytes of prefix blocks.", lambda s: s.prefix_nbytes),
    Figure("prefix_max_bytes", "Budget of prefix blocks: what the bank leaves.", lambda s: s.prefix_max_nbytes),
    Figure("index_bytes", "Bytes of fingerprints.", lambda s: s.index_nbytes),
    Figure("entries", "Entries held, by layer.", lambda s: s.n_entries, "layer"),
    Figure("prefix_blocks", "Prefix blocks held.", lambda s: s.n_blocks),
    Figure("stored_requests", "Requests stored.", lambda s: s.n_stored),
    Figure("saved_seconds", "Time saved by hits, estimated.", lambda s: s.saved_s),
    Figure("failing", "1 while many of the latest calls failed.", lambda s: s.health.is_failing),
    Figure("failed_calls_ratio", "Share of the latest calls that failed.", lambda s: s.health.failed_calls),
    Figure("failed_recomputes_ratio", "Share of recomputations that failed.", lambda s: s.health.failed_recomputes),
    Figure("audit_status", "1 for the status of calibrated reuse.", _from_audit(lambda a: {a.status: 1}), "status"),
    Figure("audit_rate", "Share of changed answers, estimated.", _from_audit(lambda a: a.rate)),
    Figure("audit_rate_lower", "Lower bound of that share.", _from_audit(lambda a: a.lower)),
    Figure("audit_rate_upper", "Upper bound of that share.", _from_audit(lambda a: a.upper)),
    Figure("audit_requests", "Requests behind the bound.", _from_audit(lambda a: a.n_requests)),
    Figure("audit_recomputed", "Hits audited.", _from_audit(lambda a: a.n_recomputed)),
    Figure("audit_changed", "Audited hits with a changed answer.", _from_audit(lambda a: a.n_changed)),
    Figure("audit_lost", "Hits drawn that cannot be audited.", _from_audit(lambda a: a.n_lost)),
    Figure("audit_waiting", "Hits waiting to be audited.", _from_audit(lambda a: a.n_waiting)),
    Figure("quarantined", "Stored requests that serve no others.", _from_audit(lambda a: a.n_quarantined)),
)


class CacheFigures(Collector):
    """Prometheus collector that reads `cache.stats()` once per scrape."""

    def __init__(self, model_name: str, cache: LLMCache) -> None:
        """Collect the statistics of `cache`, labelled with `model_name`."""
        self._model_name = model_name
        self._cache = cache

    def collect(self) -> Iterable[Metric]:
        stats, max_bytes = self._cache.stats(), self._cache.config.max_bytes
        used = min(1.0, (stats.nbytes + stats.prefix_nbytes) / max_bytes)
        budget_gauges = (
            Figure("max_bytes", "Budget of all stored states.", lambda _: max_bytes),
            Figure("kv_cache_usage_perc", "Share of the budget in use, 0 to 1.", lambda _: used),
        )
        for figure in COUNTERS:
            yield self._family(CounterMetricFamily, figure, figure.read(stats))
        for figure in (*GAUGES, *budget_gauges):
            yield self._family(GaugeMetricFamily, figure, figure.read(stats))

    def _family(self, kind: Any, figure: Figure, value: Value) -> Metric:
        """Return a metric family with one sample per value that is not None."""
        labels = [] if figure.label is None else [figure.label]
        family: Metric = kind(f"llmcache_{figure.name}", figure.text, labels=["model_name", *labels])
        values = value if isinstance(value, Mapping) else {None: value}
        for key, one in values.items():
            if one is not None:
                family.add_metric([self._model_name, *(str(key) for _ in labels)], one)  # type: ignore[attr-defined]
        return family
