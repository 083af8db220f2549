"""Nearest neighbours of fingerprints, by FAISS. An index holds rows by integer id; the caller holds a lock."""

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
