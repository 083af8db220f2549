"""Checks for your own classes against the rules of their base class. Each raises `AssertionError` on a violation."""

import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from llmcache.errors import StoreError
from llmcache.memory.index.base import Index
from llmcache.memory.policies.base import Policy
from llmcache.memory.stores.base import Purge, Put, Store, StoreKey, forgets_of
from llmcache.paper.codecs import Codec
from llmcache.paper.fingerprints import Fingerprint, View
from llmcache.support.arrays import Floats, Ids


def check_policy(make: Callable[[], Policy], seed: int = 0) -> None:
    """Put, hit and remove known and unknown keys in random order, and ask for victim and expired keys at each step."""
    draw, policy, held = random.Random(seed), make(), {"key 7", "key 8"}
    for key in sorted(held):
        policy.on_put(key, 10)
    for i in range(420):
        expired = policy.expired()
        _rule(held.issuperset(expired) and len({*expired}) == len(expired), "expired: keys that are held, each once")
        _rule(not expired or policy.lets_entries_leave_early, "expired: only where lets_entries_leave_early is set")
        if held:
            first = policy.victim()
            again = policy.victim() if len(held) > 1 else first
            _rule(first in held, f"victim: a key that was put and not removed since, not {first!r}")
            _rule(first == again, "victim: asking changes nothing")
        else:
            _refuses(KeyError, "victim while no key is held", policy.victim)
        key, step = f"key {draw.randrange(9)}", draw.choice(("put", "put", "hit", "cost", "remove", "evict"))
        if i >= 400 or step in ("remove", "evict"):  # at the end remove all
            for leaving in {key} if step == "remove" or not held else {policy.victim(), *policy.expired()}:
                policy.on_remove(leaving)
                held.discard(leaving)
        elif step == "put":
            policy.on_put(key, draw.randint(1, 100))
            held.add(key)
        elif step == "hit":
            policy.on_hit(key)
        else:
            policy.on_cost(key, draw.uniform(0.1, 10))
            _rule(policy.checks_reuse or not policy.should_check(key), "should_check: only where checks_reuse is set")
            policy.on_check(key, draw.uniform(0, 2))


def check_index(make: Callable[[int], Index], similarity: Callable[..., Any] = np.dot, is_exact: bool = True) -> None:
    """Add, replace, remove and search rows, compared with a dict; `is_exact`: search must find the nearest rows."""
    rng, dim, held = np.random.default_rng(0), 32, dict[int, Floats]()
    index, empty = make(dim), make(dim).nbytes
    steps = [(i % 4 < 3, rng.integers(0, 21, rng.integers(13))) for i in range(16)]
    for adds, ids in ((True, np.arange(0)), (False, np.array([5, -1])), *steps, (True, rng.permutation(300))):
        # Rows of two values only, which an index of bits also holds exactly.
        x, queries = ((rng.choice([-1, 1], (n, dim)) / dim**0.5).astype("f4") for n in (len(ids), 3))
        if adds:
            given = ids.copy(), x.copy()
            index.add(*given)
            _rule(np.array_equal(given[0], ids) and np.array_equal(given[1], x), "add: arrays are not modified")
            given[0][:], given[1][:] = 0, 1  # the index must have copied the rows
            held |= dict(zip(ids.tolist(), x, strict=True))
        else:
            index.remove(ids)
            held = {number: row for number, row in held.items() if number not in ids}
        _rule(len(index) == len(held), "len: the number of rows held")
        for some, k in ((queries[:0], 5), (queries, 5), (queries, 1000)):
            _check_found(held, some, k, *index.search(some, k), similarity, is_exact)
        got, added = index.vectors(np.array([*held], np.int64)), np.array([*held.values()]).reshape(-1, dim)
        _rule(got.dtype == np.float32 and np.allclose(got, added), "vectors: float32 (N, F), as they were added")
    _rule(index.nbytes >= empty + 300 * dim // 8, "nbytes: grows with the rows")
    ids, x, nan = np.arange(5), x[:5], np.where(np.arange(dim) == 3, np.float32("nan"), x[:5])
    wrong = (ids, x[:, 1:]), (ids, x.astype("f8")), (ids, nan), (ids[1:], x), (ids.astype("i4"), x), (ids - 3, x)
    for act, arguments in [(index.add, one) for one in wrong] + [(index.search, one) for one in ((x, 0), (nan, 1))]:
        shown = [f"{x.dtype} {x.shape} from {x.min()}" for x in map(np.asarray, arguments)]
        _refuses(ValueError, f"{act.__name__} of {shown}", act, *arguments)
    _refuses(KeyError, "vectors of an id that is not held", index.vectors, ids + 10**15)
    _refuses(ValueError, "a width under 1", make, 0)


def _check_found(
    held: Mapping[int, Floats], queries: Floats, k: int, ids: Ids, claimed: Floats, similarity: Any, is_exact: bool
) -> None:
    shape = len(queries), min(k, len(held))
    _rule(ids.shape == claimed.shape == shape, "search: both results are (B, min(k, len))")
    _rule(ids.dtype == np.int64 and claimed.dtype == np.float32, "search: ids int64, similarity float32")
    for query, numbers, scores in zip(queries, ids.tolist(), claimed, strict=True):
        n, end = len({*numbers} - {-1}), [-np.inf] * numbers.count(-1)
        _rule({*numbers[:n]} <= {*held} and n + len(end) == len(numbers), "search: different rows, id -1 after all")
        true = [similarity(query, held[number]) for number in numbers[:n]] + end
        best = sorted((similarity(query, row) for row in held.values()), reverse=True)[:k]
        _rule(np.allclose(scores, true, rtol=0, atol=1e-6), "search: the similarity of the rows named")
        _rule((np.diff(scores[:n]) <= 1e-6).all(), "search: best first")
        _rule(not is_exact or np.allclose(scores, best, rtol=0, atol=1e-6), "search: the most similar rows")


def check_fingerprint(make: Callable[[], Fingerprint], has_unit_norm: bool = True) -> None:
    """Fit if needed and project a random call; `has_unit_norm`: norms must be 1 or 0, unless it has its own index."""
    made, rng = make(), torch.Generator().manual_seed(0)
    n = max(64, made.n_fit)
    content = torch.arange(12) < torch.randint(2, 13, (n, 1), generator=rng)
    ids, states = torch.randint(5, 96, (n, 12), generator=rng), torch.randn(n, 12, 16, generator=rng)

    def features(rows: slice) -> torch.Tensor:
        attention = states[rows].flip(-1) if made.reads_attention else None
        return made.features(View(states[rows] if made.reads_states else None, content[rows], ids[rows], attention))

    if made.n_fit:
        made.fit([*features(slice(n)).numpy()])
        _rule(made.n_fit == 0, "n_fit: 0 after fit")
    x, alone = features(slice(6)), torch.cat([features(slice(i, i + 1)) for i in range(6)])
    _rule(x.dtype == torch.float32 and x.ndim == 2 and len(x) == 6, "features: float32 (B, F0)")
    _rule(torch.allclose(x, alone, atol=1e-5), "features: each row is independent of the other rows")
    vectors, single = made.project(x.numpy()), np.concatenate([made.project(row[None]) for row in alone.numpy()])
    _rule(torch.equal(x, features(slice(6))), "project: the features are not modified")
    _rule(vectors.dtype == np.float32 and vectors.ndim == 2 and len(vectors) == 6, "project: float32 (B, F)")
    _rule(np.allclose(vectors, single, atol=1e-5), "project: finite, deterministic, each row independent of the others")
    norms = np.linalg.norm(vectors, axis=1)
    _rule(not has_unit_norm or np.isclose(norms, 1, atol=1e-4)[norms > 0].all(), "project: L2 norm 1")
    other = make()
    other.restore(made.state())
    _rule(np.allclose(other.project(x.numpy()), vectors, atol=1e-6), "restore: the same vectors as before saving")


def check_codec(make: Callable[[], Codec], width: int = 8) -> None:
    """Fit if needed, then pack tensors whose last dimension is `width`."""
    codec, rng, floats = make(), torch.Generator().manual_seed(0), (torch.float32, torch.float16, torch.bfloat16)
    lossless = {dtype for dtype in floats if codec.is_lossless(dtype)}
    early = codec.encode("hidden", torch.randn(3, width, generator=rng))
    before = codec.decode("hidden", early, torch.float32)
    if codec.n_fit:
        codec.fit(torch.randn(codec.n_fit, width, generator=rng))
    is_same = torch.equal(before, codec.decode("hidden", early, torch.float32)) and codec.n_fit == 0
    _rule(is_same, "fit: n_fit is 0 afterwards, and earlier encodings decode as before")
    for dtype, shape in [(dtype, shape) for dtype in floats for shape in ((width,), (3, 4, width), (0, width))]:
        x = (torch.randn(shape, generator=rng) + 3).to(dtype)
        back = codec.decode("hidden", codec.encode("hidden", x.clone()), dtype)
        _rule(back.dtype == dtype and back.shape == x.shape, "decode: the shape and dtype of the encoded tensor")
        _rule(dtype not in lossless or torch.equal(back, x), "is_lossless: every bit comes back")
    x = torch.randn(2, 3, width, generator=rng)
    mine, other = x.clone().requires_grad_(), make()
    other.restore(codec.state())
    packed = codec.encode("hidden", mine) | codec.encode("keys", x[1])
    is_kept = torch.equal(mine, x) and not any(part.requires_grad for part in packed.values())
    _rule(is_kept, "encode: the tensor is not modified, and the result has no gradient")
    is_named = {name.split(".")[0] for name in packed} == {"hidden", "keys"} and "keys" in packed
    _rule(is_named, "encode: except for `hidden`, the given name is in the result")
    back = codec.decode("hidden", packed, x.dtype)
    is_same = torch.equal(other.decode("hidden", other.encode("hidden", x.mT.contiguous().mT), x.dtype), back)
    _rule(is_same, "restore: packs like the codec that was saved, for any memory layout")
    _refuses(KeyError, "decode of a name that is missing", codec.decode, "values", packed, x.dtype)
    _refuses(ValueError, "encode of integers", codec.encode, "hidden", torch.arange(4))


def check_store(make: Callable[[], Store]) -> None:
    """Open a store twice, as two processes would, and use both; `make` opens the same store, which is left empty."""
    one, other, run = make(), make(), uuid.uuid4().hex
    try:
        _check_values(one, other, run)
        _check_purges(one, other, f"{run}:purged")
        before, has = one.numbers([run]), _get(other, [_key(run, 1)])
        one.purge(None)
        is_gone = has != [None] == _get(other, [_key(run, 1)]) and before != other.numbers([run])
        _rule(is_gone, "purge(None): no value is returned, and every namespace has another number")
        other.close()
        for act in (lambda: _get(other, [_key(run, 1)]), lambda: other.numbers([]), other.stats):
            _refuses(StoreError, "every call after close", act)
    finally:
        one.close()
        other.close()


def _check_values(one: Store, other: Store, run: str) -> None:
    held = {_key(run, size): b"%06d" % size * size for size in (1, 3_000, 100_000)}
    held |= {_key(f"{run}a", "b:c"): b"x", _key(f"{run}a:b", "c"): b"y", _key(f"{run}ä*\0", "c"): b"z"}
    asked = [*held, _key(run, "none"), _key(f"{run}ä**", "c"), *held]
    _rule(_get(one, asked) == [None] * len(asked), "get_many: None for each key that has no value")
    _put(one, held)
    for store in (one, other):
        is_right = _get(store, asked[::-1]) == [held.get(key) for key in asked[::-1]]
        _rule(is_right, "get_many: a value for each key, in their order, bit for bit")
        late = store.get_many(asked, time.monotonic() - 1)
        _rule(late == [None] * len(asked), "get_many: nothing after the deadline, and no error")
        _rule(store.absent(asked[:8]) == asked[6:8], "absent: the keys that have no value")
        _put(store, held)  # again
    _rule(one.stats().n_values >= len(held) and one.stats().nbytes > 600_000, "stats: what is held")


def _check_purges(one: Store, other: Store, name: str) -> None:
    keys, stays = [_key(name, i) for i in range(5)], _key(f"{name}:b", 0)
    begin, own, before = other.purges(None), one.purges(None), one.numbers([name, f"{name}:b"])
    forgets = one.numbers([forgets_of(name), forgets_of(f"{name}:b")])
    _rule(begin.is_complete and not begin.found, "purges(None): no purges, and the current cursor")
    _put(one, dict.fromkeys([*keys, stays], b"value"))
    (kept,) = one.get_many(keys[:1], time.monotonic() + 60)
    one.forget(keys[:2])
    for store, since in ((one, own), (other, begin)):
        store.put_many([Put(key, b"late", before[0], since.cursor) for key in keys[:2]])
        store.put_many([Put(keys[1], b"late", before[0], "no cursor of this store")])
        is_gone = _get(store, [*keys, stays]) == [None] * 2 + [b"value"] * 4
        _rule(is_gone, "forget: no forgotten value is returned, or put with a cursor from before or an unknown one")
        (number,), now = store.numbers([name]), store.numbers([forgets_of(name), forgets_of(f"{name}:b")])
        is_counted = number == before[0] and [a == b for a, b in zip(now, forgets, strict=True)] == [False, True]
        _rule(is_counted, "forget: the number of `forgets_of` the namespace changes in all stores, and no other")
    _put(one, {keys[1]: b"anew"})
    _rule(_get(other, keys[:2]) == [None, b"anew"], "forget: a key may be put again with a later cursor")
    one.purge(name)
    for store in (one, other):
        number, unchanged = store.numbers([name, f"{name}:b"])
        _rule(number != before[0] and unchanged == before[1], "purge: the namespace has another number in all stores")
        store.put_many([Put(keys[0], b"late", before[0], store.purges(None).cursor)])
        _rule(_get(store, keys) == [None] * 5, "purge: no value put before it, or with the old number, is returned")
    _rule(kept is not None and bytes(kept) == b"value", "get_many: returned bytes stay when values are removed")
    wanted = [Purge(name, tuple(key.name for key in keys[:2])), Purge(name)]
    for store, since in ((one, own), (other, begin)):
        found = store.purges(since.cursor)
        of_name = [purge for purge in found.found if purge.namespace == name]
        _rule(found.is_complete and of_name == wanted, "purges: all purges, in order, once the purge has returned")
        again = store.purges(found.cursor)
        _rule(not again.found and again.cursor == found.cursor, "purges: each purge is reported once")
    unknown = other.purges("no cursor of this store")
    _rule(not (unknown.is_complete or unknown.found), "purges: incomplete and empty for an unknown cursor")
    _put(other, {keys[0]: b"again"})
    _rule(_get(one, [keys[0], stays]) == [b"again", b"value"], "purge: other values stay, and a key may be put again")


def _put(store: Store, values: Mapping[StoreKey, bytes]) -> None:
    cursor, numbers = store.purges(None).cursor, store.numbers([key.namespace for key in values])
    store.put_many([Put(*put, number, cursor) for put, number in zip(values.items(), numbers, strict=True)])


def _get(store: Store, keys: Sequence[StoreKey]) -> list[bytes | None]:
    return [None if value is None else bytes(value) for value in store.get_many(keys, time.monotonic() + 60)]


def _key(namespace: str, name: object) -> StoreKey:
    return StoreKey(namespace, "0" * 64, f"{name}")


def _rule(holds: object, said: str) -> None:
    if not holds:
        raise AssertionError(said)


def _refuses(error: type[Exception], said: str, act: Callable[..., object], *args: Any) -> None:
    try:
        act(*args)
    except error:
        return
    except Exception as other:
        raise AssertionError(f"{said}: {error.__name__}, not {other!r}") from other
    raise AssertionError(f"{said}: {error.__name__}")
