"""Traces: spans of requests, and a clear error without the extra."""

import sys
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI

from llmcache.errors import ConfigError
from llmcache.serving.telemetry import instrument
from tests.fixtures import Patch

ENDPOINT = "http://localhost:4318/v1/traces"
MODULES = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.instrumentation.fastapi",
    "opentelemetry.sdk.resources",
    "opentelemetry.sdk.trace",
    "opentelemetry.sdk.trace.export",
)


def test_requests_are_instrumented_with_an_exporter_to_the_endpoint(monkeypatch: Patch) -> None:
    exporter, instrumentation, resources, _, _ = stubs = [MagicMock() for _ in MODULES]
    for name, stub in zip(MODULES, stubs, strict=True):
        monkeypatch.setitem(sys.modules, name, stub)
    app = FastAPI()
    instrument(app, ENDPOINT)
    exporter.OTLPSpanExporter.assert_called_once_with(endpoint=ENDPOINT)
    resources.Resource.create.assert_called_once_with({"service.name": "llmcache"})
    made = instrumentation.FastAPIInstrumentor.instrument_app.call_args
    assert made.args == (app,) and made.kwargs["excluded_urls"] == "health,healthz,metrics"


def test_without_the_extra_or_an_http_address_it_says_what_to_give(monkeypatch: Patch) -> None:
    for endpoint in ("", "localhost:4317", "grpc://localhost:4317"):
        with pytest.raises(ConfigError, match="otlp_endpoint"):
            instrument(FastAPI(), endpoint)
    for missing in MODULES:
        with (
            monkeypatch.context() as patched,
            pytest.raises(ConfigError, match=r"pip install 'llmcache-torch\[otel\]'"),
        ):
            patched.setitem(sys.modules, missing, None)
            instrument(FastAPI(), ENDPOINT)


def test_spans_of_the_real_library_have_route_and_status(monkeypatch: Patch) -> None:
    why = "needs the extra otel: .venv/bin/pip install -e '.[otel]'"
    export = pytest.importorskip("opentelemetry.sdk.trace.export", reason=why)
    exporters = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter", reason=why)
    pytest.importorskip("opentelemetry.instrumentation.fastapi", reason=why)
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from starlette.testclient import TestClient

    kept = InMemorySpanExporter()
    monkeypatch.setattr(exporters, "OTLPSpanExporter", lambda endpoint: kept)
    monkeypatch.setattr(export, "BatchSpanProcessor", export.SimpleSpanProcessor)
    app = FastAPI()
    app.post("/predict")(lambda: 1)
    instrument(app, ENDPOINT)
    TestClient(app).post("/predict", json="nobody is to read this")
    spans = [span for span in kept.get_finished_spans() if span.name == "POST /predict"]
    assert len(spans) == 1 and spans[0].resource.attributes["service.name"] == "llmcache"
    assert "nobody" not in str([(span.attributes, span.events) for span in kept.get_finished_spans()])
