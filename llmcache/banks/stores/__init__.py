"""Where the bytes of a cache bank lie.

    bank -> store[key] = entry   put; the entry is given away
         <- store[key]           got; nobody writes to it

A store is a mapping from key to entry. It never evicts and holds no lock: the bank and its caller do.
"""

from llmcache.banks.stores.base import Entry, Store
from llmcache.banks.stores.memory import MemoryStore
from llmcache.registry import Registry

__all__ = ["STORES", "Entry", "MemoryStore", "Store"]

STORES: Registry[Store] = Registry("store", Store, {"memory": MemoryStore})
