"""(2) Layer-wise Cache Bank: the entries of one layer, within budgets; the only place that evicts entries."""

from collections.abc import Callable, Iterable

from llmcache.banks.entry import Entry
from llmcache.banks.memory import Memory
from llmcache.policies import Policy


class Bank:
    """Entries in memory and the policy that decides who leaves, kept consistent.

    Not thread-safe: the caller holds one lock around all banks, but to `read`.
    """

    def __init__(self, memory: Memory, policy: Policy, max_bytes: int, max_entries: int | None = None) -> None:
        """Start empty, with budgets of entry bytes and of entries (None: without)."""
        self._memory = memory
        self._policy = policy
        self._nbytes_of: dict[str, int] = {}  # of each entry held, oldest put first
        self._nbytes = 0
        self.max_bytes = max_bytes
        self.max_entries = max_entries
        self._pinned: dict[str, int] = {}  # bytes of entries that may not leave, by key
        self._pinned_bytes = 0
        self.n_evicted = 0
        self.n_expelled = 0

    def __contains__(self, key: str) -> bool:
        return key in self._nbytes_of

    def __len__(self) -> int:
        return len(self._nbytes_of)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def keys(self) -> list[str]:
        return list(self._nbytes_of)

    def read(self, key: str) -> Entry | None:
        """The entry, or None when it is not held. Tells the policy nothing: a read may not become a hit.

        The caller need not hold the lock. What was read may have left by now.
        """
        try:
            return self._memory[key]
        except KeyError:
            return None

    def used(self, key: str) -> None:
        """Tell the policy that the entry served a request."""
        self._policy.on_hit(key)

    @property
    def heeds_costs(self) -> bool:
        """Whether the policy does anything with what computing entries took."""
        return type(self._policy).on_cost is not Policy.on_cost

    @property
    def expires(self) -> bool:
        """Whether the policy lets entries go for their age, or for anything but a lack of room."""
        return type(self._policy).expired is not Policy.expired  # a class that does not derive from it need not say so

    def cost(self, key: str, cost: float) -> None:
        """Tell the policy what computing the entry anew would take; see `Policy.on_cost`."""
        self._policy.on_cost(key, cost)

    def should_check(self, key: str) -> bool:
        return self._policy.should_check(key)

    def checked(self, key: str, divergence: float) -> None:
        """Tell the policy how such a check came out: 1 - cosine of the fresh state and the stored one."""
        self._policy.on_check(key, divergence)

    def repack(self, keys: Iterable[str], pack: Callable[[Entry], Entry]) -> None:
        """Replace entries by what `pack` makes of them, no larger. Ranks stay: the policy is not told."""
        for key in keys:
            if (entry := self.read(key)) is not None:
                self._hold(key, pack(entry))
                if key in self._pinned:
                    self.pin(key)

    def pin(self, key: str) -> None:
        """Let nothing but `remove` make an entry leave. An unknown key is ignored."""
        if (nbytes := self._nbytes_of.get(key)) is not None:
            self._pinned_bytes += nbytes - self._pinned.get(key, 0)
            self._pinned[key] = nbytes
            self._policy.on_remove(key)

    def release(self) -> None:
        """Let all entries leave again, as if they had just been put."""
        kept, self._pinned, self._pinned_bytes = self._pinned, {}, 0
        for key, nbytes in kept.items():
            self._policy.on_put(key, nbytes)

    def fits(self, entry: Entry) -> bool:
        """Whether the entry could be held, if all left that may. Else it is refused: not an eviction storm."""
        has_place = self.max_entries is None or len(self._pinned) < self.max_entries
        return has_place and entry.nbytes + self._pinned_bytes <= self.max_bytes

    def put(
        self,
        key: str,
        entry: Entry,
        on_evict: Callable[[str], None],
        demote: Callable[[str, Entry], None] | None = None,
    ) -> None:
        """Hold an entry, which is given away, making room for it first.

        `demote`, if any, is given each entry that has to leave for it, before it does. `on_evict` is told each key that
        left for it, at once: what is put later may fail. If that fails, the key is not held. An entry that does not fit
        an empty bank is refused (`ValueError`).
        """
        if not self.fits(entry):
            raise ValueError(f"entry of {entry.nbytes} bytes exceeds the bank's {self.max_bytes}")
        is_pinned = key in self._pinned
        self.remove(key)
        while self._is_over(entry.nbytes):
            victim = self._policy.victim()
            if demote is not None and (leaving := self.read(victim)) is not None:
                demote(victim, leaving)
            self.remove(victim)
            self.n_evicted += 1
            on_evict(victim)
        self._hold(key, entry)
        self._policy.on_put(key, entry.nbytes)
        if is_pinned:
            self.pin(key)

    def expire(self) -> list[str]:
        """Remove what the policy says must leave whatever the budget, and return those keys."""
        due = self._policy.expired()
        for key in due:
            self.remove(key)
        self.n_expelled += len(due)
        return due

    def remove(self, key: str) -> None:
        """Let go of a key; unknown keys are ignored."""
        # Memory first: were it to fail, the policy still knows the key and will choose it again.
        if key in self._nbytes_of:
            del self._memory[key]
            self._nbytes -= self._nbytes_of.pop(key)
        self._pinned_bytes -= self._pinned.pop(key, 0)
        self._policy.on_remove(key)

    def _hold(self, key: str, entry: Entry) -> None:
        nbytes = entry.nbytes
        self._memory[key] = entry
        self._nbytes += nbytes - self._nbytes_of.get(key, 0)
        self._nbytes_of[key] = nbytes

    def _is_over(self, incoming: int) -> bool:
        too_many = self.max_entries is not None and len(self) + 1 > self.max_entries
        return len(self) > 0 and (too_many or self.nbytes + incoming > self.max_bytes)
