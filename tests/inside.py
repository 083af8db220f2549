"""What tests ask of a cache beyond its public names: a rename inside touches this file alone."""

from collections.abc import Sequence
from typing import Any, TypeVar

from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.records import SavedRequest
from llmcache.execution.components import Components
from llmcache.execution.cost import CostModel
from llmcache.execution.recorder import BypassRecorder
from llmcache.execution.store_queue import StoreQueue
from llmcache.matching.partition import IndexPartition
from llmcache.reuse.base import Rung

from llmcache import LLMCache
from llmcache.audit.audit import Audit
from llmcache.calibration.observer import Observer
from llmcache.fingerprint import Fingerprint
from llmcache.models.adapters import Trunk
from llmcache.models.payloads import Payload
from llmcache.models.weights import Weights
from llmcache.prefix.block_pool import BlockPool

Part = TypeVar("Part")


def components(cache: LLMCache) -> Components:
    return cache._components


def replace(cache: LLMCache, **parts: Any) -> None:
    """Serve calls with other parts from now on."""
    for name, part in parts.items():
        setattr(components(cache), name, part)


def banks(cache: LLMCache) -> CacheBanks:
    components(cache).settle()
    return components(cache).banks


def records(cache: LLMCache) -> list[SavedRequest]:
    return banks(cache).records()


def partition(cache: LLMCache) -> IndexPartition:
    """The index of the only requests that are compared."""
    (index,) = banks(cache)._index.values()
    return index


def rungs(cache: LLMCache) -> Sequence[Rung]:
    return components(cache).rungs


def payload(cache: LLMCache) -> Payload:
    return components(cache).payload


def trunk(cache: LLMCache) -> Trunk:
    return components(cache).trunk


def weights(cache: LLMCache) -> Weights:
    return components(cache).weights


def _made(part: Part | None) -> Part:
    """A part that the settings of the test ask for."""
    assert part is not None
    return part


def fingerprint(cache: LLMCache) -> Fingerprint:
    return _made(components(cache).fingerprint)


def prefix(cache: LLMCache) -> BlockPool:
    return _made(components(cache).prefix)


def observer(cache: LLMCache) -> Observer:
    return _made(components(cache).observer)


def audit(cache: LLMCache) -> Audit:
    return _made(components(cache).audit)


def keep_quiet(cache: LLMCache) -> LLMCache:
    """Have nothing audited before `drain`."""
    worker = audit(cache).worker
    worker._idle_s = worker._patience_s = 1e6
    return cache


def store_queue(cache: LLMCache) -> StoreQueue:
    return _made(components(cache).store_queue)


def recorder(cache: LLMCache) -> BypassRecorder:
    return _made(components(cache).recorder)


def cost(cache: LLMCache) -> CostModel | None:
    """None without auto-bypass."""
    return components(cache).cost
