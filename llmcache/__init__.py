"""llmcache makes Hugging Face transformers remember: earlier hidden states are reused where that is right.

from llmcache import LLMCache

cache = LLMCache.wrap(model)          # exact repeats are served from memory
outputs = cache(**inputs)             # or model(**inputs) under torch.inference_mode()
print(cache.stats().hit_rate)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcache.banks.compression import CODECS, Codec
    from llmcache.banks.stores import STORES, Entry, Store
    from llmcache.cache import LLMCache
    from llmcache.calibration.calibration import Calibration
    from llmcache.calibration.risk_target import Metric
    from llmcache.config import CacheConfig
    from llmcache.errors import (
        BankFileError,
        CalibrationError,
        ConfigError,
        LLMCacheError,
        RequestError,
        StoreError,
        UnsafeReuseError,
        UnsupportedModelError,
        WrapError,
    )
    from llmcache.fingerprint import FINGERPRINTS, Fingerprint, View
    from llmcache.matching import DECISIONS, Decision, Evidence
    from llmcache.matching.index import INDEXES, Index
    from llmcache.models.adapters import Adapter, register_adapter
    from llmcache.policies import POLICIES, Policy
    from llmcache.request.outcome import Outcome
    from llmcache.reuse import RUNGS, Reuse, Rung
    from llmcache.stats import AuditStats, Stats

__version__ = "0.1.0"

# Where each public name lives. Imported on first use: `import llmcache` alone must not pay for torch.
_HOME = {
    "Adapter": "models.adapters",
    "AuditStats": "stats",
    "BankFileError": "errors",
    "CODECS": "banks.compression",
    "CacheConfig": "config",
    "Calibration": "calibration.calibration",
    "CalibrationError": "errors",
    "Codec": "banks.compression",
    "ConfigError": "errors",
    "DECISIONS": "matching",
    "Decision": "matching",
    "Entry": "banks.stores",
    "Evidence": "matching",
    "FINGERPRINTS": "fingerprint",
    "Fingerprint": "fingerprint",
    "INDEXES": "matching.index",
    "Index": "matching.index",
    "LLMCache": "cache",
    "LLMCacheError": "errors",
    "Metric": "calibration.risk_target",
    "Outcome": "request.outcome",
    "POLICIES": "policies",
    "Policy": "policies",
    "RUNGS": "reuse",
    "RequestError": "errors",
    "Reuse": "reuse",
    "Rung": "reuse",
    "STORES": "banks.stores",
    "Stats": "stats",
    "Store": "banks.stores",
    "StoreError": "errors",
    "UnsafeReuseError": "errors",
    "UnsupportedModelError": "errors",
    "View": "fingerprint",
    "WrapError": "errors",
    "register_adapter": "models.adapters",
}

__all__ = [
    "CODECS",
    "DECISIONS",
    "FINGERPRINTS",
    "INDEXES",
    "POLICIES",
    "RUNGS",
    "STORES",
    "Adapter",
    "AuditStats",
    "BankFileError",
    "CacheConfig",
    "Calibration",
    "CalibrationError",
    "Codec",
    "ConfigError",
    "Decision",
    "Entry",
    "Evidence",
    "Fingerprint",
    "Index",
    "LLMCache",
    "LLMCacheError",
    "Metric",
    "Outcome",
    "Policy",
    "RequestError",
    "Reuse",
    "Rung",
    "Stats",
    "Store",
    "StoreError",
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
