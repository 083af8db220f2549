"""Nearest neighbours of a fingerprint.

    partition -> index.add, remove   rows under integer ids
              -> index.search        the k most similar rows of each query

An index knows vectors and integer ids, nothing of entries, keys or budgets. It holds no lock: the caller does.
"""

from llmcache.matching.index.auto import AutoIndex
from llmcache.matching.index.base import Index
from llmcache.matching.index.binary import BinaryIndex
from llmcache.matching.index.flat import FlatIndex
from llmcache.matching.index.hnsw import HNSWIndex
from llmcache.matching.index.lsh import LSHIndex
from llmcache.matching.index.refined import RefinedIndex
from llmcache.registry import Registry

__all__ = ["INDEXES", "AutoIndex", "BinaryIndex", "FlatIndex", "HNSWIndex", "Index", "LSHIndex", "RefinedIndex"]

INDEXES: Registry[Index] = Registry(
    "index",
    Index,
    {
        "auto": AutoIndex,
        "flat": FlatIndex,
        "refined": RefinedIndex,
        "hnsw": HNSWIndex,
        "binary": BinaryIndex,
        "lsh": LSHIndex,
    },
    given=("dim",),
)
