"""What is counted of the server, and `GET /metrics`, where Prometheus reads it.

Names are `llmcache_` with the suffixes of vLLM and of text-embeddings-inference, so that dashboards made for these need
another prefix only. Every label takes its values from a set that is fixed when the server starts: routes by their
templates, rungs, reasons. Nothing of a request is in a label.
"""

import asyncio
import math
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from fastapi import APIRouter, Request, Response
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, UnknownMetricFamily
from prometheus_client.registry import Collector

from llmcache.cache import LLMCache
from llmcache.generation import StoppedBy
from llmcache.serving.cache_figures import CacheFigures

PREFIX: Final = "llmcache_"
COMPUTED: Final = "computed"
OTHER: Final = "other"
#: What serves those who join a request in flight, beside the rungs.
IN_FLIGHT: Final = "in_flight"
RUNGS: Final = frozenset((COMPUTED, IN_FLIGHT, "exact", "prefix", "semantic", "paper"))

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LATEST = 1024  # requests a route whose times are kept

#: Under a second name, that of text-embeddings-inference.
_COPIES: Final = {
    "request_duration": "e2e_request_latency_seconds",
    "request_queue_duration": "request_queue_time_seconds",
    "request_inference_duration": "request_inference_time_seconds",
    "queue_size": "num_requests_waiting",
}


class RouteTime(NamedTuple):
    """What the latest requests of a route took, in seconds, and how many there were since the start."""

    route: str
    n_requests: int
    p50_s: float
    p99_s: float


class Metrics:
    """Counters of one server, in a registry of their own. Thread-safe; each call takes a few microseconds."""

    def __init__(self, model_name: str, cache: LLMCache, n_waiting: Callable[[], int]) -> None:
        """Begin at zero. The cache's figures are read when Prometheus asks, once each time."""
        self.registry = CollectorRegistry()
        self.n_under_way = 0  # requests for inference that have not ended
        self.n_concurrent = 0  # of these, requests that `max_concurrent_requests` counts
        self._model_name = model_name
        self._results = {"success": 0, "failure": 0}
        self._latest: dict[str, deque[float]] = {}  # of each route
        self._n_answered: Counts[str] = Counts()
        self._families: dict[str, Any] = {}

        self._http = self._make(Counter, "http_requests", "Requests answered, by route and status.", "route", "status")
        self._http_seconds = self._make(
            Histogram, "http_request_duration_seconds", "From request to its end.", "route", buckets=_SECONDS
        )
        self._by_rung = self._make(Counter, "requests", "Inputs answered, by what served them.", "rung")
        self._success = self._make(Counter, "request_success", "Requests that came to their end.", "finished_reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of all inputs.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Tokens of inputs that the cache served.")
        self.generated = self._counter("generation_tokens", "Tokens generated.")
        self.failed = self._counter("model_failures", "Inputs and generations that the model failed on.")
        self.cancelled = self._counter("requests_cancelled", "Requests whose client had gone.")

        self._e2e = self._times("e2e_request_latency_seconds", "Of requests for inference that were answered.")
        self.queue = self._times("request_queue_time_seconds", "Wait before a request was computed.")
        text = "Of inputs that were computed: their batch; of generations: prefill and decode."
        self.inference = self._times("request_inference_time_seconds", text)
        self.first_token = self._times("time_to_first_token_seconds", "From request to first token.")
        self.inter_token = self._times("inter_token_latency_seconds", "Between two tokens.")
        self.tokenisation = self._times("request_tokenization_duration", "Until inputs were tokens, without waits.")
        text = "Of generations: from the end of the wait to the first token."
        self.prefill = self._times("request_prefill_time_seconds", text)
        text = "Of generations: from the first token to the last."
        self.decode = self._times("request_decode_time_seconds", text)
        self._batch_size = self._make(Histogram, "batch_next_size", "Inputs computed at once.", buckets=_ROWS)
        text = "Tokens computed at once, padding included."
        self._batch_tokens = self._make(Histogram, "batch_next_tokens", text, buckets=_TOKENS)

        text = "Requests for inference under way, those that wait left out."
        running = self._make(Gauge, "num_requests_running", text)
        running.set_function(lambda: max(0, self.n_under_way - n_waiting()))
        self._make(Gauge, "num_requests_waiting", "Requests that wait to be computed.").set_function(n_waiting)
        text = "Requests that --max-concurrent-requests counts."
        self._make(Gauge, "concurrent_requests", text).set_function(lambda: self.n_concurrent)

        self.registry.register(CacheFigures(model_name, cache))
        self.registry.register(_Copies({name: self._families[of] for name, of in _COPIES.items()}))
        self.registry.register(_Read(model_name, UnknownMetricFamily, "Requests for inference.", self._counts))
        for make in (ProcessCollector, PlatformCollector, GCCollector):
            make(registry=self.registry)

    def watch_keys(self, n_failures: Callable[[], int]) -> None:
        """Add the counter of failures of a file of keys."""
        text = "Looks at the file of keys that failed, and left the keys as they were."
        counts = _Read(self._model_name, CounterMetricFamily, text, lambda: {"key_file_failures": n_failures()})
        self.registry.register(counts)

    def answered(self, route: str, status: int, seconds: float, is_inference: bool = False) -> None:
        """Count a request that has ended, by the template of its route."""
        self._http.labels(self._model_name, route, str(status)).inc()
        self._http_seconds.labels(self._model_name, route).observe(seconds)
        self._latest.setdefault(route, deque(maxlen=_LATEST)).append(seconds)
        self._n_answered[route] += 1
        if is_inference:
            self._results["success" if status < 400 else "failure"] += 1
            if status < 400:
                self._e2e.observe(seconds)

    def served(self, rung: str | None, n_prompt_tokens: int, n_cached_tokens: int) -> None:
        """Count an input by the rung that served it, None where it was computed."""
        name = COMPUTED if rung is None else rung
        self._by_rung.labels(self._model_name, name if name in RUNGS else OTHER).inc()
        self._prompt_tokens.inc(n_prompt_tokens)
        self._cached_tokens.inc(n_cached_tokens)

    def batch(self, n_requests: int, n_tokens: int) -> None:
        """Count a batch."""
        self._batch_size.observe(n_requests)
        self._batch_tokens.observe(n_tokens)

    def finished(self, reason: StoppedBy | Literal["error"]) -> None:
        """Count a request that came to its end: `length`, `error`, or `stop`, as an encoder's does."""
        self._success.labels(self._model_name, reason).inc()

    def slowest(self) -> list[RouteTime]:
        """Return all routes by the times of their latest requests, the largest p99 first."""
        kept = [(route, sorted(times.copy())) for route, times in list(self._latest.items())]
        found = [RouteTime(route, self._n_answered[route], _nth(s, 0.5), _nth(s, 0.99)) for route, s in kept]
        return sorted(found, key=lambda one: -one.p99_s)

    def text(self) -> bytes:
        """Return all figures in Prometheus' text format. Reads the cache's, which may wait for it."""
        return generate_latest(self.registry)

    def _counts(self) -> dict[str, int]:
        counts = {f"request_{result}": n for result, n in self._results.items()}
        return {"request_count": sum(self._results.values()), **counts}

    def _make(self, kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
        """Return a family that is registered; without labels of its own, its one child."""
        family = kind(PREFIX + name, text, ("model_name", *labels), registry=self.registry, **more)
        self._families[name] = family
        return family if labels else family.labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        made: Counter = self._make(Counter, name, text)
        return made

    def _times(self, name: str, text: str) -> Histogram:
        made: Histogram = self._make(Histogram, name, text, buckets=_SECONDS)
        return made


class _Copies(Collector):
    """Families under a second name; copied when they are read."""

    def __init__(self, families: Mapping[str, Any]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for name, family in self._families.items():
            for metric in family.collect():
                copy = Metric(PREFIX + name, metric.documentation, metric.type)
                copy.samples = [one._replace(name=one.name.replace(metric.name, copy.name)) for one in metric.samples]
                yield copy


class _Read(Collector):
    """Counts that others keep, read when Prometheus asks; untyped without `_total` at their end, as TEI has them."""

    def __init__(self, model_name: str, kind: Any, text: str, read: Callable[[], dict[str, int]]) -> None:
        self._model_name, self._kind, self._text, self._read = model_name, kind, text, read

    def collect(self) -> Iterable[Metric]:
        for name, value in self._read().items():
            family = self._kind(PREFIX + name, self._text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family


def _nth(ordered: list[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]


router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Figures of server, model and cache, for Prometheus."""
    text = await asyncio.to_thread(request.app.state.server.metrics.text)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
