"""What every store has to do, as a check for classes from outside the library and for its own."""

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from llmcache.banks.stores.base import Entry, Store
from llmcache.registry import refuses, rule

_CPU = torch.device("cpu")


def check_store(make: Callable[[torch.device], Store], seed: int = 0) -> None:
    """Use it as a dict, in inference mode and not, with views and gradients; then read while others write."""
    chance, store, held = random.Random(seed), make(_CPU), dict[str, Entry]()
    for number in range(120):
        key = f"key/{chance.randrange(4)}"
        if chance.random() < 0.7:
            store[key], held[key] = _entry(number), _entry(number)
        elif held.pop(key, None) is not None:
            del store[key]
        for name in (f"key/{i}" for i in range(4)):
            if name in held:
                _check_same(store[name], held[name], "what was put last under the key is returned, bit for bit")
                continue
            with refuses(KeyError, "__getitem__: KeyError where there is none"):
                store[name]
            with refuses(KeyError, "__delitem__: KeyError where there is none"):
                del store[name]
    _check_tensors(store)
    _check_readers(store, chance)
    store.close()


def _entry(number: int) -> Entry:
    """The next of several kinds; of one number always the same values."""
    n = (4, 40_000, 0, 1)[number % 4]
    made = {
        "h": torch.full((2, n), float(number)),
        "half": torch.tensor([number % 7]).half(),
        "whole": torch.tensor(number),
        "mask": torch.tensor([True, number % 3 > 0]),
    }
    return Entry({} if n == 1 else made)


def _check_tensors(store: Store) -> None:
    """Tensors come back as normal ones whatever they were, and stay as they are."""
    x = torch.arange(40_000.0).reshape(200, 200)
    views = {"turned": x.T, "some": x[::2, 1:], "spread": x[:1].expand(200, 200)}
    store["views"] = Entry(dict(views))
    _check_same(store["views"], Entry(views), "layout in memory does not matter")
    for n in (4, 40_000):
        graded = torch.ones(n, requires_grad=True)
        store["a"] = Entry({"h": graded * 2})
        got = store["a"]
        for key in "bacd":  # "a" makes way while others of its kind are held
            if key == "c":
                del store["a"]
            store[key] = Entry({"h": torch.zeros(n)})
        _check_same(got, Entry({"h": torch.full((n,), 2.0)}), "what was returned stays when its place is used again")
        with torch.inference_mode():
            store["b"] = Entry({"h": torch.ones(n)})
            inside = store["b"]
        for entry in (got, inside, store["b"]):
            h = entry.tensors["h"]
            rule(not h.requires_grad and not h.is_inference(), "tensors come back normal, without gradient")
            rule(h.device == _CPU, "tensors come back on the device that the constructor was given")
        _check_same(inside, Entry({"h": torch.ones(n)}), "what is put in inference mode comes back")
        for key in "bcd":
            del store[key]


def _check_readers(store: Store, chance: random.Random) -> None:
    """Three threads read without a lock while one puts and deletes."""
    has_ended, interval, sizes = threading.Event(), sys.getswitchinterval(), (8, 40_000)

    def read() -> None:
        while not has_ended.is_set():
            for number in range(4):
                with suppress(KeyError):
                    h = store[f"{number}"].tensors["h"]
                    is_whole = bool((h == h[0]).all()) and int(h[0]) % 4 == number
                    rule(is_whole, "__getitem__ beside a put or a delete: a whole entry of its key, or KeyError")

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(3)]
            try:
                for i in range(100):
                    number = chance.randrange(4)
                    store[f"{number}"] = Entry({"h": torch.full((sizes[i % 2],), float(number + 4 * i))})
                    if chance.random() < 0.4:
                        del store[f"{number}"]
            finally:
                has_ended.set()
            for reader in readers:
                reader.result()
    finally:
        sys.setswitchinterval(interval)


def _check_same(got: Entry, put: Entry, said: str) -> None:
    is_same = got.tensors.keys() == put.tensors.keys() and got.nbytes == put.nbytes
    pairs = [(got.tensors[name], x) for name, x in put.tensors.items()] if is_same else []
    rule(is_same and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs), said)
