"""llmcache caches what Hugging Face transformers compute, and reuses hidden states of earlier requests.

from llmcache import LLMCache

cache = LLMCache.wrap(model)          # exact repeats are served from memory
outputs = cache(**inputs)             # or model(**inputs) under torch.inference_mode()
print(cache.stats().hit_rate)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmcache.support.version import __version__ as __version__

if TYPE_CHECKING:
    from llmcache.advice.advice import Advice, Way
    from llmcache.cache import LLMCache
    from llmcache.config import CacheConfig
    from llmcache.errors import (
        BankFileError,
        CalibrationError,
        ConfigError,
        LLMCacheError,
        NotCachedError,
        RequestError,
        StoreError,
        UnfitBankError,
        UnsafeReuseError,
        UnsupportedModelError,
        WrapError,
    )
    from llmcache.memory.index import INDEXES, Index
    from llmcache.memory.policies import POLICIES, Policy
    from llmcache.memory.stores import STORES, Store
    from llmcache.models.adapters import Adapter, register_adapter
    from llmcache.paper.codecs import CODECS, Codec
    from llmcache.paper.fingerprints import FINGERPRINTS, Fingerprint, View
    from llmcache.request.outcome import Outcome
    from llmcache.reuse.calibration.calibration import Calibration
    from llmcache.reuse.calibration.risk_target import Metric
    from llmcache.reuse.call import Call, Hit, Rung
    from llmcache.stats import AuditStats, Stats

# Where public names live. Imported on first use: `import llmcache` alone must not pay for torch.
_NAMES = {
    "advice.advice": ("Advice", "Way"),
    "paper.codecs": ("CODECS", "Codec"),
    "memory.stores": ("STORES", "Store"),
    "cache": ("LLMCache",),
    "reuse.calibration.calibration": ("Calibration",),
    "reuse.calibration.risk_target": ("Metric",),
    "config": ("CacheConfig",),
    "errors": (
        *("BankFileError", "CalibrationError", "ConfigError", "LLMCacheError", "NotCachedError", "RequestError"),
        *("StoreError", "UnfitBankError", "UnsafeReuseError", "UnsupportedModelError", "WrapError"),
    ),
    "paper.fingerprints": ("FINGERPRINTS", "Fingerprint", "View"),
    "memory.index": ("INDEXES", "Index"),
    "models.adapters": ("Adapter", "register_adapter"),
    "memory.policies": ("POLICIES", "Policy"),
    "request.outcome": ("Outcome",),
    "reuse.call": ("Call", "Hit", "Rung"),
    "stats": ("AuditStats", "Stats"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "CODECS",
    "FINGERPRINTS",
    "INDEXES",
    "POLICIES",
    "STORES",
    "Adapter",
    "Advice",
    "AuditStats",
    "BankFileError",
    "CacheConfig",
    "Calibration",
    "CalibrationError",
    "Call",
    "Codec",
    "ConfigError",
    "Fingerprint",
    "Hit",
    "Index",
    "LLMCache",
    "LLMCacheError",
    "Metric",
    "NotCachedError",
    "Outcome",
    "Policy",
    "RequestError",
    "Rung",
    "Stats",
    "Store",
    "StoreError",
    "UnfitBankError",
    "UnsafeReuseError",
    "UnsupportedModelError",
    "View",
    "Way",
    "WrapError",
    "register_adapter",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'llmcache' has no attribute {name!r}")
    return getattr(import_module(f"llmcache.{_HOME[name]}"), name)
