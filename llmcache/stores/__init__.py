"""Stores: where entries and blocks lie behind the memory of one process, to outlive it or to be shared.

    entry or block -> Seal  -> bytes with a header, checksum and maybe encrypted
                   -> Store -> put_many, behind the answers (`write_behind`)
    key            -> Store -> get_many, under a deadline (`tier`)
                   -> Seal  -> checked; a mismatch is a miss

The name `memory` stands for none: what is kept lies in the process alone.
"""

from llmcache.registry import Registry
from llmcache.stores.base import Bytes, Purge, Purges, Put, Store, StoreKey, StoreStats
from llmcache.stores.disk import DiskStore
from llmcache.stores.redis import RedisStore

__all__ = ["MEMORY", "STORES", "Bytes", "Purge", "Purges", "Put", "Store", "StoreKey", "StoreStats"]

MEMORY = "memory"

STORES: Registry[Store] = Registry("store", Store, {"disk": DiskStore, "redis": RedisStore}, reserved=(MEMORY,))
