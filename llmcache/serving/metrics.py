"""Metrics of the server, and `GET /metrics` for Prometheus.

Names are `llmcache_` with the suffixes of vLLM and of text-embeddings-inference (TEI), so that their dashboards only
need another prefix. Label values come from sets that are fixed when the server starts (route templates, rungs,
reasons), never from a request.
"""

import asyncio
import math
from collections import Counter as Counts
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from prometheus_client.metrics_core import UnknownMetricFamily
from prometheus_client.registry import Collector

from llmcache.cache import LLMCache
from llmcache.generation import StoppedBy
from llmcache.serving.cache_figures import CacheFigures

PREFIX: Final = "llmcache_"
COMPUTED: Final = "computed"
OTHER: Final = "other"
#: In place of a rung: the request joined an equal one in flight.
IN_FLIGHT: Final = "in_flight"
RUNGS: Final = frozenset((COMPUTED, IN_FLIGHT, "exact", "prefix", "semantic", "draft", "paper"))

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LATEST = 1024  # times kept per route

#: Metrics that also have TEI's name: new name -> own name.
_COPIES: Final = {
    "request_duration": "e2e_request_latency_seconds",
    "request_queue_duration": "request_queue_time_seconds",
    "request_inference_duration": "request_inference_time_seconds",
    "queue_size": "num_requests_waiting",
}


class RouteTime(NamedTuple):
    """Percentiles in seconds over a route's latest requests, and its number of requests since the start."""

    route: str
    n_requests: int
    p50_s: float
    p99_s: float


class Metrics:
    """Metrics of one server in their own registry. Thread-safe; each call takes a few microseconds."""

    def __init__(self, model_name: str, cache: LLMCache, n_waiting: Callable[[], int]) -> None:
        """Start at zero; `n_waiting` returns the queue's length. `cache.stats()` is read once per scrape."""
        self.registry = CollectorRegistry()
        self.n_under_way = 0  # inference requests in progress
        self.n_concurrent = 0  # those of them that hold a slot of `max_concurrent_requests`
        self._model_name = model_name
        self._results = {"success": 0, "failure": 0}
        self._latest: dict[str, deque[float]] = {}  # seconds, by route
        self._n_answered: Counts[str] = Counts()
        self._families: dict[str, Any] = {}

        self._http = self._make(Counter, "http_requests", "Requests answered, by route and status.", "route", "status")
        self._http_seconds = self._histogram("http_request_duration_seconds", "Time per request.", "route")
        self._by_rung = self._make(Counter, "requests", "Inputs answered, by rung.", "rung")
        self._success = self._make(Counter, "request_success", "Requests finished, by reason.", "finished_reason")
        self._prompt_tokens = self._make(Counter, "prompt_tokens", "Tokens of all inputs.")
        self._cached_tokens = self._make(Counter, "prompt_tokens_cached", "Tokens of inputs that the cache served.")
        self.generated = self._make(Counter, "generation_tokens", "Tokens generated.")
        self.failed = self._make(Counter, "model_failures", "Inputs and generations on which the model failed.")
        self.cancelled = self._make(Counter, "requests_cancelled", "Requests whose client disconnected.")
        text = "Failures to read the key file; the previous keys stay valid."
        self.key_file_failures = self._make(Counter, "key_file_failures", text)

        self._e2e = self._histogram("e2e_request_latency_seconds", "Time per successful inference request.")
        self.queue = self._histogram("request_queue_time_seconds", "Time in the queue before computing.")
        text = "Time of an input's batch; for generations, prefill and decode."
        self.inference = self._histogram("request_inference_time_seconds", text)
        self.first_token = self._histogram("time_to_first_token_seconds", "From request to first token.")
        self.inter_token = self._histogram("inter_token_latency_seconds", "Time between two tokens.")
        self.tokenisation = self._histogram("request_tokenization_duration", "Time to tokenise, without waiting.")
        text = "Time from the end of the wait to the first token of a generation."
        self.prefill = self._histogram("request_prefill_time_seconds", text)
        text = "Time from the first to the last token of a generation."
        self.decode = self._histogram("request_decode_time_seconds", text)
        self.batch_size = self._histogram("batch_next_size", "Inputs computed at once.", buckets=_ROWS)
        text = "Tokens computed at once, padding included."
        self.batch_tokens = self._histogram("batch_next_tokens", text, buckets=_TOKENS)

        text = "Inference requests in progress, without waiting ones."
        running = self._make(Gauge, "num_requests_running", text)
        running.set_function(lambda: max(0, self.n_under_way - n_waiting()))
        self._make(Gauge, "num_requests_waiting", "Requests waiting to be computed.").set_function(n_waiting)
        text = "Requests counted by --max-concurrent-requests."
        self._make(Gauge, "concurrent_requests", text).set_function(lambda: self.n_concurrent)

        self.registry.register(CacheFigures(model_name, cache))
        copied = {name: self._families[of] for name, of in _COPIES.items()}
        self.registry.register(_TeiNames(model_name, copied, self._results))
        for make in (ProcessCollector, PlatformCollector, GCCollector):
            make(registry=self.registry)

    def answered(self, route: str, status: int, seconds: float, is_inference: bool = False) -> None:
        """Count a finished HTTP request; `route` is the template of its path."""
        self._http.labels(self._model_name, route, str(status)).inc()
        self._http_seconds.labels(self._model_name, route).observe(seconds)
        self._latest.setdefault(route, deque(maxlen=_LATEST)).append(seconds)
        self._n_answered[route] += 1
        if is_inference:
            self._results["success" if status < 400 else "failure"] += 1
            if status < 400:
                self._e2e.observe(seconds)

    def served(self, rung: str | None, n_prompt_tokens: int, n_cached_tokens: int) -> None:
        """Count an input by the rung that served it; None means it was computed."""
        name = rung or COMPUTED
        self._by_rung.labels(self._model_name, name if name in RUNGS else OTHER).inc()
        self._prompt_tokens.inc(n_prompt_tokens)
        self._cached_tokens.inc(n_cached_tokens)

    def finished(self, reason: StoppedBy | Literal["error"]) -> None:
        """Count a finished request by its reason: `length`, `stop` (always for encoders), or `error`."""
        self._success.labels(self._model_name, reason).inc()

    def slowest(self) -> list[RouteTime]:
        """Return the times of all routes over their latest requests, largest p99 first."""
        kept = [(route, sorted(times.copy())) for route, times in list(self._latest.items())]
        found = [RouteTime(route, self._n_answered[route], _quantile(s, 0.5), _quantile(s, 0.99)) for route, s in kept]
        return sorted(found, key=lambda one: -one.p99_s)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format. May block while `cache.stats()` waits for the cache."""
        return generate_latest(self.registry)

    def _make(self, kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
        """Register a metric family and return it, or its single child if it has no labels of its own."""
        family = kind(PREFIX + name, text, ("model_name", *labels), registry=self.registry, **more)
        self._families[name] = family
        return family if labels else family.labels(self._model_name)

    def _histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Any:
        return self._make(Histogram, name, text, *labels, buckets=buckets)


class _TeiNames(Collector):
    """Exports metrics under TEI's names: copies of families, and the untyped counts of inference requests."""

    def __init__(self, model_name: str, copied: Mapping[str, Any], results: Mapping[str, int]) -> None:
        self._model_name, self._copied, self._results = model_name, copied, results

    def collect(self) -> Iterable[Metric]:
        for name, family in self._copied.items():
            for metric in family.collect():
                copy = Metric(PREFIX + name, metric.documentation, metric.type)
                copy.samples = [one._replace(name=one.name.replace(metric.name, copy.name)) for one in metric.samples]
                yield copy
        for name, n in {"count": sum(self._results.values()), **self._results}.items():
            counts = UnknownMetricFamily(f"{PREFIX}request_{name}", "Inference requests.", labels=["model_name"])
            counts.add_metric([self._model_name], n)
            yield counts


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]


router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return metrics of server, model and cache in Prometheus' text format."""
    text = await asyncio.to_thread(request.app.state.server.metrics.text)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
