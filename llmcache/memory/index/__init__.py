"""Nearest neighbours of fingerprints, by FAISS. An index holds rows by integer id; the caller holds a lock."""

from llmcache.memory.index.base import Index
from llmcache.memory.index.flat import AutoIndex, BinaryIndex, FlatIndex
from llmcache.memory.index.hnsw import HNSWIndex
from llmcache.memory.index.lsh import LSHIndex
from llmcache.support.registry import Registry

__all__ = ["INDEXES", "AutoIndex", "BinaryIndex", "FlatIndex", "HNSWIndex", "Index", "LSHIndex"]

INDEXES: Registry[Index] = Registry(
    "index",
    Index,
    {"auto": AutoIndex, "flat": FlatIndex, "hnsw": HNSWIndex, "binary": BinaryIndex, "lsh": LSHIndex},
    given=("dim",),
)
