"""Settings of the server."""

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from llmcache.errors import ConfigError


def _option(default: Any, text: str, **limits: Any) -> Any:
    return Field(default=default, description=text, **limits)


class ServerSettings(BaseModel):
    """All settings of one server; `CacheConfig` has those of its cache. Names and defaults follow TEI where possible.

    Settings with a description are options of `llmcache serve`. Times are in seconds, or in milliseconds if the name
    ends in `_ms`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str  # name of the model for clients
    keys: Path | None = None  # key file (`llmcache keys`); None: requests need no key
    save: Path | None = None  # folder from which the cache is restored at startup and to which it is saved at the end
    body_timeout_s: float = Field(default=10.0, gt=0)  # longest time to receive a request's body
    model_alias: list[str] = _option(
        [], "Another name of the model for clients, such as text-embedding-3-small. May be repeated."
    )
    save_every_s: float = _option(0.0, "Seconds between saves; 0: only at the end.", ge=0)
    cache: bool = _option(True, "Serve from the cache, or compute every request.")
    max_concurrent_requests: int = _option(512, "Maximum concurrent requests; more are refused.", ge=1)
    max_client_batch_size: int | None = _option(
        None, "Maximum inputs per request; default: 2048, of a decoder 32.", ge=1
    )
    allow_token_ids: bool = _option(False, "Accept token ids in /v1/embeddings, where most clients send OpenAI's.")
    # Padding included. The warm-up lowers it so that a batch takes about 0.1 s at most.
    max_batch_tokens: int = _option(16384, "Maximum tokens per batch.", ge=1)
    max_batch_requests: int | None = _option(None, "Maximum inputs per batch.", ge=1)
    max_streams: int = _option(8, "Maximum concurrent generations.", ge=1)  # more wait
    prefill_chunk: int = _option(96, "Prompt tokens computed between two tokens of a stream; 0: whole prompts.", ge=0)
    payload_limit: int = _option(2_000_000, "Maximum bytes of a request's body.", ge=1)
    max_queue_s: float = _option(10.0, "Seconds a request may wait before it is refused.", ge=0.001)
    batch_wait_ms: float = _option(2.0, "Milliseconds a miss waits for others to share its batch.", ge=0)
    grace_s: float = _option(20.0, "Seconds for requests in progress to finish when stopping.", ge=0)
    auto_truncate: bool = _option(False, "Cut inputs that are too long.")  # unless the request sets `truncate`
    warmup_tokens: int = _option(128, "Tokens of the longest warm-up input; 0: no warm-up.", ge=0)
    reveal_hits: bool = _option(
        False, "Reveal hits and times in headers and usage. Clients can then find out what others asked."
    )
    cors_allow_origin: list[str] = _option(
        [], "Origin whose pages may send requests, such as https://example.org, or *. May be repeated."
    )
    access_log: bool = _option(False, "Log each request: route, status, time, key; never its text.")
    otlp_endpoint: str | None = _option(None, "Address for OpenTelemetry traces; needs extra otel.")

    @field_validator("cors_allow_origin")
    @classmethod
    def _are_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ConfigError(f"cors_allow_origin: give * or scheme://host[:port], without a path (got {origin!r})")
        return origins
