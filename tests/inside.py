"""What tests ask of a cache beyond its public names: a rename inside touches this file alone."""

from collections.abc import Sequence
from typing import Any

from llmcache import LLMCache
from llmcache.audit.audit import Audit
from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.records import SavedRequest
from llmcache.calibration.observer import Observer
from llmcache.execution.components import Components
from llmcache.execution.cost import CostModel
from llmcache.execution.recorder import BypassRecorder
from llmcache.fingerprint import Fingerprint
from llmcache.matching.partition import IndexPartition
from llmcache.models.adapters import Trunk
from llmcache.models.payloads import Payload
from llmcache.models.weights import Weights
from llmcache.reuse.base import Rung
from llmcache.reuse.prefix.block_pool import BlockPool


def components(cache: LLMCache) -> Components:
    return cache._components


def replace(cache: LLMCache, **parts: Any) -> None:
    """Serve calls with other parts from now on."""
    for name, part in parts.items():
        setattr(components(cache), name, part)


def banks(cache: LLMCache) -> CacheBanks:
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


def fingerprint(cache: LLMCache) -> Fingerprint:
    found = components(cache).fingerprint
    assert found is not None
    return found


def prefix(cache: LLMCache) -> BlockPool:
    found = components(cache).prefix
    assert found is not None
    return found


def observer(cache: LLMCache) -> Observer:
    found = components(cache).observer
    assert found is not None
    return found


def audit(cache: LLMCache) -> Audit:
    found = components(cache).audit
    assert found is not None
    return found


def recorder(cache: LLMCache) -> BypassRecorder:
    found = components(cache).recorder
    assert found is not None
    return found


def cost(cache: LLMCache) -> CostModel | None:
    """None without auto-bypass."""
    return components(cache).cost
