"""What one server holds, and in which state it is. Routes find it as `request.app.state.server`."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

from llmcache.cache import LLMCache
from llmcache.serving.history import History
from llmcache.serving.metrics import Metrics
from llmcache.serving.model_thread import ModelThread
from llmcache.serving.settings import ServerSettings
from llmcache.serving.tenants import Tenant

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
        self.is_disabled = False  # by an operator; see `for_tenant`
        self.phase: Phase = "starting"

    @contextmanager
    def for_tenant(self, tenant: Tenant) -> Iterator[None]:
        """Within: calls are stored for a tenant, and served from what it stored; or computed, if that is disabled."""
        off = self.cache.disabled() if self.is_disabled else nullcontext()
        with self.cache.namespace(tenant.namespace), off:
            yield
