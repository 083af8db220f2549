"""(5) Refresh and replacement: which entry a full bank evicts.

    bank -> policy.on_put, on_hit, on_remove   reports events by key
         -> policy.on_cost                     reports the cost of computing an entry
         <- policy.victim                      key to evict when a budget is used up
         <- policy.expired                     keys to remove whatever the budget

A policy sees keys only; the bank removes the entries. Policies hold no lock: the caller does. With n keys a call is
O(1); in `lfu`, `gdsf`, `staleness` and `divergence` it is O(log n), averaged over calls. `expired` is O(1) plus the
number of keys returned.
"""

from llmcache.memory.policies.base import Policy
from llmcache.memory.policies.divergence import Divergence
from llmcache.memory.policies.gdsf import GDSF
from llmcache.memory.policies.lfu import LFU
from llmcache.memory.policies.lru import FIFO, LRU, TTL
from llmcache.memory.policies.s3_fifo import S3FIFO
from llmcache.memory.policies.staleness import Staleness
from llmcache.support.registry import Registry

__all__ = ["FIFO", "GDSF", "LFU", "LRU", "POLICIES", "S3FIFO", "TTL", "Divergence", "Policy", "Staleness"]

POLICIES: Registry[Policy] = Registry(
    "policy",
    Policy,
    {
        "lru": LRU,
        "lfu": LFU,
        "fifo": FIFO,
        "s3_fifo": S3FIFO,
        "gdsf": GDSF,
        "ttl": TTL,
        "staleness": Staleness,
        "divergence": Divergence,
    },
)
