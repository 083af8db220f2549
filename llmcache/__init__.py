"""llmcache makes Hugging Face transformers remember: earlier hidden states are reused where that is right.

from llmcache import LLMCache

cache = LLMCache.wrap(model)          # exact repeats are served from memory
outputs = cache(**inputs)             # or model(**inputs) under torch.inference_mode()
print(cache.stats().hit_rate)
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
        RequestError,
        StoreError,
        UnsafeReuseError,
        UnsupportedModelError,
        WrapError,
    )
    from llmcache.models.adapters import Adapter, register_adapter
    from llmcache.request.outcome import Outcome
    from llmcache.stats import AuditStats, Stats

__version__ = "0.1.0"

# Where each public name lives. Imported on first use: `import llmcache` alone must not pay for torch.
_HOME = {
    "Adapter": "models.adapters",
    "AuditStats": "stats",
    "BankFileError": "errors",
    "Calibration": "calibration.calibration",
    "CalibrationError": "errors",
    "CacheConfig": "config",
    "ConfigError": "errors",
    "LLMCache": "cache",
    "LLMCacheError": "errors",
    "Metric": "calibration.risk_target",
    "Outcome": "request.outcome",
    "RequestError": "errors",
    "Stats": "stats",
    "StoreError": "errors",
    "UnsafeReuseError": "errors",
    "UnsupportedModelError": "errors",
    "WrapError": "errors",
    "register_adapter": "models.adapters",
}

__all__ = [
    "Adapter",
    "AuditStats",
    "BankFileError",
    "CacheConfig",
    "Calibration",
    "CalibrationError",
    "ConfigError",
    "LLMCache",
    "LLMCacheError",
    "Metric",
    "Outcome",
    "RequestError",
    "Stats",
    "StoreError",
    "UnsafeReuseError",
    "UnsupportedModelError",
    "WrapError",
    "register_adapter",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'llmcache' has no attribute {name!r}")
    return getattr(import_module(f"llmcache.{_HOME[name]}"), name)
