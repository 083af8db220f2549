"""Stores keep entries and blocks outside the memory of a process, so that they outlive it and can be shared.

    entry or block -> Seal  -> bytes: header, checksum, tensors; encrypted if a key is set
                   -> Store -> put_many, in a thread after the answer (`write_behind`)
    key            -> Store -> get_many, with a deadline (`tier`)
                   -> Seal  -> verified; a mismatch is a miss

The name `memory` means no store: entries live in the process only.
"""

from llmcache.memory.stores.base import Bytes, Purge, Purges, Put, Store, StoreKey, StoreStats, forgets_of
from llmcache.memory.stores.disk import DiskStore
from llmcache.memory.stores.redis import RedisStore
from llmcache.support.registry import Registry

__all__ = ["MEMORY", "STORES", "Bytes", "Purge", "Purges", "Put", "Store", "StoreKey", "StoreStats", "forgets_of"]

MEMORY = "memory"

STORES: Registry[Store] = Registry("store", Store, {"disk": DiskStore, "redis": RedisStore}, reserved=(MEMORY,))
