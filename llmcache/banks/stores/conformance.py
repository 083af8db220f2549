"""What every store has to do, as a check for classes from outside the library and for its own."""

import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from llmcache.banks.stores.base import Event, Put, Store, StoreKey
from llmcache.banks.stores.seal import Seal
from llmcache.errors import StoreError
from llmcache.registry import refuses, rule

_SIZES = (1, 3_000, 70_000, 1_500_000)
_PATIENCE_S = 60.0


class _Place:
    """Keys of one run of the check, in namespaces of its own."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._run = uuid.uuid4().hex
        self._scope = "0" * 64

    def namespace(self, name: str) -> str:
        return f"{self._run}{name}"

    def key(self, name: object, namespace: str = "") -> StoreKey:
        return StoreKey(self.namespace(namespace), self._scope, f"{name}")

    def value(self, name: object, size: int = 3_000) -> bytes:
        """Of one name and size always the same."""
        return random.Random(f"{name} {size}").randbytes(size)


def check_store(make: Callable[[], Store], seed: int = 0) -> None:
    """Open it twice, as two processes would, and use it by both; then with readers beside writers and purges.

    Args:
        make: Opens a store; each time on the same place, which nobody else uses and is empty afterwards. It needs room
            for 16 MB.
        seed: Of what is drawn.
    """
    place, one, other = _Place(seed), make(), make()
    try:
        _check_values(place, one, other)
        _check_prefixes(place, one, other)
        _check_sealed(place, one, other)
        _check_generations(place, one, other)
        _check_events(place, one, other)
        _check_threads(place, one, other)
        other.close()
        _check_closed(place, other)
        other = make()
        rule(_get(other, [place.key("kept")]) == [place.value("kept")], "what was put is there for who opens it later")
        _check_all_removed(place, one, other)
    finally:
        one.remove(None)
        one.close()
        other.close()


def _check_values(place: _Place, one: Store, other: Store) -> None:
    keys = [place.key(size) for size in _SIZES]
    rule(_get(one, []) == [], "get_many: of no keys nothing")
    rule(_get(one, keys) == [None] * len(keys), "get_many: None for each key that has no value")
    _put(one, {key: place.value(key, size) for key, size in zip(keys, _SIZES, strict=True)})
    _put(one, {place.key("kept"): place.value("kept")})
    for store in (one, other):
        asked = [*keys, place.key("absent"), keys[0]]
        place.chance.shuffle(asked)
        sizes = dict(zip(keys, _SIZES, strict=True))
        wanted = [place.value(key, sizes[key]) if key in sizes else None for key in asked]
        rule(_get(store, asked) == wanted, "get_many: a value for each key, in their order, bit for bit")
        rule(
            store.get_many(asked, time.monotonic() - 1) == [None] * len(asked),
            "get_many: nothing after the deadline, and no error",
        )
    _put(other, {keys[1]: place.value(keys[1])})
    rule(_get(one, keys[1:2]) == [place.value(keys[1])], "put_many: a value may be put again, by another store as well")
    one.put_many([])
    alike = [place.key("b:c", "a"), place.key("c", "a:b"), place.key("x", "ä*\0"), place.key("x", "ä**")]
    _put(one, {key: place.value(key) for key in alike[:3]})
    wanted = [*map(place.value, alike[:3]), None]
    rule(_get(other, alike) == wanted, "no two keys are taken for one, whatever text a namespace is")


def _check_prefixes(place: _Place, one: Store, other: Store) -> None:
    keys = [place.key(f"block {i}") for i in range(40)]
    _put(one, {key: place.value(key) for i, key in enumerate(keys) if i != 30})
    for store in (one, other):
        found = [store.contains_prefix(chain) for chain in ([], keys, keys[:5], keys[30:], keys[31:])]
        rule(found == [0, 30, 5, 0, 9], "contains_prefix: how many are held before the first that is not")


def _check_sealed(place: _Place, one: Store, other: Store) -> None:
    key, seal = place.key("sealed"), Seal(b"secret")
    tensors = {"h": torch.arange(12_000.0).reshape(3, 4_000), "none": torch.empty(0, 2), "half": torch.ones(()).half()}
    _put(one, {key: seal.close(key, tensors, {"layout": "ab"})})
    (value,) = other.get_many([key], _soon())
    rule(value is not None, "what was sealed is there")
    assert value is not None
    opened = seal.open(key, value)
    is_same = all(
        torch.equal(opened.tensors[name], x) and opened.tensors[name].dtype == x.dtype for name, x in tensors.items()
    )
    rule(is_same and opened.about == {"layout": "ab"}, "what was sealed is opened again")


def _check_generations(place: _Place, one: Store, other: Store) -> None:
    mine, others, name = place.key("x", "a"), place.key("x", "a:b"), place.namespace("a")
    _put(one, {mine: place.value("x"), others: place.value("y")})
    (held,) = one.get_many([mine], _soon())
    seen = {one.generation(name), other.generation(name)}
    rule(len(seen) == 1, "generation: the same in all stores")
    before = seen.pop()
    rule(one.remove(name) >= 0, "remove: returns how many values it made unreachable, as far as that is known")
    for store in (one, other):
        rule(store.generation(name) != before, "remove: the namespace has another generation in all stores")
        rule(_get(store, [mine]) == [None], "remove: nothing is returned that was put before, by no store")
        rule(store.contains_prefix([mine]) == 0, "remove: nor is it contained")
        store.put_many([Put(mine, place.value("x"), before)])
        rule(_get(store, [mine]) == [None], "put_many: what was put with a former generation is left out")
    rule(held is not None and bytes(held) == place.value("x"), "what was returned stays as it is when it is removed")
    rule(_get(other, [others]) == [place.value("y")], "remove: other namespaces stay")
    _put(other, {mine: place.value("z")})
    rule(_get(one, [mine]) == [place.value("z")], "after a removal, the same key may be put again")
    one.discard(name)
    rule(_get(one, [mine]) == [None], "discard: nothing is returned that was put before")
    rule(_get(other, [others]) == [place.value("y")], "discard: other namespaces stay")


def _check_events(place: _Place, one: Store, other: Store) -> None:
    begin, own_begin = other.events(None), one.events(None)
    rule(begin.is_complete and not begin.found, "events: of no cursor nothing, and the cursor of now")
    name = place.namespace("told")  # of its own: what came before may be told only now
    keys = [place.key(f"told {i}", "told") for i in range(5)]
    generation = one.generation(name)
    one.put_many([Put(key, place.value(key), generation, key.name.encode()) for key in keys])
    noted = list(other.notes(name))
    is_right = all(key in keys and bytes(note) == key.name.encode() for key, note in noted)
    rule(is_right and len(set(noted)) == len(noted), "notes: keys and what they were announced with, once each")
    one.remove(name)
    rule(not list(other.notes(name)), "notes: none of a value that was removed")
    own = [event.kind for event in one.events(own_begin.cursor).found if event.namespace == name]
    rule("cleared" in own, "events: the store that removed tells of it at once")
    told = _told(other, begin.cursor, name, 6)
    shown = [(event.kind, event.key, event.note) for event in told]
    wanted = [("stored", key, key.name.encode()) for key in keys]
    rule(shown == [*wanted, ("cleared", None, b"")], "events: each value with its key and note, each removal, in order")
    rule(told[-1].generation == one.generation(name), "events: a removal tells the generation from then on")
    rest = _told(other, told[2].cursor, name, 3)
    rule([event.kind for event in rest] == ["stored", "stored", "cleared"], "events: they go on after any cursor")
    unknown = other.events("no cursor of this store")
    rule(not (unknown.is_complete or unknown.found), "events: of an unknown cursor it says that some may be missing")
    rule(other.events(unknown.cursor).is_complete, "events: and they go on from there")


def _check_threads(place: _Place, one: Store, other: Store) -> None:
    """Three threads read while one puts and removes: values are whole, and none is from before a removal."""
    name, n_removed, has_ended = place.namespace("threads"), [0], threading.Event()
    keys, interval = [place.key(i, "threads") for i in range(4)], sys.getswitchinterval()

    def read(store: Store) -> None:
        while not has_ended.is_set():
            least = n_removed[0]
            for number, value in enumerate(_get(store, keys)):
                if value is not None:
                    rule(len(set(value)) == 1 and value[0] % 4 == number, "get_many: whole values of their keys")
                    rule(value[0] // 4 >= least, "get_many: no value from before a removal that has returned")

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read, store) for store in (one, other, other)]
            try:
                for i in range(40):
                    number, size = place.chance.randrange(4), place.chance.choice(_SIZES[1:3])
                    _put((one, other)[i % 2], {keys[number]: bytes([number + 4 * n_removed[0]]) * size})
                    if i % 8 == 7:
                        one.remove(name)
                        n_removed[0] += 1
            finally:
                has_ended.set()
            for reader in readers:
                reader.result(_PATIENCE_S)
    finally:
        sys.setswitchinterval(interval)


def _check_all_removed(place: _Place, one: Store, other: Store) -> None:
    names = [place.namespace(""), place.namespace("never named")]
    before, cursor = [one.generation(name) for name in names], other.events(None).cursor
    one.remove(None)
    rule(_get(other, [place.key("kept")]) == [None], "remove: of None, nothing is returned that was put before")
    after = [other.generation(name) for name in names]
    rule(all(a != b for a, b in zip(before, after, strict=True)), "remove: of None, every namespace has another number")
    (told,) = _told(other, cursor, None, 1)
    is_told = (told.kind, told.generation) == ("cleared", after[1])
    rule(is_told, "events: a removal of all tells the generation of a namespace that was never named")


def _check_closed(place: _Place, store: Store) -> None:
    store.close()
    for what, act in {
        "get_many": lambda: _get(store, [place.key("kept")]),
        "put_many": lambda: store.put_many([Put(place.key("kept"), b"late", 0)]),
        "contains_prefix": lambda: store.contains_prefix([place.key("kept")]),
        "ping": store.ping,
    }.items():
        with refuses(StoreError, f"{what}: StoreError once the store is closed"):
            act()


def _told(store: Store, cursor: str, namespace: str | None, n: int) -> list[Event]:
    """So many events of a namespace after a cursor, which other stores may take a moment to tell."""
    found: list[Event] = []
    end = time.monotonic() + _PATIENCE_S
    while len(found) < n and time.monotonic() < end:
        events = store.events(cursor)
        rule(events.is_complete, "events: none is missing after a cursor of just now")
        found += [event for event in events.found if event.namespace == namespace and event.kind != "removed"]
        cursor = events.cursor
        time.sleep(0.001)
    return found


def _put(store: Store, values: dict[StoreKey, bytes | bytearray]) -> None:
    store.put_many([Put(key, value, store.generation(key.namespace)) for key, value in values.items()])
    store.ping()
    rule(store.stats().n_values >= 0 and store.stats().nbytes >= 0, "stats: what is held")


def _get(store: Store, keys: Sequence[StoreKey]) -> list[bytes | None]:
    return [None if value is None else bytes(value) for value in store.get_many(keys, _soon())]


def _soon() -> float:
    return time.monotonic() + _PATIENCE_S
