"""Where the bytes of a cache bank lie.

    bank -> store[key] = entry   put; the entry is given away
         <- store[key]           got, without the banks' lock; nobody writes to it
         -> del store[key]       evicted: the bank decides who leaves

Which keys are held, and how large their entries are, the bank knows.
"""

from llmcache.banks.stores.base import Entry, Store
from llmcache.banks.stores.memory import MemoryStore
from llmcache.registry import Registry

__all__ = ["STORES", "Entry", "MemoryStore", "Store"]

STORES: Registry[Store] = Registry("store", Store, {"memory": MemoryStore}, given=("device",))
