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
    from llmcache.cache import LLMCache as LLMCache
    from llmcache.config import CacheConfig as CacheConfig
    from llmcache.errors import BankFileError as BankFileError
    from llmcache.errors import CalibrationError as CalibrationError
    from llmcache.errors import ConfigError as ConfigError
    from llmcache.errors import LLMCacheError as LLMCacheError
    from llmcache.errors import NotCachedError as NotCachedError
    from llmcache.errors import RequestError as RequestError
    from llmcache.errors import StoreError as StoreError
    from llmcache.errors import UnfitBankError as UnfitBankError
    from llmcache.errors import UnsafeReuseError as UnsafeReuseError
    from llmcache.errors import UnsupportedModelError as UnsupportedModelError
    from llmcache.errors import WrapError as WrapError
    from llmcache.memory.index import INDEXES as INDEXES
    from llmcache.memory.index import Index as Index
    from llmcache.memory.policies import POLICIES as POLICIES
    from llmcache.memory.policies import Policy as Policy
    from llmcache.memory.stores import STORES as STORES
    from llmcache.memory.stores import Store as Store
    from llmcache.models.adapters import Adapter as Adapter
    from llmcache.models.adapters import register_adapter as register_adapter
    from llmcache.paper.codecs import CODECS as CODECS
    from llmcache.paper.codecs import Codec as Codec
    from llmcache.paper.fingerprints import FINGERPRINTS as FINGERPRINTS
    from llmcache.paper.fingerprints import Fingerprint as Fingerprint
    from llmcache.paper.fingerprints import View as View
    from llmcache.request.outcome import Outcome as Outcome
    from llmcache.reuse.calibration.calibration import Calibration as Calibration
    from llmcache.reuse.calibration.risk_target import Metric as Metric
    from llmcache.reuse.call import Call as Call
    from llmcache.reuse.call import Hit as Hit
    from llmcache.reuse.call import Rung as Rung
    from llmcache.stats import AuditStats as AuditStats
    from llmcache.stats import Stats as Stats

# Where public names live. Imported on first use: `import llmcache` alone must not pay for torch.
_NAMES = {
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

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'llmcache' has no attribute {name!r}")
    return getattr(import_module(f"llmcache.{_HOME[name]}"), name)
