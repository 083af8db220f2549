"""(5) Refresh and replacement: who leaves a full bank.

    bank -> policy.on_put, on_hit, on_remove   what happens to keys
         -> policy.on_cost                     what computing an entry took
         <- policy.victim                      who leaves when a budget is used up
         <- policy.expired                     who leaves whatever the budget

A policy sees keys only; the bank removes what it names. Nothing here holds a lock: the caller does. With n keys each
call is O(1), in `lfu`, `gdsf`, `staleness` and `divergence` O(log n), averaged over calls; `expired` is O(1) and the
number of keys that it returns.
"""

from llmcache.policies.base import Policy
from llmcache.policies.divergence import Divergence
from llmcache.policies.gdsf import GDSF
from llmcache.policies.lfu import LFU
from llmcache.policies.lru import FIFO, LRU, TTL
from llmcache.policies.s3_fifo import S3FIFO
from llmcache.policies.staleness import Staleness
from llmcache.registry import Registry

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
