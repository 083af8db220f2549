"""llmcache caches what Hugging Face transformers compute, and reuses hidden states of earlier requests.

from llmcache import LLMCache

cache = LLMCache.wrap(model)          # exact repeats are served from memory
outputs = cache(**inputs)             # or model(**inputs) under torch.inference_mode()
print(cache.stats().hit_rate)

Where to find the parts of a call:

call     the order of a call's steps
request  its arguments, its rows and their exact keys, or the reason for a bypass
bank     entries of earlier requests; policies evict them, stores keep them beyond memory
prefix   shared prefixes of prompts, in blocks of K/V
decide   approximate hits and their risk: calibration chooses the limit, audit checks it
engines  compute the rows without a hit
paper    the layer-wise cache of the paper (`tau`), separate from the rest
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcache.cache import LLMCache
    from llmcache.calibration.calibration import Calibration
    from llmcache.calibration.risk_target import Metric
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
    from llmcache.index import INDEXES, Index
    from llmcache.models.adapters import Adapter, register_adapter
    from llmcache.paper.codecs import CODECS, Codec
    from llmcache.paper.fingerprints import FINGERPRINTS, Fingerprint, View
    from llmcache.policies import POLICIES, Policy
    from llmcache.request.call import Call, Hit, Rung
    from llmcache.request.outcome import Outcome
    from llmcache.stats import AuditStats, Stats
    from llmcache.stores import STORES, Store

__version__ = "0.1.0"

# Where public names live. Imported on first use: `import llmcache` alone must not pay for torch.
_NAMES = {
    "paper.codecs": ("CODECS", "Codec"),
    "stores": ("STORES", "Store"),
    "cache": ("LLMCache",),
    "calibration.calibration": ("Calibration",),
    "calibration.risk_target": ("Metric",),
    "config": ("CacheConfig",),
    "errors": (
        *("BankFileError", "CalibrationError", "ConfigError", "LLMCacheError", "NotCachedError", "RequestError"),
        *("StoreError", "UnfitBankError", "UnsafeReuseError", "UnsupportedModelError", "WrapError"),
    ),
    "paper.fingerprints": ("FINGERPRINTS", "Fingerprint", "View"),
    "index": ("INDEXES", "Index"),
    "models.adapters": ("Adapter", "register_adapter"),
    "policies": ("POLICIES", "Policy"),
    "request.outcome": ("Outcome",),
    "request.call": ("Call", "Hit", "Rung"),
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
    "WrapError",
    "register_adapter",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'llmcache' has no attribute {name!r}")
    return getattr(import_module(f"llmcache.{_HOME[name]}"), name)
