"""What is counted of the server, and `GET /metrics`, where Prometheus reads it.

Names are `llmcache_` with the suffixes of vLLM and of text-embeddings-inference, so that dashboards made for these need
another prefix only. Every label takes its values from a set that is fixed when the server starts: routes by their
templates, rungs, reasons. Nothing of a request is in a label.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

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
from llmcache.serving.route_times import RouteTimes
from llmcache.serving.tei_answers import ERRORS
from llmcache.serving.watching import IN_FLIGHT, Watcher

PREFIX: Final = "llmcache_"
COMPUTED: Final = "computed"
OTHER: Final = "other"
#: How a request may end, in OpenAI's words; an encoder's ends with `stop`.
REASONS: Final = ("stop", "length", "abort", "error")

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics(Watcher):
    """Counters of one server, in a registry of their own. Thread-safe; each call takes a few microseconds."""

    def __init__(self, model_name: str, cache: LLMCache) -> None:
        """All zero.

        Args:
            model_name: The label `model_name` of all of them.
            cache: Whose figures are read when Prometheus asks, once each time.
        """
        self.registry = CollectorRegistry()
        self.routes = RouteTimes()
        self.n_under_way = 0
        self._model_name = model_name
        self._rungs = {COMPUTED, IN_FLIGHT, "exact", "prefix", "semantic", "paper"}
        self._results = {"success": 0, "failure": 0}

        self._http = self._counter("http_requests", "Requests answered, by route and HTTP status.", "route", "status")
        self._http_seconds = self._histogram("http_request_duration_seconds", "From request to its end.", "route")
        self._by_rung = self._counter("requests", "Inputs answered, by what served them.", "rung")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of all inputs.").labels(model_name)
        self._cached = self._counter("prompt_tokens_cached", "Tokens of inputs that the cache served.")
        self._cached_tokens = self._cached.labels(model_name)
        self._generated = self._counter("generation_tokens", "Tokens generated.").labels(model_name)
        self._success = self._counter("request_success", "Requests that came to their end.", "finished_reason")
        self._failed = self._counter("model_failures", "Inputs and generations that the model failed on.").labels(
            model_name
        )
        self._cancelled = self._counter("requests_cancelled", "Requests whose client had gone.").labels(model_name)

        e2e = self._histogram("e2e_request_latency_seconds", "Of requests for inference that were answered.")
        queue = self._histogram("request_queue_time_seconds", "Wait before a request was computed.")
        self._e2e, self._queue = e2e.labels(model_name), queue.labels(model_name)
        self._first = self._histogram("time_to_first_token_seconds", "From request to first token.").labels(model_name)
        self._inter = self._histogram("inter_token_latency_seconds", "Between two tokens.").labels(model_name)
        tokenisation = self._histogram("request_tokenization_duration", "Until inputs were tokens, without waits.")
        self._tokenisation = tokenisation.labels(model_name)
        self._prefill, self._decode = (
            self._histogram(f"request_{part}_time_seconds", f"Of generations: {text}.").labels(model_name)
            for part, text in (
                ("prefill", "from the end of the wait to the first token"),
                ("decode", "from the first token to the last"),
            )
        )
        text = "Of inputs that were computed: their batch; of generations: prefill and decode."
        inference = self._histogram("request_inference_time_seconds", text)
        self._inference = inference.labels(model_name)
        self._batch_size = self._histogram("batch_next_size", "Inputs computed at once.", buckets=_ROWS)
        self._batch_tokens = self._histogram(
            "batch_next_tokens", "Tokens computed at once, padding included.", buckets=_TOKENS
        )
        self._running = self._gauge(
            "num_requests_running", "Requests for inference under way, those that wait left out."
        )
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be computed.")
        self._concurrent = self._gauge("concurrent_requests", "Requests that --max-concurrent-requests counts.")
        self.watch()

        self.registry.register(CacheFigures(model_name, cache))
        durations = {"request_duration": e2e, "request_queue_duration": queue, "request_inference_duration": inference}
        self.registry.register(_Copies(durations))
        self.registry.register(_Copies({"queue_size": self._waiting}))
        self.registry.register(_Counts(model_name, UnknownMetricFamily, "Requests for inference.", self._counts))
        for make in (ProcessCollector, PlatformCollector, GCCollector):
            make(registry=self.registry)

    def watch(self, waiting: Callable[[], float] = lambda: 0, running: Callable[[], float] | None = None) -> None:
        """Set what the gauges of requests read; by default all that are under way are running."""
        self._waiting.labels(self._model_name).set_function(waiting)
        self._running.labels(self._model_name).set_function(running or (lambda: max(0, self.n_under_way - waiting())))

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
        self.routes.add(route, seconds)
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

    def tokenised(self, seconds: float) -> None:
        """Count a request by the time in which its inputs became tokens."""
        self._tokenisation.observe(seconds)

    def computed(self, seconds: float) -> None:
        """Count an input by the time in which its batch was computed."""
        self._inference.observe(seconds)

    def queued(self, seconds: float) -> None:
        """Count the wait of a request that was computed."""
        self._queue.observe(seconds)

    def batch(self, n_requests: int, n_tokens: int) -> None:
        """Count a batch."""
        self._batch_size.labels(self._model_name).observe(n_requests)
        self._batch_tokens.labels(self._model_name).observe(n_tokens)

    def first_token(self, seconds: float) -> None:
        """Count a first token, and the time that it took since the request."""
        self._first.observe(seconds)

    def inter_token(self, seconds: float) -> None:
        """Count the time between two tokens."""
        self._inter.observe(seconds)

    def generated(self, n: int) -> None:
        """Count tokens of answers."""
        self._generated.inc(n)

    def inferred(self, prefill_s: float, decode_s: float) -> None:
        """Count a generation that has ended, by the time to its first token and that from there to its last."""
        self._prefill.observe(prefill_s)
        self._decode.observe(decode_s)
        self._inference.observe(prefill_s + decode_s)

    def finished(self, reason: str) -> None:
        """Count a request that came to its end, of `REASONS`."""
        self._success.labels(self._model_name, reason if reason in REASONS else OTHER).inc()

    def failed(self) -> None:
        """Count an input or a generation that the model failed on."""
        self._failed.inc()

    def cancelled(self) -> None:
        """Count a request whose client had gone before its end."""
        self._cancelled.inc()

    def text(self) -> bytes:
        """All figures, in Prometheus' text format. Reads the cache's, which may wait for it."""
        return generate_latest(self.registry)

    def _counts(self) -> dict[str, int]:
        return {"request_count": sum(self._results.values())} | {
            f"request_{result}": n for result, n in self._results.items()
        }

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, ("model_name", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ("model_name",), registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(PREFIX + name, text, ("model_name", *labels), registry=self.registry, buckets=buckets)


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
        self._model_name = model_name
        self._kind = kind
        self._text = text
        self._read = read

    def collect(self) -> Iterable[Metric]:
        for name, value in self._read().items():
            family = self._kind(PREFIX + name, self._text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family


router = APIRouter(responses=ERRORS)


_TEXT: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/metrics", response_class=Response, responses=_TEXT)
async def metrics(request: Request) -> Response:
    """Figures of server, model and cache, for Prometheus."""
    text = await asyncio.to_thread(partial(Metrics.text, request.app.state.server.metrics))
    return Response(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})
