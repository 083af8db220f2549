"""A fair queue of tenants: who waits is served one tenant after another, each tenant's own first come first served."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class FairQueue(Generic[_T]):
    """Waiting items of several tenants. One thread at a time."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_T]] = {}  # the next tenant first

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, tenant: str, item: _T) -> None:
        """Add an item behind those of its tenant."""
        self._waiting.setdefault(tenant, deque()).append(item)

    def pop(self) -> _T:
        """Remove and return the first item of the tenant that was served longest ago. At least one must wait."""
        tenant = next(iter(self._waiting))
        items = self._waiting.pop(tenant)
        item = items.popleft()
        if items:
            self._waiting[tenant] = items
        return item


class Slots:
    """A number of slots that tenants are given in turn. Call it from one event loop."""

    def __init__(self, n_slots: int) -> None:
        self._n_free = n_slots
        self._waiting = FairQueue[asyncio.Future[None]]()

    def are_taken(self) -> bool:
        return self._n_free == 0

    async def acquire(self, tenant: str) -> None:
        if self._n_free:
            self._n_free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.put(tenant, place)
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled():  # it was given to a waiter that has just been cancelled
                self.release()
            raise

    def release(self) -> None:
        """Give a slot to the next that waits, or free it."""
        while self._waiting:
            place = self._waiting.pop()
            if not place.done():  # else it was cancelled
                place.set_result(None)
                return
        self._n_free += 1
