"""Threads that read from stores while values are put and purged: a check for every built-in store."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from llmcache.memory.stores import Put, Store, StoreKey

KEYS = [StoreKey("read by threads", "0" * 64, f"{number}") for number in range(4)]


def check_readers(make: Callable[[], Store]) -> None:
    """Assert in both stores that values are whole, belong to their keys, and do not predate a purge that returned."""
    one, other, n_removed, has_ended = make(), make(), [0], threading.Event()

    def read(store: Store) -> None:
        while not has_ended.is_set():
            least = n_removed[0]
            for number, value in enumerate(store.get_many(KEYS, time.monotonic() + 60)):
                if value is not None:
                    assert len({*bytes(value)}) == 1 and value[0] % 4 == number and value[0] // 4 >= least

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read, store) for store in (one, other, other)]
            try:
                for i in range(40):
                    number, store = i % 4, (one, other)[i % 3 > 1]
                    value = bytes([number + 4 * n_removed[0]]) * (3_000, 70_000)[i % 5 > 2]
                    since, (now,) = store.purges(None).cursor, store.numbers([KEYS[number].namespace])
                    store.put_many([Put(KEYS[number], value, now, since)])
                    if i % 8 == 7:
                        one.purge(KEYS[number].namespace)
                        n_removed[0] += 1
            finally:
                has_ended.set()
            for reader in readers:
                reader.result(60)
    finally:
        sys.setswitchinterval(interval)
        one.close()
        other.close()


def check_writers(make: Callable[[], Store], dropped_by: str, times: int) -> None:
    """Assert that no store returns a value put by a writer that began before a `purge` or `forget` that returned."""
    stores, has_ended = [make() for _ in range(3)], threading.Event()
    n_begun, n_dropped = [0], [0]

    def write(store: Store) -> None:
        while not has_ended.is_set():
            since, (number,) = store.purges(None).cursor, store.numbers([KEYS[0].namespace])
            value = b"%d" % n_begun[0]
            store.put_many([Put(key, value, number, since) for key in KEYS])

    def read(store: Store) -> int:
        n_read = 0
        while not has_ended.is_set():
            least = n_dropped[0]
            found = store.get_many(KEYS, time.monotonic() + 60)
            assert all(int(bytes(one)) >= least for one in found if one is not None)
            n_read += sum(one is not None for one in found)
        return n_read

    with ThreadPoolExecutor(4) as pool:
        try:
            writers = [pool.submit(write, store) for store in stores[:2]]
            readers = [pool.submit(read, store) for store in stores[1:]]
            for _ in range(times):
                n_begun[0] += 1
                if dropped_by == "purge":
                    stores[2].purge(KEYS[0].namespace)
                else:
                    stores[2].forget(KEYS)
                n_dropped[0] += 1
                time.sleep(0.02)
        finally:
            has_ended.set()
        for writer in writers:
            writer.result()
        assert all(reader.result() > 0 for reader in readers)
    for store in stores:
        store.close()
