"""Values of one namespace, put into a store and read back, by threads too: checks for every built-in store."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from llmcache.memory.stores import Put, Store, StoreKey


def key(name: object, namespace: str = "a") -> StoreKey:
    return StoreKey(namespace, "0" * 64, f"{name}")


def value(name: object, size: int) -> bytes:
    return random.Random(f"{name}").randbytes(size)


def put(store: Store, *names: object, size: int, namespace: str = "a") -> None:
    (number,), since = store.numbers([namespace]), store.purges(None).cursor
    store.put_many([Put(key(name, namespace), value(name, size), number, since) for name in names])


def get(store: Store, *names: object, namespace: str = "a") -> list[bytes | None]:
    found = store.get_many([key(name, namespace) for name in names], time.monotonic() + 60)
    return [None if one is None else bytes(one) for one in found]


def held(store: Store, *names: object, namespace: str = "a") -> list[object]:
    """Return the names that the store holds; assert that each value begins as it was put."""
    found = get(store, *names, namespace=namespace)
    assert all(one is None or one[:8] == value(name, 8) for name, one in zip(names, found, strict=True))
    return [name for name, one in zip(names, found, strict=True) if one is not None]


KEYS = [StoreKey("read by threads", "0" * 64, f"{number}") for number in range(4)]
SIZES = (3_000, 70_000)  # in the index of a disk store, and in files


def check_readers(make: Callable[[], Store], dropped_by: str, times: int) -> None:
    """Assert that values are whole, belong to their keys, and do not predate a `purge` or `forget` that returned.

    A value repeats one byte: the number of its key, and how many drops had begun before its writer asked the store.
    """
    stores, has_ended = [make() for _ in range(3)], threading.Event()
    n_begun, n_dropped = [0], [0]

    def write(store: Store) -> None:
        while not has_ended.is_set():
            since, (epoch,) = store.purges(None).cursor, store.numbers([KEYS[0].namespace])
            values = [bytes([number + 4 * n_begun[0]]) * SIZES[number % 2] for number in range(len(KEYS))]
            store.put_many([Put(key, value, epoch, since) for key, value in zip(KEYS, values, strict=True)])

    def read(store: Store) -> int:
        n_read = 0
        while not has_ended.is_set():
            least = n_dropped[0]
            for number, value in enumerate(store.get_many(KEYS, time.monotonic() + 60)):
                if value is not None:
                    assert len({*bytes(value)}) == 1 and value[0] % 4 == number and value[0] // 4 >= least
                    n_read += 1
        return n_read

    with ThreadPoolExecutor(4) as pool:
        try:
            writers = [pool.submit(write, store) for store in stores[:2]]
            readers = [pool.submit(read, store) for store in stores[1:]]
            for _ in range(times):
                time.sleep(0.02)
                n_begun[0] += 1
                if dropped_by == "purge":
                    stores[2].purge(KEYS[0].namespace)
                else:
                    stores[2].forget(KEYS)
                n_dropped[0] += 1
        finally:
            has_ended.set()
        for writer in writers:
            writer.result()
        assert all(reader.result() > 0 for reader in readers)
    for store in stores:
        store.close()
