"""llmcache makes Hugging Face transformers remember: earlier hidden states are reused where that is right.

from llmcache import LLMCache

cache = LLMCache.wrap(model)          # exact repeats are served from memory
outputs = cache(**inputs)             # or model(**inputs) under torch.inference_mode()
print(cache.stats().hit_rate)

A call goes from room to room; each package says in its first lines what it does.

call -> execution.flow   the order of its steps, for layers that models.hooks has swapped
     -> request          its rows and their exact keys
     -> fingerprint      one vector a row
     -> matching         the nearest stored requests, and how risky they are
     -> reuse            what is served instead of being computed; calibration chose the limit, audit watches
     -> banks            what is stored of the others; policies say who leaves
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmcache.banks.compression import CODECS, Codec
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
    from llmcache.fingerprint import FINGERPRINTS, Fingerprint, View
    from llmcache.matching import DECISIONS, Decision, Evidence
    from llmcache.matching.index import INDEXES, Index
    from llmcache.models.adapters import Adapter, register_adapter
    from llmcache.policies import POLICIES, Policy
    from llmcache.request.outcome import Outcome
    from llmcache.reuse import Reuse, Rung
    from llmcache.stats import AuditStats, Stats
    from llmcache.stores import STORES, Store

__version__ = "0.1.0"

# Where public names live. Imported on first use: `import llmcache` alone must not pay for torch.
_NAMES = {
    "banks.compression": ("CODECS", "Codec"),
    "stores": ("STORES", "Store"),
    "cache": ("LLMCache",),
    "calibration.calibration": ("Calibration",),
    "calibration.risk_target": ("Metric",),
    "config": ("CacheConfig",),
    "errors": (
        *("BankFileError", "CalibrationError", "ConfigError", "LLMCacheError", "NotCachedError", "RequestError"),
        *("StoreError", "UnfitBankError", "UnsafeReuseError", "UnsupportedModelError", "WrapError"),
    ),
    "fingerprint": ("FINGERPRINTS", "Fingerprint", "View"),
    "matching": ("DECISIONS", "Decision", "Evidence"),
    "matching.index": ("INDEXES", "Index"),
    "models.adapters": ("Adapter", "register_adapter"),
    "policies": ("POLICIES", "Policy"),
    "request.outcome": ("Outcome",),
    "reuse": ("Reuse", "Rung"),
    "stats": ("AuditStats", "Stats"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "CODECS",
    "DECISIONS",
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
    "Codec",
    "ConfigError",
    "Decision",
    "Evidence",
    "Fingerprint",
    "Index",
    "LLMCache",
    "LLMCacheError",
    "Metric",
    "NotCachedError",
    "Outcome",
    "Policy",
    "RequestError",
    "Reuse",
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
