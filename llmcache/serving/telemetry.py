"""Traces of requests with OpenTelemetry (extra `otel`)."""

from fastapi import FastAPI

from llmcache.errors import ConfigError


def instrument(app: FastAPI, endpoint: str) -> None:
    """Send a span of each request to a collector by OTLP over HTTP. Call it after the model is loaded.

    OpenTelemetry is imported here, not earlier, because it patches HTTP clients, which may download models. Spans
    contain route, status and time, and nothing of a request's body.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError("otlp_endpoint: give an HTTP address, such as http://localhost:4318/v1/traces")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"traces need {error.name}: pip install 'llmcache-torch[otel]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "llmcache"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    FastAPIInstrumentor.instrument_app(app, tracer_provider=provider, excluded_urls="health,healthz,metrics")
