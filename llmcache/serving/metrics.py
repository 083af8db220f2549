"""What is counted of the server, and `GET /metrics`, where Prometheus reads it.

Names are `llmcache_` with the suffixes of vLLM and of text-embeddings-inference, so that dashboards made for these need
another prefix only. Every label takes its values from a set that is fixed when the server starts: routes by their
templates, rungs, reasons. Nothing of a request is in a label.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

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
from llmcache.serving.cache_figures import CacheFigures

PREFIX: Final = "llmcache_"
COMPUTED: Final = "computed"
OTHER: Final = "other"
#: What serves those who join a request in flight, beside the rungs.
IN_FLIGHT: Final = "in_flight"
#: How a request may end, in OpenAI's words; an encoder's ends with `stop`.
REASONS: Final = ("stop", "length", "abort", "error")

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LATEST = 1024  # requests a route whose times are kept


class RouteTime(NamedTuple):
    """What requests of a route took lately.

    Attributes:
        route: Its template.
        n_requests: Since the start.
        p50_s: Half of the latest took no longer, seconds.
        p99_s: Likewise of all but a hundredth.
    """

    route: str
    n_requests: int
    p50_s: float
    p99_s: float


class Metrics:
    """Counters of one server, in a registry of their own. Thread-safe; each call takes a few microseconds.

    Attributes:
        n_under_way: Requests for inference that have not ended.
        queue: Waits of what is computed, seconds.
        tokenisation: Times in which the inputs of a request became tokens, seconds.
        inference: Of inputs that were computed, the time of their batch; of generations prefill and decode; seconds.
        first_token: Times from a request to its first token, seconds.
        inter_token: Times between two tokens, seconds.
        prefill: Times from a generation's place to its first token, seconds.
        decode: Times from there to its last, seconds.
        generated: Tokens of answers.
        failed: Inputs and generations that the model failed on.
        cancelled: Requests whose client had gone before their end.
    """

    def __init__(self, model_name: str, cache: LLMCache) -> None:
        """All zero.

        Args:
            model_name: The label `model_name` of all of them.
            cache: Whose figures are read when Prometheus asks, once each time.
        """
        self.registry = CollectorRegistry()
        self.n_under_way = 0
        self._model_name = model_name
        self._rungs = {COMPUTED, IN_FLIGHT, "exact", "prefix", "semantic", "paper"}
        self._results = {"success": 0, "failure": 0}
        self._latest: dict[str, deque[float]] = {}  # of each route
        self._n_answered: dict[str, int] = {}

        self._http = self._make(Counter, "http_requests", "Requests answered, by route and status.", "route", "status")
        self._http_seconds = self._histogram("http_request_duration_seconds", "From request to its end.", "route")
        self._by_rung = self._make(Counter, "requests", "Inputs answered, by what served them.", "rung")
        self._success = self._make(Counter, "request_success", "Requests that came to their end.", "finished_reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of all inputs.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Tokens of inputs that the cache served.")
        self.generated = self._counter("generation_tokens", "Tokens generated.")
        self.failed = self._counter("model_failures", "Inputs and generations that the model failed on.")
        self.cancelled = self._counter("requests_cancelled", "Requests whose client had gone.")

        e2e = self._histogram("e2e_request_latency_seconds", "Of requests for inference that were answered.")
        queue = self._histogram("request_queue_time_seconds", "Wait before a request was computed.")
        text = "Of inputs that were computed: their batch; of generations: prefill and decode."
        inference = self._histogram("request_inference_time_seconds", text)
        self._e2e, self.queue, self.inference = (one.labels(model_name) for one in (e2e, queue, inference))
        self.first_token, self.inter_token, self.tokenisation, self.prefill, self.decode = (
            self._histogram(name, text).labels(model_name)
            for name, text in (
                ("time_to_first_token_seconds", "From request to first token."),
                ("inter_token_latency_seconds", "Between two tokens."),
                ("request_tokenization_duration", "Until inputs were tokens, without waits."),
                ("request_prefill_time_seconds", "Of generations: from the end of the wait to the first token."),
                ("request_decode_time_seconds", "Of generations: from the first token to the last."),
            )
        )
        self._batch_size, self._batch_tokens = (
            self._histogram(f"batch_next_{name}", text, buckets=buckets).labels(model_name)
            for name, text, buckets in (
                ("size", "Inputs computed at once.", _ROWS),
                ("tokens", "Tokens computed at once, padding included.", _TOKENS),
            )
        )
        text = "Requests for inference under way, those that wait left out."
        self._running = self._make(Gauge, "num_requests_running", text)
        self._waiting = self._make(Gauge, "num_requests_waiting", "Requests that wait to be computed.")
        text = "Requests that --max-concurrent-requests counts."
        self._concurrent = self._make(Gauge, "concurrent_requests", text)
        self.watch(lambda: 0)

        self.registry.register(CacheFigures(model_name, cache))
        durations = {"request_duration": e2e, "request_queue_duration": queue, "request_inference_duration": inference}
        self.registry.register(_Copies({**durations, "queue_size": self._waiting}))
        self.registry.register(_Counts(model_name, UnknownMetricFamily, "Requests for inference.", self._counts))
        for make in (ProcessCollector, PlatformCollector, GCCollector):
            make(registry=self.registry)

    def watch(self, waiting: Callable[[], float]) -> None:
        """Set what tells how many requests wait; all others that are under way are running."""
        self._waiting.labels(self._model_name).set_function(waiting)
        self._running.labels(self._model_name).set_function(lambda: max(0, self.n_under_way - waiting()))

    def watch_limits(self, concurrent: Callable[[], float]) -> None:
        """Set what the gauge of requests that take a place reads."""
        self._concurrent.labels(self._model_name).set_function(concurrent)

    def watch_keys(self, n_failures: Callable[[], int]) -> None:
        """Set what the counter of a file of keys reads, of which there is one from now on."""
        text = "Looks at the file of keys that failed, and left the keys as they were."
        counts = _Counts(self._model_name, CounterMetricFamily, text, lambda: {"key_file_failures": n_failures()})
        self.registry.register(counts)

    def answered(self, route: str, status: int, seconds: float, is_inference: bool = False) -> None:
        """Count a request that has ended, by the template of its route."""
        self._http.labels(self._model_name, route, str(status)).inc()
        self._http_seconds.labels(self._model_name, route).observe(seconds)
        self._latest.setdefault(route, deque(maxlen=_LATEST)).append(seconds)
        self._n_answered[route] = self._n_answered.get(route, 0) + 1
        if is_inference:
            self._results["success" if status < 400 else "failure"] += 1
            if status < 400:
                self._e2e.observe(seconds)

    def served(self, rung: str | None, n_prompt_tokens: int, n_cached_tokens: int) -> None:
        """Count an input by the rung that served it, None where it was computed."""
        name = COMPUTED if rung is None else rung if rung in self._rungs else OTHER
        self._by_rung.labels(self._model_name, name).inc()
        self._prompt_tokens.inc(n_prompt_tokens)
        self._cached_tokens.inc(n_cached_tokens)

    def batch(self, n_requests: int, n_tokens: int) -> None:
        """Count a batch."""
        self._batch_size.observe(n_requests)
        self._batch_tokens.observe(n_tokens)

    def finished(self, reason: str) -> None:
        """Count a request that came to its end, of `REASONS`."""
        self._success.labels(self._model_name, reason if reason in REASONS else OTHER).inc()

    def slowest(self) -> list[RouteTime]:
        """All routes by the times of their latest requests, the largest p99 first."""
        kept = [(route, sorted(times.copy())) for route, times in list(self._latest.items())]
        found = [RouteTime(route, self._n_answered[route], _nth(s, 0.5), _nth(s, 0.99)) for route, s in kept]
        return sorted(found, key=lambda one: -one.p99_s)

    def text(self) -> bytes:
        """All figures, in Prometheus' text format. Reads the cache's, which may wait for it."""
        return generate_latest(self.registry)

    def _counts(self) -> dict[str, int]:
        counts = {f"request_{result}": n for result, n in self._results.items()}
        return {"request_count": sum(self._results.values()), **counts}

    def _make(self, kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
        return kind(PREFIX + name, text, ("model_name", *labels), registry=self.registry, **more)

    def _counter(self, name: str, text: str) -> Counter:
        made: Counter = self._make(Counter, name, text).labels(self._model_name)
        return made

    def _histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        made: Histogram = self._make(Histogram, name, text, *labels, buckets=buckets)
        return made


class _Copies(Collector):
    """Families under a second name, that of text-embeddings-inference; copied when they are read."""

    def __init__(self, families: dict[str, Any]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for name, family in self._families.items():
            for metric in family.collect():
                copy = Metric(PREFIX + name, metric.documentation, metric.type)
                copy.samples = [one._replace(name=one.name.replace(metric.name, copy.name)) for one in metric.samples]
                yield copy


class _Counts(Collector):
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
