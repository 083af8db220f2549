"""Reads and writes a bank's entries in a store, by exact key, each with a description of the trunk's output."""

from collections.abc import Iterable, Sequence

from llmcache.memory.bank import Bank, Entry
from llmcache.memory.stores.tier import Tier
from llmcache.models.output_formats import OutputFormats
from llmcache.models.packing import Packing
from llmcache.request.rows import Row
from llmcache.reuse.call import Call


class StoredEntries:
    """Reads and writes the entries of a bank in a store. Thread-safe."""

    def __init__(self, tier: Tier, bank: Bank, packings: OutputFormats[Packing]) -> None:
        self.tier, self._bank, self._packings = tier, bank, packings

    def recall(self, call: Call, rows: Sequence[Row]) -> None:
        """Read the entries of requests that the bank lacks, in one read, and put them into the bank."""
        wanted = list(dict.fromkeys(row.key for row in rows if row.key not in self._bank))
        if not wanted:
            return
        n_tokens = len(wanted) * call.requests.ids.shape[1]
        found = []
        for key, value in zip(
            wanted, self.tier.read([(call.scope, entry_name(key)) for key in wanted], n_tokens), strict=True
        ):
            if value is not None:
                self._packings.add_described(*value.about["kind"])
                found.append(Entry.of(key, call.scope, value.tensors, value.about["layout"]))
        self._bank.put(found, call.generation)

    def put(self, call: Call, entries: Iterable[Entry]) -> None:
        """Queue entries of a call to be written."""
        kind = self._packings.describe(call.kind)
        for entry in entries:
            about = {"layout": entry.layout.hex(), "kind": kind}
            self.tier.write(entry.scope, entry_name(entry.key), entry.tensors, about, call.epoch, call.since)

    def offer_again(self, call: Call, entries: Iterable[Entry]) -> None:
        """Queue those entries that serve this call and were dropped when they were first queued."""
        if self.tier.has_dropped and self._packings.knows(call.kind):
            self.put(call, [entry for entry in entries if self.tier.lacks(entry.scope, entry_name(entry.key))])


def entry_name(key: str) -> str:
    return f"e.{key}"
