"""What a cache is made of, put together once and handed to those who serve calls with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmcache.adapters import Trunk
from llmcache.fingerprint import Fingerprint
from llmcache.heads import Head
from llmcache.library import Library
from llmcache.payloads import Payload
from llmcache.reuse import Rung
from llmcache.stats import Counters
from llmcache.weights import Weights


@dataclass(slots=True)
class Parts:
    """What a call is served with."""

    trunk: Trunk
    head: Head
    payload: Payload
    library: Library
    rungs: Sequence[Rung]
    fingerprint: Fingerprint | None
    weights: Weights
    counters: Counters = field(default_factory=Counters)
