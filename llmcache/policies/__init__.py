"""(5) Refresh and replacement: who leaves a full bank.

    bank -> policy.on_put, on_hit, on_remove   what happens to keys
         <- policy.victim                      who leaves when a budget is used up
         <- policy.expired                     who leaves whatever the budget

A policy sees keys only; the bank removes what it names. Nothing here holds a lock: the caller does. With n keys each
call is O(1), in `lfu`, `staleness` and `divergence` O(log n) averaged over calls; `expired` is O(1) and the number of
keys that it returns.
"""

from llmcache.policies.base import Policy
from llmcache.policies.divergence import Divergence
from llmcache.policies.lfu import LFU
from llmcache.policies.lru import FIFO, LRU, TTL
from llmcache.policies.staleness import Staleness
from llmcache.registry import Registry

__all__ = ["FIFO", "LFU", "LRU", "POLICIES", "TTL", "Divergence", "Policy", "Staleness"]

POLICIES: Registry[Policy] = Registry(
    "policy",
    Policy,
    {"lru": LRU, "lfu": LFU, "fifo": FIFO, "ttl": TTL, "staleness": Staleness, "divergence": Divergence},
)
