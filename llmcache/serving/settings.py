"""Settings of the server."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from llmcache.errors import ConfigError


def _checked_origin(origin: str) -> str:
    if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
        raise ConfigError(f"cors_allow_origin: give * or scheme://host[:port], without a path (got {origin!r})")
    return origin


_Origin = Annotated[str, AfterValidator(_checked_origin)]


class ServerSettings(BaseModel):
    """All settings of one server; `CacheConfig` has those of its cache. Names and defaults follow TEI where possible.

    Times are in seconds, or in milliseconds if the name ends in `_ms`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str  # name of the model for clients
    model_alias: tuple[str, ...] = ()  # other names of the model that requests may give
    cache: bool = True  # serve from the cache; False: compute every request
    keys: Path | None = None  # key file (`llmcache keys`); None: requests need no key
    save: Path | None = None  # folder from which the cache is restored at startup and to which it is saved at the end
    save_every_s: float = Field(default=0.0, ge=0)  # interval of saves while running; 0: only at the end
    max_concurrent_requests: int = Field(default=512, ge=1)  # limit of requests in progress; more are refused
    max_client_batch_size: int | None = Field(default=None, ge=1)  # maximum inputs per request; None: the server's
    allow_token_ids: bool = False  # accept token ids in `/v1/embeddings`; most clients send those of OpenAI's tokenizer
    # Maximum tokens per batch, padding included. The warm-up lowers it so that a batch takes about 0.1 s at most.
    max_batch_tokens: int = Field(default=16384, ge=1)
    max_batch_requests: int | None = Field(default=None, ge=1)  # maximum inputs per batch; None: no limit of its own
    max_streams: int = Field(default=8, ge=1)  # concurrent generations, which take turns; more wait
    prefill_chunk: int = Field(default=256, ge=0)  # prompt tokens computed per turn; 0: the whole prompt
    payload_limit: int = Field(default=2_000_000, ge=1)  # maximum bytes of a request's body
    max_queue_s: float = Field(default=10.0, gt=0)  # longest wait of a request to be computed; then it is refused
    batch_wait_ms: float = Field(default=2.0, ge=0)  # wait of a miss for others to share its batch
    # Time for requests in progress to end after the signal to stop; then they are refused.
    grace_s: float = Field(default=20.0, ge=0)
    body_timeout_s: float = Field(default=10.0, gt=0)  # longest time to receive a request's body
    auto_truncate: bool = False  # cut inputs that are too long, unless the request sets `truncate`
    warmup_tokens: int = Field(default=128, ge=0)  # tokens of the longest warm-up input; 0: no warm-up
    # Reveal hits and times in headers and `usage`. Clients can then find out which requests their namespace has seen.
    reveal_hits: bool = False
    cors_allow_origin: tuple[_Origin, ...] = ()  # pages that may send requests for inference, by origin; "*": all
    access_log: bool = False  # log method, route, status, time, key and id of each request
    otlp_endpoint: str | None = None  # address for OpenTelemetry traces (extra `otel`); None: no traces
