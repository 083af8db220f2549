"""What all parts of a server that run the model share."""

from collections.abc import Callable
from typing import NamedTuple

from llmcache.cache import LLMCache
from llmcache.serving.metrics import Metrics
from llmcache.serving.model_thread import ModelThread
from llmcache.serving.settings import ServerSettings


class Shared(NamedTuple):
    """Parts of one server; `is_caching` returns whether requests are looked up and stored."""

    cache: LLMCache
    thread: ModelThread
    settings: ServerSettings
    metrics: Metrics
    is_caching: Callable[[], bool]
