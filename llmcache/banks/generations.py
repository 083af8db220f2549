"""What is known of purges: the numbers that namespaces have in a store, and when each was forgotten here last."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import TypeAlias

from llmcache.threads import forkable

NO_GENERATION = -1  # and what is below it: that no namespace has, so that what is put with it is left out
_MOST_NAMES = 10_000

#: Says what number a namespace has now, None where the store does not answer.
Ask: TypeAlias = Callable[[str], int | None]


class Generations:
    """The numbers of all namespaces of which anything is in memory, from calls or from a save. Thread-safe.

    A number that could not be asked for at first stays unknown for a while: memory may then hold what was computed
    before a purge that nobody here has heard of yet, which must not be taken for what the store has under that number.
    It is known once all events are told up to when it was asked for, and none of them was a purge; see `settle`.
    """

    def __init__(self) -> None:
        """Know none."""
        self._known: dict[str, int] = {}
        self._unknown: dict[str, tuple[int, float] | None] = {}  # to what number they settle, and when that was asked
        self._new: set[str] = set()
        self._n_changes = 0  # before and after each forgetting, and at each question within one
        self._is_forgetting = False
        self._lock = forkable(threading.Lock())

    def of(self, namespace: str, ask: Ask) -> int:
        """The number of a namespace, as far as it is known; else at most `NO_GENERATION`.

        One that is not known is another after something was forgotten, so that what was computed before does not pass
        for what came after.
        """
        if (known := self._known.get(namespace)) is not None and not self._is_forgetting:
            return known
        with self._lock:
            self._n_changes += self._is_forgetting  # what is found in memory now may be gone in a moment: none is alike
            n_changes = self._n_changes
            if self._is_forgetting or namespace in self._unknown:
                return NO_GENERATION - n_changes
        found = ask(namespace)
        with self._lock:
            if n_changes != self._n_changes:  # it may be from before a purge
                return NO_GENERATION - n_changes
            if (known := self._known.get(namespace)) is not None:  # another thread asked
                return known
            self._new.add(namespace)
            if found is None or namespace in self._unknown:
                self._unknown.setdefault(namespace)
                return NO_GENERATION - n_changes
            self._known[namespace] = found
            return found

    def get(self, namespace: str) -> int | None:
        """The number of a namespace, if it was asked for and is known."""
        return self._known.get(namespace)

    def expect(self, numbers: Mapping[str, int]) -> None:
        """Memory takes in what was saved of namespaces that had these numbers."""
        with self._lock:
            for name, number in numbers.items():
                self._unknown.pop(name, None)
                self._known[name] = number
                self._new.add(name)

    def all(self) -> Mapping[str, int | None]:
        """Those of all namespaces; None: not known."""
        with self._lock:
            return {**self._known, **dict.fromkeys(self._unknown)}

    def settle(self, ask: Ask, told_until: float) -> None:
        """Of all events up to a time (of `monotonic`) none is a purge of a namespace whose number is not known."""
        for name, asked in list(self._unknown.items()):
            if asked is None:
                if (found := ask(name)) is not None:
                    self._unknown[name] = found, monotonic()
            elif asked[1] <= told_until:
                with self._lock:
                    self._known[name], _ = asked
                    del self._unknown[name]

    def taken_new(self) -> set[str]:
        """Those that were asked for since the last time."""
        with self._lock:
            taken, self._new = self._new, set()
            return taken

    def renew(self, namespaces: set[str] | None = None) -> None:
        """Count these as new, None: all."""
        with self._lock:
            self._new |= {*self._known, *self._unknown} if namespaces is None else namespaces

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    def purged(self) -> None:
        """What is being asked for is from before a purge."""
        with self._lock:
            self._n_changes += 1

    @contextmanager
    def forgetting(self, namespace: str | None) -> Iterator[None]:
        """Within, memory forgets a namespace, None: all, which then has to be asked for anew; by one thread at a time.

        Where that fails, the number stays unknown, so that it is tried again.
        """
        with self._lock:
            names = {*self._known, *self._unknown} if namespace is None else {namespace}
            self._n_changes += 1
            self._is_forgetting = True
            for name in names:
                self._known.pop(name, None)
                self._unknown[name] = None
        try:
            yield
            with self._lock:
                for name in names:
                    del self._unknown[name]
        finally:
            with self._lock:
                self._n_changes += 1
                self._is_forgetting = False


class Purges:
    """When namespaces were forgotten here, so that what is under way meanwhile is not kept. Thread-safe."""

    def __init__(self) -> None:
        """Begin with none."""
        self.now = 0  # times that anything was forgotten
        self._last: dict[str, int] = {}
        self._last_of_all = 0
        self._lock = forkable(threading.Lock())

    def tell(self, namespace: str | None) -> None:
        """A namespace is about to be forgotten, None: all."""
        with self._lock:
            self.now += 1
            if namespace is None or len(self._last) >= _MOST_NAMES:
                self._last_of_all = self.now
                self._last.clear()
            else:
                self._last[namespace] = self.now

    def has_come(self, namespace: str, since: int) -> bool:
        """Whether a namespace was forgotten since this was `now`."""
        with self._lock:
            return max(self._last_of_all, self._last.get(namespace, 0)) > since
