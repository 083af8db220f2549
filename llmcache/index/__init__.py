"""Nearest neighbours of a fingerprint, by FAISS. An index holds rows under integer ids; the caller holds the lock."""

from llmcache.index.base import Index
from llmcache.index.flat import AutoIndex, BinaryIndex, FlatIndex
from llmcache.index.hnsw import HNSWIndex
from llmcache.index.lsh import LSHIndex
from llmcache.registry import Registry

__all__ = ["INDEXES", "AutoIndex", "BinaryIndex", "FlatIndex", "HNSWIndex", "Index", "LSHIndex"]

INDEXES: Registry[Index] = Registry(
    "index",
    Index,
    {"auto": AutoIndex, "flat": FlatIndex, "hnsw": HNSWIndex, "binary": BinaryIndex, "lsh": LSHIndex},
    given=("dim",),
)
