"""A cache with a store behind its memory: a restart serves what was there, and nothing wrong ever."""

import errno
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import ConfigError, LLMCache, StoreError, persist
from llmcache.banks.stores.disk import DiskStore
from llmcache.banks.stores.seal import KEY, SECRET
from tests.inside import components
from tests.reuse.prompts import BLOCK, branch
from tests.tiny_models import CLASSIFIERS, GENERATORS, STRANGE_GENERATORS, build, tokens
from tests.topics import N_CALIBRATED, batched, classifier, requests, rungs_of

ENCODERS = {"bert": CLASSIFIERS["bert"], "roberta": CLASSIFIERS["roberta"], "gpt2": CLASSIFIERS["gpt2"]}
DECODERS = {"gpt2": GENERATORS["gpt2"], "llama": GENERATORS["llama"], "qwen3": STRANGE_GENERATORS["qwen3"]}


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., LLMCache]:
    """Starts a server anew: another model with the same weights, and one folder."""

    def act(make: Callable[[], nn.Module], **settings: Any) -> LLMCache:
        options = {"store_least_tokens": 0, "prefix_block": BLOCK, "auto_bypass": False, **settings}
        return LLMCache.wrap(build(make), store={"name": "disk", "folder": str(tmp_path / "store")}, **options)

    return act


def plainly(cache: LLMCache, ids: Tensor, **inputs: Any) -> Any:
    with cache.disabled():
        return cache(ids, **inputs)


def first(output: Any) -> Tensor:
    found: Tensor = output[0]
    return found


def stop(cache: LLMCache) -> None:
    assert cache.stats().errors == 0, cache.stats().health
    cache.unwrap()


@pytest.mark.parametrize("payload", ["auto", "sequence"])
@pytest.mark.parametrize("family", ENCODERS)
def test_a_restart_serves_repeats_of_an_encoder(started: Callable[..., LLMCache], family: str, payload: str) -> None:
    settings = {"payload": payload} if family != "gpt2" else {"payload": payload, "prefix": False}
    ids = tokens(3, 9)
    cache = started(ENCODERS[family], **settings)
    expected = first(cache(ids))
    stop(cache)
    cache = started(ENCODERS[family], **settings)
    assert torch.equal(first(cache(ids)), expected)
    assert cache.stats().hits == {"exact": 3}
    assert cache.stats().store.n_found == 3
    assert torch.equal(first(cache(ids)), expected)  # from memory
    assert cache.stats().store.n_asked == 3
    stop(cache)


@pytest.mark.parametrize("layers", ["all", [1, 3]])
@pytest.mark.parametrize("use_cache", [False, True])
def test_entries_of_several_layers_come_back_with_their_kv(
    started: Callable[..., LLMCache], layers: Any, use_cache: bool
) -> None:
    settings = {"payload": "sequence", "layers": layers, "prefix": False}
    ids, more = tokens(1, 9), tokens(1, 1, seed=3)
    for n_hits in 0, 1:
        cache = started(DECODERS["llama"], **settings)
        output = cache(ids, use_cache=use_cache)
        assert cache.stats().n_hits == n_hits
        if use_cache:
            following = cache(more, past_key_values=output.past_key_values)
            expected = plainly(cache, torch.cat([ids, more], 1)).logits[:, -1:]
            torch.testing.assert_close(following.logits, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(output.logits, plainly(cache, ids).logits, atol=1e-5, rtol=1e-5)
        stop(cache)


@pytest.mark.parametrize("family", DECODERS)
def test_a_restart_serves_repeats_and_beginnings_of_a_decoder(started: Callable[..., LLMCache], family: str) -> None:
    ids = tokens(1, 18)
    cache = started(DECODERS[family])
    expected = first(cache(ids))
    stop(cache)

    cache = started(DECODERS[family])
    assert torch.equal(first(cache(ids)), expected)
    assert cache.last[0].rung == "exact"
    stop(cache)

    cache = started(DECODERS[family])
    longer = torch.cat([ids, tokens(1, 7, seed=2)], dim=1)
    for prompt, n_known in ((branch(ids, 14, 20), 12), (longer, 16)):  # whole blocks
        expected = first(plainly(cache, prompt))
        torch.testing.assert_close(first(cache(prompt)), expected, atol=1e-5, rtol=1e-5)
        assert (cache.last[0].rung, cache.last[0].n_prefix) == ("prefix", n_known)
    stop(cache)

    cache = started(DECODERS[family])  # what came after a prefix was kept as well
    cache(longer)
    assert cache.last[0].n_prefix == 24
    stop(cache)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_generation_goes_on_after_a_restart_as_it_would_have(started: Callable[..., LLMCache], family: str) -> None:
    ids = tokens(1, 17)
    cache = started(DECODERS[family])
    model: Any = cache.model
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    stop(cache)
    for prompt in (ids, expected[:, :20]):
        cache = started(DECODERS[family])
        model = cache.model
        with cache.disabled():
            alone = model.generate(prompt, max_new_tokens=8, do_sample=False)
        assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), alone)
        assert cache.stats().n_hits == 1
        stop(cache)


def test_padding_of_each_layout_comes_back_as_it_was(started: Callable[..., LLMCache]) -> None:
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    for n_hits in 0, 2:
        cache = started(DECODERS["gpt2"])
        output = cache(ids, attention_mask=mask)
        assert torch.equal(output.logits, plainly(cache, ids, attention_mask=mask).logits) or n_hits == 0
        assert cache.stats().n_hits == n_hits
        stop(cache)


def test_of_a_batch_each_row_is_read_by_itself(started: Callable[..., LLMCache]) -> None:
    ids = tokens(4, 9)
    cache = started(ENCODERS["bert"])
    cache(ids[:2])
    stop(cache)
    cache = started(ENCODERS["bert"])
    output = first(cache(ids))
    assert [outcome.rung for outcome in cache.last] == ["exact", "exact", None, None]
    torch.testing.assert_close(output, first(plainly(cache, ids)), atol=1e-5, rtol=1e-5)
    stop(cache)


def edit(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)


def configure(model: Any) -> None:
    model.config.layer_norm_epsilon = model.transformer.h[0].ln_1.eps = 1e-3


@pytest.mark.parametrize("change", [edit, configure, lambda model: model.double()])
def test_another_model_is_served_nothing_of_the_first(
    started: Callable[..., LLMCache], tmp_path: Path, change: Callable[[Any], object]
) -> None:
    ids = tokens(1, 18)
    cache = started(DECODERS["gpt2"])
    cache(ids)
    stop(cache)
    model = build(DECODERS["gpt2"])
    change(model)
    store = {"name": "disk", "folder": str(tmp_path / "store")}
    with LLMCache.wrap(model, store=store, store_least_tokens=0, prefix_block=BLOCK) as cache:
        assert torch.equal(first(cache(ids)), first(plainly(cache, ids)))
        assert (cache.stats().n_hits, cache.stats().store.n_mismatched) == (0, {})


def test_namespaces_do_not_see_each_other(started: Callable[..., LLMCache]) -> None:
    ids = tokens(1, 18)
    cache = started(DECODERS["gpt2"])
    with cache.namespace("a"):
        cache(ids)
    stop(cache)
    cache = started(DECODERS["gpt2"])
    for name, rung in (("b", None), ("a", "exact")):
        with cache.namespace(name):
            cache(ids)
        assert cache.last[0].rung == rung
    stop(cache)


@pytest.mark.parametrize("make", [ENCODERS["bert"], DECODERS["gpt2"]])
@pytest.mark.parametrize("everything", [False, True])
def test_a_purge_by_one_process_reaches_the_others(
    started: Callable[..., LLMCache], make: Callable[[], nn.Module], everything: bool
) -> None:
    """Here two caches stand for two processes: neither serves what was purged, from the store or from memory."""
    ids, others = tokens(1, 18), tokens(1, 18, seed=1)
    one, other = started(make), started(make)
    with one.namespace("a"):
        one(ids)
    one(others)
    one.drain()
    with other.namespace("a"):
        other(ids)
        assert other.last[0].rung == "exact"
        if everything:
            one.clear()
        else:
            assert one.purge(namespace="a") == 1
        other(ids)
        assert other.last[0].rung is None
    other(others)
    assert (other.last[0].rung is None) == everything
    stop(one)
    stop(other)
    again = started(make)
    with again.namespace("a"):
        again(ids)
        assert again.last[0].rung == "exact"  # as it was computed after the purge
    stop(again)


@pytest.mark.parametrize(
    ("make", "budget"), [(ENCODERS["bert"], {"max_entries": 1}), (DECODERS["gpt2"], {"max_bytes": 60_000})]
)
@pytest.mark.parametrize("leaves", [False, True])
def test_what_was_computed_without_the_store_does_not_outlive_a_purge(
    started: Callable[..., LLMCache],
    make: Callable[[], nn.Module],
    budget: dict[str, int],
    leaves: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither in memory, though the store told nothing of the purge, nor in the store, where it is put when it leaves.

    A store that was away may answer about its numbers before it tells of events.
    """
    one, other = started(make), started(make, **(budget if leaves else {}))
    ids = tokens(1, 18)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "away")

    store = components(other).tier._store  # type: ignore[union-attr]
    with monkeypatch.context() as patched:
        patched.setattr(store, "generation", fail)
        other(ids)
        other(ids)
        assert other.last[0].rung == "exact"  # from memory
    one.purge(namespace="default")
    with monkeypatch.context() as patched:
        patched.setattr(store, "events", fail)
        for seed in range(1, 40 if leaves else 2):
            other(tokens(1, 18, seed=seed))
        other.drain()
    if leaves:
        assert other.stats().n_evicted_total > 0
        one(ids)
        assert one.last[0].rung is None
    else:
        components(other).tier._cursor = "lost"  # type: ignore[union-attr]
        other(ids)
        assert other.last[0].rung is None
    one.unwrap()
    other.unwrap()


@pytest.mark.parametrize("make", [ENCODERS["bert"], DECODERS["gpt2"]])
def test_what_was_under_way_during_a_purge_is_kept_nowhere(
    started: Callable[..., LLMCache], make: Callable[[], nn.Module]
) -> None:
    ids, one, other = tokens(1, 18), started(make), started(make)
    has_purged: list[int] = []
    layer = components(other).trunk.layers[2]
    hook = layer.register_forward_hook(lambda *_: has_purged or has_purged.append(one.purge(namespace="default")))
    other(ids)
    hook.remove()
    assert has_purged
    other(ids)
    assert other.last[0].rung is None
    other.drain()
    assert other(ids) is not None and other.last[0].rung == "exact"
    stop(one)
    stop(other)


@pytest.mark.parametrize("make", [ENCODERS["bert"], DECODERS["gpt2"]])
def test_damaged_values_are_computed_and_counted(
    started: Callable[..., LLMCache], make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcache.banks.stores.disk.LARGE_BYTES", 100)  # each value in a file
    ids, chance = tokens(1, 18), random.Random(0)
    cache = started(make)
    cache(ids)
    stop(cache)
    store: DiskStore | None = None
    for what in ("flipped", "cut", "emptied"):
        cache = started(make)
        store = components(cache).tier._store  # type: ignore[union-attr, assignment]
        for path in store._values.iterdir():
            data = bytearray(path.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data if what == "flipped" else data[: len(data) // 2] if what == "cut" else b"")
        expected = first(plainly(cache, ids))
        assert torch.equal(first(cache(ids)), expected)
        assert cache.last[0].rung is None
        assert cache.stats().store.n_mismatched.keys() <= {"damaged", "other_key", "other_format"}
        assert sum(cache.stats().store.n_mismatched.values()) > 0
        stop(cache)


@pytest.mark.parametrize("variable", [SECRET, KEY])
def test_values_of_another_secret_are_computed(
    started: Callable[..., LLMCache], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    ids = tokens(1, 18)
    for secret, rung in (("A" * 43 + "=", None), ("B" * 42 + "A=", None), ("A" * 43 + "=", "exact")):
        monkeypatch.setenv(variable, secret)
        cache = started(DECODERS["gpt2"])
        output = first(cache(ids))
        assert cache.last[0].rung == rung
        assert torch.equal(output, first(plainly(cache, ids)))
        stop(cache)
    if variable == KEY:
        written = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
        assert not any(b'"tensors"' in data for data in written)


def test_what_leaves_memory_comes_back_from_the_store(started: Callable[..., LLMCache]) -> None:
    for make, settings in (
        (ENCODERS["bert"], {"max_entries": 1}),
        (DECODERS["gpt2"], {"max_bytes": 60_000}),
    ):
        cache = started(make, **settings)
        asked = [tokens(1, 24, seed=seed) for seed in range(4)]
        expected = [first(cache(ids)) for ids in asked]
        assert cache.stats().n_evicted_total > 0
        cache.drain()
        for ids, output in zip(asked, expected, strict=True):
            assert torch.equal(first(cache(ids)), output)
            assert cache.last[0].rung == "exact"
            cache.drain()
        stop(cache)


def test_what_the_store_lost_is_written_again_when_it_leaves_memory(started: Callable[..., LLMCache]) -> None:
    cache = started(ENCODERS["bert"], max_entries=1)
    ids = tokens(1, 9)
    cache(ids)
    cache.drain()
    store = components(cache).tier._store  # type: ignore[union-attr]
    with store._index.writing() as changes:  # type: ignore[attr-defined]
        changes.evict(0)
    assert store.stats().n_values == 0
    cache(tokens(1, 9, seed=1))
    cache.drain()
    cache(ids)
    assert cache.last[0].rung == "exact"
    stop(cache)


def test_short_requests_are_computed(started: Callable[..., LLMCache]) -> None:
    for make in (ENCODERS["bert"], DECODERS["gpt2"]):
        for n_hits in 0, 1:
            cache = started(make, store_least_tokens=16)
            for length in 8, 24:
                cache(tokens(1, length, seed=length))
            assert cache.stats().n_hits == n_hits
            stop(cache)


@pytest.mark.parametrize("make", [ENCODERS["bert"], DECODERS["llama"]])
def test_from_how_many_tokens_on_reading_pays_is_measured(started: Callable[..., LLMCache], make: Any) -> None:
    cache = started(make, store_least_tokens=None)
    made = components(cache).tier.break_even  # type: ignore[union-attr]
    assert made.token_s is not None and (made.least_tokens is None or made.least_tokens >= 0)
    stats = cache.stats()
    assert (stats.store.least_tokens, stats.store.n_values, stats.n_requests) == (made.least_tokens, 0, 0)
    stop(cache)


def test_nothing_is_measured_with_a_model_that_others_watch(tmp_path: Path) -> None:
    n_seen = []
    model = build(ENCODERS["bert"])
    model.bert.encoder.layer[0].register_forward_hook(lambda *_: n_seen.append(1))  # type: ignore[union-attr, operator]
    with LLMCache.wrap(model, store={"name": "disk", "folder": str(tmp_path / "store")}) as cache:
        assert cache.stats().store.least_tokens == 0 and not n_seen
    model = build(ENCODERS["bert"]).train()
    with LLMCache.wrap(model, store={"name": "disk", "folder": str(tmp_path / "store")}) as cache:
        assert cache.stats().store.least_tokens == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "paper", "tau": 0.9}, "mode 'paper'"),
        ({"policy": {"name": "ttl", "ttl_s": 1.0}}, "policy 'ttl'"),
        ({"exact": False, "tau": 0.9}, "nothing could be served"),
        ({"compression": {"name": "int8"}, "tau": 0.9}, "compression='int8'"),
        ({"store": {"name": "memory", "folder": "x"}}, "'memory' takes no options"),
        ({"store": "disk"}, "folder"),
        ({"store": {"name": "disk", "folder": "/proc/x"}}, "cannot be used"),
    ],
)
def test_settings_that_could_serve_nothing_rightly_are_refused(
    started: Callable[..., LLMCache], tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    store = {"name": "disk", "folder": str(tmp_path / "store")}
    with pytest.raises(ConfigError, match=message):
        LLMCache.wrap(build(ENCODERS["bert"]), **{"store": store, **settings})


def test_a_store_that_fails_costs_speed_alone(started: Callable[..., LLMCache]) -> None:
    for make in (ENCODERS["bert"], DECODERS["gpt2"]):
        cache, ids = started(make), tokens(1, 18)
        components(cache).tier._store.close()  # type: ignore[union-attr]
        expected = first(plainly(cache, ids))
        for _ in range(2):
            assert torch.equal(first(cache(ids)), expected)
        assert cache.last[0].rung == "exact"  # from memory
        assert cache.stats().errors > 0
        cache.unwrap()


@pytest.mark.parametrize("make", [ENCODERS["bert"], DECODERS["gpt2"]])
def test_a_full_disk_costs_speed_alone(
    started: Callable[..., LLMCache], make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcache.banks.stores.disk.LARGE_BYTES", 100)  # each value in a file
    known, ids = tokens(1, 18), tokens(1, 18, seed=1)
    cache = started(make)
    cache(known)
    stop(cache)

    def fill(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("llmcache.banks.stores.disk._write", fill)
    monkeypatch.setattr("llmcache.banks.write_behind._FAILURES", 100)  # else it may not be asked for a moment
    cache = started(make)
    for asked, rung in (ids, None), (ids, "exact"), (known, "exact"):  # computed, from memory, from the store
        expected = first(plainly(cache, asked))
        assert torch.equal(first(cache(asked)), expected)
        assert cache.last[0].rung == rung
        cache.drain()
    assert cache.stats().errors > 0 and cache.stats().store.n_dropped > 0
    cache.unwrap()


def shared_by(cache: LLMCache, name: str, prompt: Tensor, prefixes_from: str | None = "public") -> int:
    """Tokens of a prompt that were served to a tenant, who may read what is public."""
    expected = first(plainly(cache, prompt))
    with cache.namespace(name, prefixes_from=prefixes_from):
        torch.testing.assert_close(first(cache(prompt)), expected, atol=1e-5, rtol=1e-5)
    n_prefix: int = cache.last[0].n_prefix
    return n_prefix


def test_prefixes_that_another_namespace_shares_come_from_the_store(started: Callable[..., LLMCache]) -> None:
    stem = tokens(1, 24)
    asked = [branch(stem, 18, 26, seed) for seed in range(1, 6)]
    cache = started(DECODERS["llama"])
    with cache.namespace("public"):
        cache(stem)
    stop(cache)

    cache = started(DECODERS["llama"])
    assert shared_by(cache, "a", asked[0], prefixes_from=None) == 0
    assert cache.stats().store.n_asked == 0
    assert shared_by(cache, "b", asked[0]) == 16
    n_asked = cache.stats().store.n_asked
    assert shared_by(cache, "c", asked[1]) == 16
    assert cache.stats().store.n_asked == n_asked  # it was in memory
    stop(cache)

    cache = started(DECODERS["llama"])
    assert shared_by(cache, "b", asked[2]) == 16
    assert cache.stats().store.n_asked == 4  # blocks of its own, which reach as far
    other = started(DECODERS["llama"])
    other.purge(namespace="public")
    assert shared_by(other, "d", asked[3]) == 0
    assert shared_by(cache, "e", asked[4]) == 0
    stop(other)
    stop(cache)


def test_a_purge_while_shared_prefixes_are_read_is_the_last_time_they_serve(
    started: Callable[..., LLMCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    stem, cache, other = tokens(1, 24), started(DECODERS["llama"]), started(DECODERS["llama"])
    with other.namespace("public"):
        other(stem)
    other.drain()
    read = DiskStore.get_many

    def read_and_purge(store: DiskStore, *args: Any) -> Any:
        found = read(store, *args)
        monkeypatch.setattr(DiskStore, "get_many", read)
        other.purge(namespace="public")
        return found

    monkeypatch.setattr(DiskStore, "get_many", read_and_purge)
    shared_by(cache, "a", branch(stem, 18, 26, 1))
    assert shared_by(cache, "b", branch(stem, 18, 26, 2)) == 0
    pool = components(cache).prefix
    assert pool is not None and all(record.scope.namespace != "public" for record in pool.records())
    stop(cache)
    stop(other)


def test_a_save_is_loaded_beside_a_store(started: Callable[..., LLMCache], tmp_path: Path) -> None:
    cache, ids = started(ENCODERS["bert"]), tokens(1, 9)
    cache(ids)
    cache.save(tmp_path / "save")
    stop(cache)
    with LLMCache.load(build(ENCODERS["bert"]), tmp_path / "save") as cache:
        other = started(ENCODERS["bert"])
        other.clear()
        cache(ids)
        assert cache.last[0].rung is None  # purged elsewhere since it was loaded
        stop(other)


def away(*_: Any) -> Any:
    raise StoreError("it is away")


@pytest.mark.parametrize("is_away", [False, True], ids=["asked at once", "away at first"])
@pytest.mark.parametrize("make", [ENCODERS["bert"], DECODERS["llama"]], ids=["bert", "llama"])
def test_what_was_purged_since_a_save_is_not_served_from_it(
    started: Callable[..., LLMCache],
    make: Callable[[], nn.Module],
    is_away: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids, cache, other = tokens(1, 19), started(make), started(make)
    for name in ("purged", "kept"):
        with cache.namespace(name):
            cache(ids)
    cache.save(tmp_path / "save")
    stop(cache)
    other.purge(namespace="purged")
    with monkeypatch.context() as patch:
        if is_away:
            for name in ("events", "generation", "get_many", "ping"):
                patch.setattr(DiskStore, name, away)
        cache = LLMCache.load(build(make), tmp_path / "save")
        if is_away:  # as by one that has run all the time, and is cut off
            assert rung(cache, ids, "purged") == "exact"
        assert ("not used, as it may have been purged since, is namespace 'purged'" in caplog.text) == (not is_away)
    assert rung(cache, ids, "kept") == "exact"
    assert ("forgotten, as it may have been purged, is namespace 'purged'" in caplog.text) == is_away
    cache.drain()
    assert rung(other, ids, "purged") is None  # nothing of it was stored as new
    cache.clear()
    assert rung(cache, ids, "purged") is None
    stop(other)
    cache.unwrap()


@pytest.mark.parametrize("case", ["not asked", "store lost"])
def test_a_save_of_which_nobody_knows_what_was_purged_since_is_not_served(
    started: Callable[..., LLMCache], case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, cache, path = tokens(1, 9), started(ENCODERS["bert"]), tmp_path / "save" / "manifest.json"
    with monkeypatch.context() as patch:
        if case == "not asked":
            patch.setattr(DiskStore, "generation", away)
        cache(ids)
        cache.save(path.parent)
        cache.unwrap()
    if case == "store lost":
        shutil.rmtree(tmp_path / "store")
    with LLMCache.load(build(ENCODERS["bert"]), path.parent) as cache:
        assert len(components(cache).banks) == 0
        cache(ids)
        cache.save(path.parent)
    with LLMCache.load(build(ENCODERS["bert"]), path.parent) as cache:
        assert len(components(cache).banks) == 1


def rung(cache: LLMCache, ids: Tensor, namespace: str = "default") -> str | None:
    """What serves a request."""
    with cache.namespace(namespace):
        cache(ids)
    found: str | None = cache.last[0].rung
    return found


@pytest.mark.parametrize("sources", ["frozen", "growing"])
@pytest.mark.parametrize("namespace", ["tenant", "watched", "other"])
@pytest.mark.parametrize("is_away", [False, True], ids=["asked at once", "away at first"])
def test_a_calibration_that_was_purged_since_a_save_is_not_served_from_it(
    sources: str, namespace: str, is_away: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of whose sources none is held any more; and a request of which nothing is left but its quarantine."""
    settings = {"max_drop": 0.05, "auto_bypass": False, "store": {"name": "disk", "folder": str(tmp_path / "store")}}
    with LLMCache.wrap(classifier(), **settings, sources=sources, max_entries=N_CALIBRATED) as cache:
        with cache.namespace("tenant"):
            assert cache.calibrate(batched(requests(N_CALIBRATED)[0])).chosen is not None
        rung(cache, tokens(1, 9), "watched")
        with cache.namespace("third"):
            for seed in range(2 * N_CALIBRATED // 50):
                cache(tokens(50, 12, seed=seed))
        cache.drain()
        held = {record.scope.namespace for record in components(cache).banks.records()}
        assert ("tenant" in held) == (sources == "frozen") and "watched" not in held
        components(cache).banks.quarantine("key", "watched")
        cache.save(tmp_path / "save")
    with LLMCache.wrap(classifier(), **settings) as cache:
        cache.purge(namespace=namespace)
    with monkeypatch.context() as patch:
        if is_away:
            for name in ("events", "generation", "ping"):
                patch.setattr(DiskStore, name, away)
        cache = LLMCache.load(classifier(), tmp_path / "save")
        assert cache.calibration is not None or not is_away
    with cache.namespace("tenant"):
        rungs = rungs_of(cache, requests(60, seed=5)[0])
    assert ("semantic" in rungs) == (cache.calibration is not None) == (namespace != "tenant")
    assert ("key" in components(cache).banks.quarantined) == (namespace != "watched")
    cache.save(tmp_path / "save")
    cache.unwrap()


@pytest.mark.parametrize("make", [ENCODERS["bert"], DECODERS["llama"]], ids=["bert", "llama"])
def test_a_call_that_comes_while_a_save_is_loaded_finds_nothing_that_was_purged(
    started: Callable[..., LLMCache], make: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, cache, model = tokens(1, 19), started(make), build(make)
    cache(ids)
    cache.save(tmp_path / "save")
    cache.purge(namespace="default")
    take_in, done = persist._take_in, threading.Event()

    def with_a_call(*args: Any) -> None:
        caller.start()
        assert not done.wait(0.2)  # it waits
        take_in(*args)

    def call() -> None:
        with torch.inference_mode():
            model(ids)
        done.set()

    caller = threading.Thread(target=call)
    monkeypatch.setattr(persist, "_take_in", with_a_call)
    with LLMCache.load(model, tmp_path / "save") as loaded:
        caller.join(20)
        assert loaded.stats().hits == {} and rung(loaded, ids) == "exact"  # its own
    stop(cache)


def test_a_purge_that_comes_while_it_is_saved_is_not_missed(
    started: Callable[..., LLMCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, cache, other = tokens(1, 9), started(ENCODERS["bert"]), started(ENCODERS["bert"])
    cache(ids)
    take = persist._take

    def with_a_purge(*args: Any) -> Any:
        taken = take(*args)
        other.purge(namespace="default")
        components(cache).follow()
        cache(tokens(1, 5))
        return taken

    monkeypatch.setattr(persist, "_take", with_a_purge)
    cache.save(tmp_path / "save")
    stop(cache)
    with LLMCache.load(build(ENCODERS["bert"]), tmp_path / "save") as cache:
        assert rung(cache, ids) is None
    stop(other)
