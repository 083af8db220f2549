"""The context variables of one wrapped model's cache."""

import os
from contextvars import ContextVar

from llmcache.errors import NotCachedError
from llmcache.models.hooks import ModelCall
from llmcache.request.rows import DEFAULT_NAMESPACE
from llmcache.reuse.call import Bypass, Call

DISABLE = "LLMCACHE_DISABLE"  # environment variable: any value but "" and "0" turns caches off


class ContextFlags:
    """The variables behind `namespace(...)`, `disabled()` and `only_if_cached()` of one cache, and of its swaps."""

    def __init__(self, namespace: ContextVar[str] | None = None) -> None:
        """Start with defaults; `LLMCACHE_DISABLE` sets the default of `is_disabled`. `namespace` may be another's."""
        is_off = os.environ.get(DISABLE, "0") not in ("", "0")
        self.namespace: ContextVar[str] = namespace or ContextVar("llmcache_namespace", default=DEFAULT_NAMESPACE)
        self.is_disabled: ContextVar[bool] = ContextVar("llmcache_disabled", default=is_off)
        self.is_only_if_cached: ContextVar[bool] = ContextVar("llmcache_only_if_cached", default=False)
        #: Within the whole model's forward. Else None: the trunk is called alone.
        self.model_call: ContextVar[ModelCall | None] = ContextVar("llmcache_model_call", default=None)

    def check_cached(self, call: Call | Bypass) -> None:
        """Within `only_if_cached`, raise `NotCachedError` if a call has a row without a hit, or bypasses the cache."""
        if self.is_only_if_cached.get():
            if isinstance(call, Bypass):
                raise NotCachedError(None)
            served = call.path.served(call)
            if missing := tuple(row.number for row in call.rows if row.number not in served):
                raise NotCachedError(missing)
