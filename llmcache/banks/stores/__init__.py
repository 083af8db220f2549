"""Stores: where sealed values lie behind the memory of the banks, to outlive a process or to be shared.

    entry or block -> seal  -> bytes with a header, checksum and maybe encrypted
                   -> Store -> put_many, behind the answers
    key            -> Store -> get_many, under a deadline
                   -> seal  -> checked; a mismatch is a miss

The name `memory` stands for none: what is kept lies in the process alone.
"""

from llmcache.banks.stores.base import Bytes, Event, Events, Put, Store, StoreKey, StoreStats
from llmcache.banks.stores.disk import DiskStore
from llmcache.banks.stores.redis import RedisStore
from llmcache.registry import Registry

__all__ = ["MEMORY", "STORES", "Bytes", "Event", "Events", "Put", "Store", "StoreKey", "StoreStats"]

MEMORY = "memory"

STORES: Registry[Store] = Registry("store", Store, {"disk": DiskStore, "redis": RedisStore}, reserved=(MEMORY,))
