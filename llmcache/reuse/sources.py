"""Sources: stored requests that may serve others, each with answer, tokens and entry; and the index to find them.

Sizes: B rows of a call, k neighbours, F fingerprint width, S width of a signature.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmcache.memory.bank import Entry
from llmcache.memory.index import Index
from llmcache.request.rows import Row, Scope
from llmcache.support.arrays import Floats
from llmcache.support.threads import forkable

_AT_ONCE = 4096  # vectors added to an index at a time


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A stored request that may serve others."""

    entry: Entry  # its stored output, never written to
    ids: bytes  # its valid token ids, packed
    answer: Floats  # signature of its answer (S,), float32
    length: int = 0  # its number of valid tokens, if only requests of this length may find it; else 0
    logits: Floats | None = None  # (C,) of the model's output, if these are all of it; float32

    @property
    def key(self) -> str:
        return self.entry.key

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, for saves."""
        return self.entry.tensors | ({} if self.logits is None else {"logits": torch.from_numpy(self.logits)})


class Near(NamedTuple):
    """The sources found for one request, best first."""

    sources: Sequence[Source] = ()
    similarity: Sequence[float] = ()  # of each to the request


_NOTHING = Near()


class _Partition:
    """Sources of one scope and length."""

    __slots__ = ("_next", "index", "numbers", "sources")

    def __init__(self, index: Index) -> None:
        self.index = index
        self.sources: dict[int, Source] = {}  # by number in the index
        self.numbers: dict[str, int] = {}  # by key
        self._next = count()

    def add(self, sources: Sequence[Source], vectors: Floats) -> None:
        numbers = [self.numbers.setdefault(one.key, number) for one, number in zip(sources, self._next, strict=False)]
        self.index.add(np.array(numbers, np.int64), vectors)
        self.sources |= zip(numbers, sources, strict=True)

    def remove(self, key: str) -> None:
        number = self.numbers.pop(key)
        self.sources.pop(number, None)  # first: if the index fails to remove the row, it maps to no source
        self.index.remove(np.array([number], np.int64))


class Choice(NamedTuple):
    """The source chosen for a request, and its risk: infinite if the gate refuses it or it is quarantined."""

    source: Source | None  # None: the draft
    similarity: float | None  # of the source to the request
    risk: float  # 0 to 1, or infinite
    risk_unquarantined: float  # ignoring quarantine, as at calibration: for drift, and for the draft


class Sources:
    """Sources by scope, and by length if payloads fit one length only. Thread-safe; a search takes one lock."""

    def __init__(self, make_index: Callable[[int], Index], by_length: bool) -> None:
        """Start empty.

        Args:
            make_index: Returns an empty index, given F.
            by_length: Requests find only sources of their own length.
        """
        self._make_index = make_index
        self._by_length = by_length
        self._partitions: dict[tuple[Scope, int], _Partition] = {}
        self._where: dict[str, _Partition] = {}  # by key
        #: Namespace by key of quarantined sources, which vote but serve no other request; kept after their removal.
        self.quarantined: dict[str, str] = {}
        #: Guards all attributes.
        self.lock = forkable(threading.RLock())

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[Source]:
        with self.lock:
            held = [source for part in self._partitions.values() for source in part.sources.values()]
        return iter(held)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    @property
    def index_nbytes(self) -> int:
        with self.lock:
            return sum(part.index.nbytes for part in self._partitions.values())

    def length_of(self, row: Row) -> int:
        """Return the number of valid tokens that sources of a row must have; 0: any."""
        return row.n_valid if self._by_length else 0

    def add(self, sources: Iterable[Source], vectors: Floats) -> None:
        """Add sources with their fingerprints, float32 (N, F); a known key gets the new source and fingerprint."""
        with self.lock:
            parts: dict[tuple[Scope, int], list[tuple[Source, Floats]]] = {}
            for source, vector in zip(sources, vectors, strict=True):
                parts.setdefault((source.entry.scope, source.length), []).append((source, vector))
            for name, pairs in parts.items():
                part = self._partitions.get(name)
                if part is None:
                    part = self._partitions[name] = _Partition(self._make_index(vectors.shape[1]))
                for first in range(0, len(pairs), _AT_ONCE):
                    some, near = zip(*pairs[first : first + _AT_ONCE], strict=True)
                    part.add(some, np.stack(near))
                    self._where |= dict.fromkeys((source.key for source in some), part)

    def search(self, scope: Scope, rows: Sequence[Row], vectors: Floats, k: int) -> list[Near]:
        """Return up to k nearest sources of each of B rows; `vectors` are their fingerprints, float32 (B, F)."""
        found = [_NOTHING] * len(rows)
        groups: dict[int, list[int]] = {}  # positions in `rows`, by length; one group unless `by_length`
        for place, row in enumerate(rows):
            groups.setdefault(self.length_of(row), []).append(place)
        with self.lock:
            for length, places in groups.items():
                part = self._partitions.get((scope, length))
                if part is None or not part.numbers:
                    continue
                numbers, similarity = part.index.search(vectors if len(groups) == 1 else vectors[places], k)
                for place, near, like in zip(places, numbers.tolist(), similarity.tolist(), strict=True):
                    sources: Any = list(map(part.sources.get, near))
                    if None in sources:  # fewer than k, or a source half removed
                        sources, like = list(filter(None, sources)), list(compress(like, sources))
                    found[place] = Near(sources, like)
        return found

    def vectors(self, sources: Iterable[Source]) -> Floats:
        """Return fingerprints (N, F) of held sources, as a search compares them."""
        with self.lock:
            parts = [(self._where[source.key], source.key) for source in sources]
            return np.concatenate([part.index.vectors(np.array([part.numbers[key]])) for part, key in parts])

    def remove(self, key: str) -> None:
        """Remove a source, unless it is buried. An unknown key is ignored."""
        if key not in self._where:  # checked without the lock: called for every entry removed from the bank
            return
        with self.lock:
            part = self._where.get(key)
            if part is None or not part.sources[part.numbers[key]].entry.fields:  # a buried source goes on voting
                return
            del self._where[key]
            part.remove(key)

    def may_serve(self, key: str) -> bool:
        """Whether a source is held and not quarantined."""
        return key in self._where and key not in self.quarantined

    def quarantine(self, key: str, namespace: str) -> None:
        """Quarantine a source until `forget`: it still votes, but serves no other request."""
        with self.lock:
            self.quarantined[key] = namespace

    def bury(self, key: str, namespace: str) -> None:
        """Quarantine a source and drop its stored output: it still votes."""
        with self.lock:
            self.quarantined[key] = namespace
            if (part := self._where.get(key)) is not None:
                number = part.numbers[key]
                buried = Entry(key, part.sources[number].entry.scope, ())
                part.sources[number] = replace(part.sources[number], entry=buried, logits=None)

    def clear(self) -> None:
        """Remove all sources. Quarantines stay."""
        with self.lock:
            self._partitions.clear()
            self._where.clear()

    def forget(self, namespace: str | None = None) -> None:
        """Forget sources and quarantines of a namespace (None: all)."""
        with self.lock:
            for name, part in list(self._partitions.items()):
                if namespace in (None, name[0].namespace):
                    del self._partitions[name]
                    for key in part.numbers:
                        self._where.pop(key, None)
            self.quarantined = {
                key: of for key, of in self.quarantined.items() if namespace is not None and of != namespace
            }
