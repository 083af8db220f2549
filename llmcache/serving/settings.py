"""Settings of the server."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class ServerSettings(BaseModel):
    """All settings of one server; those of its cache are `CacheConfig`. Names and defaults are TEI's where it has them.

    Attributes:
        model: Name under which the model is served.
        cache: Serve from the cache; else every request is computed.
        keys: File of keys (`llmcache keys`); None: no key is asked for.
        save: Folder that the cache is restored from at the start, and saved to at the end.
        max_concurrent_requests: Requests under way at once; above it they are refused, not queued.
        max_client_batch_size: Inputs of one request.
        max_batch_tokens: Tokens that are computed at once, padding included; fewer where they take over a tenth of
            a second, as the warm-up finds.
        max_batch_requests: Inputs that are computed at once; None: as the tokens allow.
        max_streams: Generations that take turns at once; others wait.
        prefill_chunk: Tokens of a prompt that are run in one turn, after which other generations have theirs; 0: all.
        payload_limit: Bytes of a request's body.
        max_queue_s: Longest time that a request waits to be computed before it is refused, seconds.
        batch_wait_ms: Longest time that a miss waits for others to be computed with, milliseconds.
        grace_s: Seconds in which requests that are under way may end once the server is told to stop; then they are
            refused with 503, and the cache is saved.
        body_timeout_s: Longest time in which a request's body must have come, seconds.
        auto_truncate: Cut inputs that are too long, where the request does not say.
        warmup_tokens: Tokens of the longest input that is run before the server is ready; 0: none.
        reveal_hits: Tell in headers and in `usage` what was served from the cache, and how long each part took. Who
            asks can then tell what was asked before, in its own namespace.
        otlp_endpoint: Address to which OpenTelemetry sends traces; None: none are made. Needs the extra `otel`.
        save_every_s: Seconds between saves while it runs; 0: only at the end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    cache: bool = True
    keys: Path | None = None
    save: Path | None = None
    max_concurrent_requests: int = Field(default=512, ge=1)
    max_client_batch_size: int = Field(default=32, ge=1)
    max_batch_tokens: int = Field(default=16384, ge=1)
    max_batch_requests: int | None = Field(default=None, ge=1)
    max_streams: int = Field(default=8, ge=1)
    prefill_chunk: int = Field(default=256, ge=0)
    payload_limit: int = Field(default=2_000_000, ge=1)
    max_queue_s: float = Field(default=10.0, gt=0)
    batch_wait_ms: float = Field(default=2.0, ge=0)
    grace_s: float = Field(default=20.0, ge=0)
    body_timeout_s: float = Field(default=10.0, gt=0)
    auto_truncate: bool = False
    warmup_tokens: int = Field(default=128, ge=0)
    reveal_hits: bool = False
    otlp_endpoint: str | None = None
    save_every_s: float = Field(default=0.0, ge=0)
