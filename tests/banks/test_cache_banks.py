"""Banks, requests and index rows stay consistent, whatever is put, evicted, expired or purged."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmcache.banks.bank import Bank
from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.compression import CODECS
from llmcache.banks.entry import Entry
from llmcache.banks.memory import Memory

from llmcache.fingerprint import MeanEmbedding
from llmcache.index import FlatIndex, HNSWIndex
from llmcache.policies import LRU, TTL, Policy
from llmcache.request.rows import Row, Scope

WIDTH = 8
LAYERS = (0, 2)


def scope(namespace: str = "default") -> Scope:
    return Scope(namespace, "w", "torch.float32", "sdpa")


def row(name: int, n_valid: int = 3) -> Row:
    return Row(0, f"{name:064x}", name.to_bytes(4, "big"), slice(0, n_valid), n_valid)


def vector(name: int) -> np.ndarray:
    return np.random.default_rng(name).standard_normal(WIDTH).astype(np.float32)


def states(name: int, layers: Sequence[int] = LAYERS, rows: int = 1) -> dict[int, dict[str, torch.Tensor]]:
    return {layer: {"hidden": torch.full((rows, WIDTH), float(name))} for layer in layers}


def banks(
    max_entries: int | None = None,
    max_bytes: int = 2**20,
    policy: Callable[[], Policy] = LRU,
    by_layer: bool = False,
    by_length: bool = False,
) -> CacheBanks:
    banks = {layer: Bank(Memory(), policy(), max_bytes, max_entries) for layer in LAYERS}
    return CacheBanks(banks, CODECS["none"], MeanEmbedding(), FlatIndex, by_length, by_layer)


def put(lib: CacheBanks, name: int, namespace: str = "default", layers: Sequence[int] = LAYERS) -> None:
    assert lib.put(scope(namespace), row(name), states(name, layers), vector(name))


def nearest(lib: CacheBanks, name: int, namespace: str = "default", layer: int | None = None) -> list[str]:
    query = MeanEmbedding().project(vector(name)[None])
    return [near.key for near in lib.search(scope(namespace), [row(name)], query, k=100, layer=layer)[0]]


def check(lib: CacheBanks) -> None:
    """Every request is held by a bank, every held key is a request, and the index finds exactly the requests."""
    held = {layer: set(bank.keys()) for layer, bank in lib.layer_banks.items()}
    keys = {record.key for record in lib.records()}
    assert set().union(*held.values()) == keys
    assert len(lib) == len(keys)
    for bank in lib.layer_banks.values():
        assert bank.nbytes <= bank.max_bytes
        assert bank.max_entries is None or len(bank) <= bank.max_entries
    for record in lib.records():
        assert set(record.entries) == {layer for layer in LAYERS if record.key in held[layer]}
        found = lib.search(record.scope, [row(0)], record.slots[0].vector[None], k=100, layer=record.slots[0].layer)
        assert {near.key for near in found[0]} == {
            other.key
            for other in lib.records()
            if other.scope == record.scope and record.slots[0].layer in {place.layer for place in other.slots}
        }


def put_in_layout(lib: CacheBanks, name: str, layers: Sequence[int] = LAYERS, padding: Sequence[int] = (2, 2)) -> bool:
    """Put request 1 in one of its layouts: states of layers, each with so many rows of padding."""
    one, made = row(1), states(1, layers)
    one.layout = name.encode() * 32
    for (_, tensors), n_rows in zip(made.items(), padding, strict=False):
        tensors["padding_hidden"] = torch.full((n_rows, WIDTH), float(ord(name)))
    return lib.put(scope(), one, made, vector(1))


def layouts_of(lib: CacheBanks) -> list[tuple[str, str | None]]:
    """Of each layer's state of the request: the layout that it is said to have, and that its padding is of."""
    found = [lib.read(row(1).key, layer, with_kv=False) for layer in LAYERS]
    assert all(state is not None for state in found)
    return [(chr(s.layout[0]), None if s.padding is None else chr(int(s.padding[0, 0]))) for s in found if s]


@pytest.mark.parametrize(
    ("more", "layouts"),
    [
        ({}, [("b", "b"), ("b", "b")]),
        ({"layers": LAYERS[:1]}, [("a", None), ("a", "a")]),
        ({"padding": (2, 20)}, [("a", "a"), ("a", "a")]),  # a layer has no room for it
    ],
)
def test_padding_of_two_layouts_does_not_mix(more: dict[str, Any], layouts: list[tuple[str, str | None]]) -> None:
    lib = banks(max_bytes=10 * WIDTH * 4)
    assert put_in_layout(lib, "a")
    assert put_in_layout(lib, "b", **more) == ("padding" not in more)
    assert layouts_of(lib) == layouts


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "put", "read", "purge"]),
            st.integers(0, 9),
            st.sampled_from(["a", "b"]),
            st.sampled_from([LAYERS, (0,), (2,)]),
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_banks_requests_and_index_agree(steps: list[tuple[str, int, str, Sequence[int]]], by_layer: bool) -> None:
    lib = banks(max_entries=4, by_layer=by_layer)
    for what, name, namespace, layers in steps:
        if what == "put":
            # A key belongs to one namespace: it is hashed into it.
            put(lib, name + 100 * (namespace == "b"), namespace, layers)
        elif what == "read":
            state = lib.read(row(name).key, layers[0], with_kv=False)
            assert state is None or torch.equal(state.hidden, states(name)[0]["hidden"])
        else:
            lib.purge(namespace)
            assert all(record.scope.namespace != namespace for record in lib.records())
        check(lib)


def test_the_least_recently_used_leaves_every_structure() -> None:
    lib = banks(max_entries=2)
    for name in (1, 2):
        put(lib, name)
    for layer in LAYERS:
        assert lib.read(row(1).key, layer, with_kv=False)
    put(lib, 3)
    assert set(nearest(lib, 1)) == {row(1).key, row(3).key}
    assert not lib.known(row(2))
    assert lib.layer_banks[0].n_evicted == 1


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_bank_alone_letting_go_keeps_the_request(by_layer: bool) -> None:
    """Where each layer is searched alone, an evicted one no longer finds it."""
    lib = banks(by_layer=by_layer)
    lib.layer_banks[2].max_entries = 1
    put(lib, 1)
    put(lib, 2)
    assert lib.held(row(1).key) == [0]
    assert lib.known(row(1))
    assert lib.read(row(1).key, 2, with_kv=False) is None
    assert set(nearest(lib, 1, layer=0 if by_layer else None)) == {row(1).key, row(2).key}
    assert not by_layer or nearest(lib, 1, layer=2) == [row(2).key]


def test_expired_entries_are_not_found() -> None:
    now = [0.0]
    lib = banks(policy=lambda: TTL(ttl_s=10, now=lambda: now[0]))
    put(lib, 1)
    now[0] = 9.0
    assert nearest(lib, 1) == [row(1).key]
    now[0] = 11.0
    assert nearest(lib, 1) == []
    assert len(lib) == 0


def test_an_entry_larger_than_its_bank_is_left_out_without_evicting() -> None:
    lib = banks(max_bytes=WIDTH * 4 * 2)
    put(lib, 1)
    assert not lib.put(scope(), row(2), states(2, rows=3), vector(2))
    assert lib.known(row(1))
    assert not lib.known(row(2))


def test_same_key_other_tokens_is_not_known() -> None:
    lib = banks()
    put(lib, 1)
    forged = row(1)
    forged.ids = b"other"
    assert not lib.known(forged)
    lib.put(scope(), forged, states(5), vector(5))
    assert lib.known(forged)
    assert not lib.known(row(1))
    check(lib)


def test_lengths_kept_apart_never_find_each_other() -> None:
    lib = banks(by_length=True)
    put(lib, 1)
    query = MeanEmbedding().project(vector(1)[None])
    assert lib.search(scope(), [row(9, n_valid=3)], query)[0][0].key == row(1).key
    assert lib.search(scope(), [row(9, n_valid=4)], query) == [[]]


def test_a_bank_that_fails_half_way_leaves_nothing_behind() -> None:
    lib = banks()

    class Broken(Memory):
        def __setitem__(self, key: str, entry: Entry) -> None:
            raise OSError("disk full")

    lib.layer_banks[2]._memory = Broken()
    with pytest.raises(OSError, match="disk full"):
        lib.put(scope(), row(1), states(1), vector(1))
    assert not lib.known(row(1))
    assert len(lib.layer_banks[0]) == 0
    assert nearest(lib, 1) == []


def test_a_request_of_an_approximate_index_survives_drain_and_rebuild() -> None:
    lib = banks(max_entries=20)
    lib._index.make_index = lambda dim: HNSWIndex(dim)
    for name in range(60):
        put(lib, name)
    assert len(lib) == 20
    assert nearest(lib, 59)[0] == row(59).key
    assert len(nearest(lib, 59)) == 20


def test_bank_refuses_what_cannot_fit() -> None:
    bank = Bank(Memory(), LRU(), max_bytes=10)
    with pytest.raises(ValueError, match="exceeds"):
        bank.put("k", Entry({"hidden": torch.zeros(100)}), lambda key: None)


def test_empty_shelves_are_taken_down() -> None:
    lib = banks(max_entries=3)
    for name in range(20):
        put(lib, name, namespace=f"tenant-{name}")
    assert len(lib._index) == 3


def test_banks_that_give_kv_count_the_hit_too() -> None:
    lib = banks(max_entries=2)
    kv = {"keys": torch.zeros(1, 1, 1, 2), "values": torch.zeros(1, 1, 1, 2)}
    for name in range(6):
        full = {layer: tensors | kv for layer, tensors in states(name).items()}
        lib.put(scope(), row(name), full, vector(name))
        assert lib.read(row(0).key, LAYERS[-1], with_kv=True) is not None
    assert lib.held(row(0).key) == list(LAYERS)


def interrupt(lib: CacheBanks, when: str, act: Callable[[], object]) -> None:
    """Let something happen before or after the next read of the upper layer takes its entry."""
    waiting = [act]

    class Interrupted(Memory):
        def __getitem__(self, key: str) -> Entry:
            if when == "before" and waiting:
                waiting.pop()()
            try:
                return super().__getitem__(key)
            finally:
                if waiting:
                    waiting.pop()()

    entry, memory = lib.layer_banks[2].read(row(1).key), Interrupted()
    assert entry is not None
    memory[row(1).key] = entry
    lib.layer_banks[2]._memory = memory


def evict(lib: CacheBanks) -> None:
    lib.layer_banks[2].remove(row(1).key)
    lib._let_go(2, row(1).key)


HAPPENS: dict[str, Callable[[CacheBanks], object]] = {
    "evicted": evict,
    "another layout": lambda lib: put_in_layout(lib, "b"),
    "other tokens": lambda lib: lib.put(scope(), Row(0, row(1).key, b"other", slice(0, 3), 3), states(5), vector(5)),
    "purged": lambda lib: lib.purge("default"),
    "purged and put": lambda lib: (lib.purge("default"), put_in_layout(lib, "b")),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("happens", HAPPENS)
def test_what_was_read_counts_only_if_nothing_was_put_under_its_key_meanwhile(happens: str, when: str) -> None:
    """Else an entry of one layout, or of other tokens, would be taken for what was asked for."""
    lib = banks()
    put_in_layout(lib, "a")
    interrupt(lib, when, lambda: HAPPENS[happens](lib))
    state = lib.read(row(1).key, 2, with_kv=False)
    if happens == "evicted" and when == "after":  # what was read is still the request's own
        assert state is not None and (state.layout[:1], float(state.hidden[0, 0])) == (b"a", 1.0)
    else:
        assert state is None
    check(lib)


def test_a_save_reads_again_what_was_put_meanwhile() -> None:
    lib = banks()
    put_in_layout(lib, "a")
    interrupt(lib, "before", lambda: put_in_layout(lib, "b"))
    (record,) = lib.records()
    assert record.layout[:1] == b"b"
    assert {float(entry.tensors["padding_hidden"][0, 0]) for entry in record.entries.values()} == {float(ord("b"))}


def test_a_layer_without_a_bank_is_nothing_to_read() -> None:
    lib = banks()
    put(lib, 1)
    with pytest.raises(KeyError):
        lib.read(row(1).key, 1, with_kv=True)


SIZES = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "remove", "repack", "pin"]), st.integers(1, 9))
)


@settings(deadline=None)
@given(SIZES)
def test_a_bank_knows_its_keys_and_bytes(steps: list[tuple[str, str, int]]) -> None:
    bank, oracle = Bank(Memory(), LRU(), 2**20), dict[str, int]()
    for key, what, size in steps:
        if what == "put":
            bank.put(key, Entry({"hidden": torch.zeros(size)}), lambda key: None)
            oracle.pop(key, None)
            oracle[key] = 4 * size
        elif what == "remove":
            bank.remove(key)
            oracle.pop(key, None)
        elif what == "repack":
            bank.repack([key], lambda entry: Entry({"hidden": entry.tensors["hidden"].half()}))
            if (entry := bank.read(key)) is not None:
                oracle[key] = entry.nbytes
        else:
            bank.pin(key)
    assert (bank.keys(), len(bank), bank.nbytes) == ([*oracle], len(oracle), sum(oracle.values()))
    assert [key for key in "abc" if key in bank] == sorted(oracle)


def test_a_request_that_no_bank_holds_does_not_hold_up_a_save() -> None:
    lib = banks()
    put(lib, 1)
    for bank in lib.layer_banks.values():
        bank.remove(row(1).key)
    (record,) = lib.records()
    assert record.entries == {}
    assert lib.read(row(1).key, 2, with_kv=False) is None
