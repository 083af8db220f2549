"""What one server holds, and in which state it is. Routes find it as `request.app.state.server`."""

from typing import Any, Literal

from llmcache.cache import LLMCache
from llmcache.serving.history import History
from llmcache.serving.metrics import Metrics
from llmcache.serving.model_thread import ModelThread
from llmcache.serving.settings import ServerSettings

Phase = Literal["starting", "ready", "draining", "stopped"]


class Server:
    """One model, its cache, and the thread that runs it."""

    def __init__(self, settings: ServerSettings, model: Any, tokenizer: Any, cache: LLMCache) -> None:
        """Hold what was loaded; `phase` is `starting` until `start`."""
        self.settings = settings
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.thread = ModelThread()
        self.metrics = Metrics(settings.model, cache)
        self.history = History()
        self.is_disabled = False  # by an operator: requests are computed within `cache.disabled()`
        self.phase: Phase = "starting"
