"""Values of one namespace, put into a store and read back."""

import random
import time

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
