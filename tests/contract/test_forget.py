"""`forget` drops one wrong answer: its source serves nothing again, from memory or from a store."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from tests.contract.streams import ask, batched, calibrated, classifier, requests
from tests.redis_server import wait_until
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, tokens

A, B = tokens(1, 6, 1), tokens(1, 6, 2)


def rung(cache: LLMCache, ids: Tensor, **inputs: Any) -> str | None:
    cache(input_ids=ids, **inputs)
    return cache.last[0].rung


def forget(cache: Any, ids: Tensor, **inputs: Any) -> None:
    cache.forget(input_ids=ids, **inputs)


@pytest.fixture
def frozen() -> Iterator[LLMCache]:
    with calibrated(audit=0) as cache:
        yield cache


def hits(cache: LLMCache, ids: Tensor) -> dict[int, str]:
    """Ask each request; return the sources of the approximate hits, by row."""
    found = {}
    for row, one in enumerate(ids):
        cache(input_ids=one[None])
        (last,) = cache.last
        if last.rung == "semantic":
            assert last.source
            found[row] = last.source
    return found


def test_last_names_the_source(frozen: LLMCache) -> None:
    """`last[i].source` names the stored request that served a row; for an exact repeat, its own key."""
    cache = frozen
    ids = requests(20, seed=7)[0]
    found = hits(cache, ids)
    assert found
    for row, source in found.items():
        cache(input_ids=ids[[row]])
        assert cache.last[0].source == source != cache.last[0].key
    with LLMCache.wrap(build(BARE["bert"]), auto_bypass=False) as exact:
        assert (rung(exact, A), exact.last[0].source) == (None, None)
        assert rung(exact, A) == "exact" and exact.last[0].source == exact.last[0].key


@pytest.mark.parametrize("make", [BARE["bert"], GENERATORS["gpt2"], CLASSIFIERS["bert"]], ids=["bert", "gpt2", "head"])
def test_a_repeat_is_forgotten(make: Callable[[], nn.Module]) -> None:
    """After `forget` the request is computed and stored anew; others stay, also in other namespaces."""
    with LLMCache.wrap(build(make), auto_bypass=False) as cache:
        for name, ids in (("default", A), ("default", B), ("other", A)):
            with cache.namespace(name):
                assert (rung(cache, ids), rung(cache, ids)) == (None, "exact")
        before = cache.stats()
        forget(cache, tokens(1, 6, 3))  # unknown: nothing changes
        assert cache.stats() == before
        forget(cache, A)
        assert (rung(cache, A), rung(cache, A), rung(cache, B)) == (None, "exact", "exact")
        with cache.namespace("other"):
            assert rung(cache, A) == "exact"


def test_each_row_of_a_batch_is_forgotten() -> None:
    """`forget` takes a call's arguments, masks included, and forgets every row."""
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with LLMCache.wrap(build(BARE["bert"]), auto_bypass=False) as cache:
        batch = torch.cat([A, B])
        assert rung(cache, B) == rung(cache, batch, attention_mask=mask) is None
        assert rung(cache, batch, attention_mask=mask) == "exact"
        forget(cache, batch, attention_mask=mask)
        cache(input_ids=batch, attention_mask=mask)
        assert [one.rung for one in cache.last] == [None, None]
        assert rung(cache, B) == "exact"


def test_a_wrong_hit_of_tau_does_not_come_again() -> None:
    """A request that `tau` answered from another's states is computed after `forget`."""
    with LLMCache.wrap(classifier(), tau=0.0) as cache:
        cache(input_ids=requests(1, seed=1)[0])
        wrong = requests(1, seed=2)[0]
        cache(input_ids=wrong)
        assert cache.last[0].source not in (None, cache.last[0].key)
        forget(cache, wrong)
        cache(input_ids=wrong)
        assert cache.last[0].source is None


def test_a_frozen_source_serves_nobody_again(frozen: LLMCache, tmp_path: Path) -> None:
    """A forgotten source of a calibration is a tombstone, also in a save: requests nearest to it are computed."""
    cache, ids = frozen, requests(60, seed=7)[0]
    before, made = hits(cache, ids), cache.calibration
    row, gone = next(iter(before.items()))
    forget(cache, ids[[row]])
    cache.save(tmp_path / "saved")
    left = {other: source for other, source in before.items() if source != gone}
    assert left == hits(cache, ids) and row not in left
    assert made is not None and cache.calibration is not None
    assert cache.calibration.is_certified and cache.calibration.chosen == made.chosen  # the bound stays
    with LLMCache.load(classifier(), tmp_path / "saved") as loaded:
        assert set(left.values()) == set(hits(loaded, ids).values())
    cache.purge(namespace="default")  # forgets a wrong answer with all others
    assert ask(cache, requests(30, seed=7)[0]) == [None] * 30


# -- calls under way ---------------------------------------------------------------------------------------------------


class Waiting(nn.Module):
    """An activation that waits in the first thread that gets there after `is_on` was set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on, self.is_reached, self.may_end = threading.Event(), threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on.is_set():
            self.is_on.clear()
            self.is_reached.set()
            assert self.may_end.wait(20)
        return x.relu()


def wrap_slow(kind: str, **settings: Any) -> tuple[LLMCache, Waiting]:
    """Wrap a tiny encoder or decoder whose first layer can be made to wait."""
    model: Any = build({"bert": BARE["bert"], "gpt2": GENERATORS["gpt2"]}[kind])
    layer, name = (
        (model.encoder.layer[0].intermediate, "intermediate_act_fn")
        if kind == "bert"
        else (model.transformer.h[0].mlp, "act")
    )
    setattr(layer, name, waiting := Waiting())
    return LLMCache.wrap(model, auto_bypass=False, **settings), waiting


def forget_during(cache: LLMCache, waiting: Waiting, act: Callable[[], object], ids: Tensor = A) -> str | None:
    """Act while another thread computes `ids`; return its rung."""
    for event in (waiting.is_reached, waiting.may_end):
        event.clear()
    waiting.is_on.set()
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(rung, cache, ids)
        assert waiting.is_reached.wait(20)
        act()
        waiting.may_end.set()
        found = under_way.result()
    cache.drain()
    return found


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("bert", {}), ("gpt2", {}), ("bert", {"tau": 1.0}), ("bert", {"store": "disk"}), ("gpt2", {"store": "disk"})],
)
def test_a_call_under_way_stores_what_was_not_forgotten_meanwhile(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """What was computed before `forget` is in neither memory nor store afterwards; it is if others were forgotten."""
    served = "paper" if "tau" in settings else "exact"
    if "store" in settings:
        settings = {"store": {"name": "disk", "folder": str(tmp_path / "store")}}
    cache, waiting = wrap_slow(kind, **settings)

    def forget_others() -> None:
        forget(cache, B)
        with cache.namespace("other"):
            forget(cache, A)
        cache.purge(namespace="other")

    with cache:
        assert forget_during(cache, waiting, forget_others) is None
        assert rung(cache, A) == served
        forget(cache, A)
        assert forget_during(cache, waiting, lambda: forget(cache, A)) is None
        assert (rung(cache, A), rung(cache, A)) == (None, served)


def test_what_was_computed_from_a_forgotten_prefix_is_not_stored() -> None:
    """The blocks of a call that follow a forgotten one are dropped, even if that is computed anew meanwhile."""
    prompt = tokens(1, 17, 3)
    longer = torch.cat([prompt[:, :16], tokens(1, 17, 4)], dim=1)
    cache, waiting = wrap_slow("gpt2")

    def forget_and_ask() -> None:
        forget(cache, prompt)
        assert rung(cache, prompt) is None

    with cache:
        rung(cache, prompt)
        assert forget_during(cache, waiting, forget_and_ask, longer) == "prefix"
        assert rung(cache, longer) == "prefix" and cache.last[0].n_prefix == 16


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_call_under_way_elsewhere_stores_nothing_that_was_forgotten(kind: str, store: dict[str, Any]) -> None:
    """Other caches on the store do not bring a forgotten request back; other requests of theirs are stored."""
    cache, waiting = wrap_slow(kind, store=store)
    other, _ = wrap_slow(kind, store=store)
    with cache, other:
        rung(other, B)
        rung(other, A)
        other.drain()
        other.forget(input_ids=A)
        assert forget_during(cache, waiting, lambda: forget(other, A)) is None
        assert rung(cache, B) == "exact"
        later, _ = wrap_slow(kind, store=store)
        with later:
            assert rung(later, A) is None


@pytest.mark.parametrize("act", ["forget", "purge"])
def test_a_save_loaded_beside_its_store_does_not_bring_back_what_went_since(act: str, tmp_path: Path) -> None:
    """`LLMCache.load` leaves out a namespace of which something was forgotten or purged since the save, no others."""
    model, store = BARE["bert"], {"name": "disk", "folder": str(tmp_path / "store")}
    with LLMCache.wrap(build(model), auto_bypass=False, store=store) as cache:
        for name in ("a", "b"):
            with cache.namespace(name):
                rung(cache, A)
        forget(cache, B)
        cache.save(tmp_path / "save")
        with cache.namespace("a"):
            forget(cache, A) if act == "forget" else cache.purge(namespace="a")
    with LLMCache.load(build(model), tmp_path / "save") as cache:
        for name, expected in (("a", None), ("b", "exact")):
            with cache.namespace(name):
                assert rung(cache, A) == expected


def test_what_was_looked_up_before_is_computed(frozen: LLMCache) -> None:
    """A part of `look_up` that is run after `forget` is computed, and not served a similar request's answer."""
    ids = requests(60, seed=7)[0]
    row = ids[[ask(frozen, ids).index("semantic")]]
    found = frozen.look_up({"input_ids": row})
    assert found.served is not None
    forget(frozen, row)
    frozen(**found.served.inputs)
    assert frozen.last[0].rung is None


@pytest.mark.slow
def test_one_request_is_forgotten_while_requests_are_collected_to_learn_from() -> None:
    """`forget` takes one request out of those that `learn` collects: the others count, and it becomes no source."""
    ids = requests(300)[0]
    with LLMCache.wrap(classifier(), auto_bypass=False, max_drop=0.05, learn=299, audit=0) as cache:
        for part in ids.split(50)[:-1]:
            cache(input_ids=part)
        forget(cache, ids[[0]])
        cache(input_ids=ids[250:])
        cache.drain()
        assert cache.calibration is None
        cache(input_ids=requests(8, seed=5)[0])
        cache.drain()
        assert cache.calibration is not None
        assert rung(cache, ids[[0]]) != "exact"


@pytest.mark.slow
def test_a_source_serves_in_no_cache_that_shares_its_calibration(tmp_path: Path) -> None:
    """A source that was forgotten in one cache serves in no other: not where it is in memory, nor where it is read."""

    def wrapped(is_known: bool = True) -> LLMCache:
        store = {"name": "disk", "folder": str(tmp_path / "store"), "least_tokens": 1_000}
        cache = LLMCache.wrap(
            classifier(), store=store, share_calibration=True, max_drop=0.05, auto_bypass=False, audit=0
        )

        def is_calibrated() -> bool:  # a busy machine may read the store too late for a call
            cache(input_ids=requests(1, seed=77)[0])
            cache.drain()
            return cache.calibration is not None or not is_known

        wait_until(is_calibrated)
        return cache

    ids = requests(60, seed=7)[0]
    with wrapped(is_known=False) as one:
        one.calibrate(batched(requests(300)[0]))
        one.drain()
        with wrapped() as other:
            sources = hits(one, ids)
            gone, _ = Counter(sources.values()).most_common(1)[0]
            row, *rest = (row for row, source in sources.items() if source == gone)
            assert rest
            forget(one, ids[[row]])
            with wrapped() as later:
                for cache in (one, other, later):
                    assert gone not in hits(cache, ids[rest]).values()
