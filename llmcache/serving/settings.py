"""Settings of the server."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class ServerSettings(BaseModel):
    """All settings of one server; those of its cache are `CacheConfig`. Names and defaults are TEI's where it has them.

    Times are in seconds or, if the name says so, in milliseconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str  # name under which the model is served
    cache: bool = True  # serve from the cache; else every request is computed
    keys: Path | None = None  # file of keys (`llmcache keys`); None: no key is asked for
    save: Path | None = None  # folder that the cache is restored from at the start, and saved to at the end
    save_every_s: float = Field(default=0.0, ge=0)  # between saves while it runs; 0: only at the end
    max_concurrent_requests: int = Field(default=512, ge=1)  # requests under way; more are refused, not queued
    max_client_batch_size: int = Field(default=32, ge=1)  # inputs of one request
    # Tokens that are computed at once, padding included; fewer where they take over a tenth of a second, as the warm-up
    # finds.
    max_batch_tokens: int = Field(default=16384, ge=1)
    max_batch_requests: int | None = Field(default=None, ge=1)  # inputs computed at once; None: as the tokens allow
    max_streams: int = Field(default=8, ge=1)  # generations that take turns; others wait
    prefill_chunk: int = Field(default=256, ge=0)  # tokens of a prompt that are run in one turn; 0: all
    payload_limit: int = Field(default=2_000_000, ge=1)  # bytes of a request's body
    max_queue_s: float = Field(default=10.0, gt=0)  # that a request waits to be computed before it is refused
    batch_wait_ms: float = Field(default=2.0, ge=0)  # that a miss waits for others to be computed with
    # In which requests under way may end once the server is told to stop; then they are refused.
    grace_s: float = Field(default=20.0, ge=0)
    body_timeout_s: float = Field(default=10.0, gt=0)  # in which a request's body must have come
    auto_truncate: bool = False  # cut inputs that are too long, where the request does not say
    warmup_tokens: int = Field(default=128, ge=0)  # of the longest input that is run at the start; 0: none
    # Tell in headers and `usage` what the cache served, and times. Clients then learn what was asked before in their
    # namespace.
    reveal_hits: bool = False
    otlp_endpoint: str | None = None  # to which OpenTelemetry sends traces (extra `otel`); None: none are made
