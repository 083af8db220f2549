"""Threads that read from stores while values are put and purged: a check for every built-in store."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from llmcache.stores import Put, Store, StoreKey

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
                    store.put_many([Put(KEYS[number], value, store.numbers([KEYS[number].namespace])[0])])
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
