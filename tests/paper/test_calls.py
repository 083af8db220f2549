"""Calls with `tau`: bypasses, edited weights, isolation, threads, and failures within."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import FINGERPRINTS, INDEXES, POLICIES, LLMCache, NotCachedError
from tests.paper.reference import assert_close, plain, run, served, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, build, padded, states, tokens

X = padded([6, 4])
IDS = tokens(1, 6, seed=70)
Patch = pytest.MonkeyPatch
BOTH = pytest.mark.parametrize("settings", [{}, {"layers": "last"}], ids=["all", "last"])


class Within:
    """Calls `do` once, when it is set, after a forward of the module's class."""

    def __init__(self, patch: Patch, path: str) -> None:
        """Patch the class before a model is wrapped: to the cache, changed code is changed weights."""
        self.do: Callable[[], Any] | None = None
        kind = type(build(CLASSIFIERS["bert"]).get_submodule(path))
        forward = kind.forward

        @functools.wraps(forward)
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output, do, self.do = forward(module, *args, **kwargs), self.do, None
            if do is not None:
                do()
            return output

        patch.setattr(kind, "forward", run)


BYPASSES: dict[str, Callable[[LLMCache], Any]] = {
    "training": lambda cache: (cache.model.train(), cache(**X), cache.model.eval()),
    "inputs_embeds": lambda cache: cache(inputs_embeds=torch.ones(2, 5, 32)),
    "hooked": lambda cache: (layer(cache).attention.register_forward_hook(lambda *_: None), cache(**X)),
    "mask_values": lambda cache: cache(X["input_ids"], attention_mask=X["attention_mask"] * 0.5),
    "head_reads_padding": lambda cache: cache(**padded([6, 4], left=True)),
    "compiled_layers": lambda cache: (layer(cache).compile(backend="eager"), cache(**X)),
}


def layer(cache: LLMCache) -> Any:
    return cache.model.bert.encoder.layer[2]


@pytest.mark.parametrize("reason", BYPASSES)
def test_what_the_cache_cannot_serve_is_computed_and_counted(reason: str) -> None:
    cache = wrapped("bert", tau=-1.0, layers="last")
    BYPASSES[reason](cache)
    stats = cache.stats()
    assert set(stats.bypassed) == {reason} and stats.errors == 0
    assert stats.n_stored == 0 or reason == "head_reads_padding"  # of the row without padding
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "change",
    [
        lambda layers: layers.__setitem__(3, build(BARE["bert"], seed=8).encoder.layer[3]),
        lambda layers: layers.extend([layers.pop(2), layers.pop(2)][::-1]),
        lambda layers: layers.pop(3),
        lambda layers: layers[2].__dict__.pop("forward", None),
    ],
    ids=["replaced", "swapped", "deleted", "forward lost"],
)
@BOTH
def test_layers_that_are_no_longer_those_that_were_wrapped(change: Any, settings: dict[str, Any]) -> None:
    cache, alone = wrapped("bert", tau=-1.0, **settings), build(CLASSIFIERS["bert"])
    cache(**X)
    for model in (cache.model, alone):
        change(model.bert.encoder.layer)
    assert torch.equal(cache(**X).logits, run(alone, **X))
    assert cache.stats().bypassed == {"other_layers": 2}
    assert not any("forward" in vars(module) for module in cache.unwrap().modules())


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
@BOTH
def test_a_layer_whose_forward_goes_past_ours(family: str, number: int, settings: dict[str, Any]) -> None:
    """Undetectable in advance: rows skip layers, and the stored state is never inserted."""
    cache, alone = wrapped(BARE[family], tau=-1.0, **settings), build(BARE[family])
    cache(**X)
    layer = (cache.model.encoder.layer if family == "bert" else cache.model.h)[number]
    original = layer.forward.original
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs)
    for _ in range(2):
        output = cache(**X)
        assert_close(states(output), run(alone, **X), X["attention_mask"])
        assert family == "bert" or {one.get_seq_length() for one in output.past_key_values.layers} == {6}
    assert cache.stats().bypassed == {"other_layers": 4}


def edit(model: Any) -> None:
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.weight.mul_(2)


def fail(cache: LLMCache) -> None:
    raise RuntimeError("of the model")


@pytest.mark.parametrize(
    ("act", "bypassed"),
    [
        (lambda cache: edit(cache.model), {"weights_changed": 2}),
        (lambda cache: cache.purge(namespace="default"), {}),
        (fail, {}),
    ],
    ids=["weights are edited", "purged", "the model raises"],
)
def test_nothing_is_stored_of_a_call_in_which(act: Any, bypassed: dict[str, int], monkeypatch: Patch) -> None:
    within = Within(monkeypatch, "bert.encoder")
    cache = wrapped("bert", tau=-1.0)
    within.do = lambda: act(cache)
    with pytest.raises(RuntimeError, match="of the model") if act is fail else nullcontext():
        cache(**X)
    assert (cache.stats().n_stored, cache.stats().bypassed) == (0, bypassed)
    cache(**X)
    assert served(cache) == [False, False]


@BOTH
def test_only_if_cached_answers_hits_and_raises_for_the_rest(settings: dict[str, Any]) -> None:
    cache = wrapped("bert", tau=0.9999, **settings)
    with cache.only_if_cached(), pytest.raises(NotCachedError) as raised:
        cache(**X)
    assert raised.value.rows == (0, 1) and cache.stats().n_requests == 0
    expected = cache(**X).logits
    with cache.only_if_cached():
        assert_close(cache(**X).logits, expected)
        with pytest.raises(NotCachedError) as raised:
            cache(input_ids=torch.cat([X["input_ids"], tokens(1, 6, seed=9)])[:, :6])
        assert raised.value.rows is not None and 2 in raised.value.rows
        with pytest.raises(NotCachedError):
            cache(**X, output_attentions=True)
    assert cache.stats().n_requests == 4


def test_a_call_within_a_call_is_its_own(monkeypatch: Patch) -> None:
    within = Within(monkeypatch, "bert.embeddings")
    cache, inner = wrapped("bert", tau=0.9999), list[Tensor]()
    for hits in (0, 3):
        within.do = lambda: inner.append(cache(input_ids=IDS).logits)
        assert_close(cache(**X).logits, plain(cache, **X))
        assert_close(inner[-1], plain(cache, input_ids=IDS))
        assert cache.stats().n_hits == hits
    assert len(inner) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fingerprint", ["mean", {"name": "mean", "per_layer": True}, "minhash", "attention"], ids=str)
def test_repeats_are_found_on_a_model_in_half_precision(fingerprint: Any, dtype: torch.dtype) -> None:
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]).to(dtype), tau=0.99, fingerprint=fingerprint)
    first = cache(**X).logits
    assert torch.allclose(cache(**X).logits.float(), first.float(), atol=0.05)
    assert served(cache) == [True, True] and cache.stats().errors == 0


def test_states_that_are_not_finite_have_no_fingerprint() -> None:
    cache = wrapped("bert", tau=-1.0)
    with torch.no_grad():
        cache.model.bert.embeddings.word_embeddings.weight[7] = torch.inf
    ids = torch.cat([IDS, IDS])
    ids[1, 2] = 7
    for _ in range(2):
        cache(input_ids=ids)
    assert (cache.stats().n_hits, cache.stats().bypassed) == (1, {"not_finite": 2})


# -- failures within ---------------------------------------------------------------------------------------------------


def breaking(registry: Any, name: str, method: str) -> type:
    """A component whose method raises while `is_broken`."""

    def fail(self: Any, *args: Any) -> Any:
        if made.is_broken:
            raise MemoryError(f"{method} is broken")
        return getattr(registry[name], method)(self, *args)

    made: Any = type("Broken", (registry[name],), {method: fail, "is_broken": False})
    return made


REGISTRIES: dict[str, Any] = {"index": INDEXES, "policy": POLICIES, "fingerprint": FINGERPRINTS}
PARTS = [
    *(("index", "flat", method) for method in ("add", "search", "remove")),
    *(("policy", "lru", method) for method in ("on_put", "on_hit", "on_remove", "victim", "expired")),
    *(("fingerprint", "mean", method) for method in ("features", "project")),
]


@pytest.mark.parametrize(("setting", "name", "method"), PARTS)
def test_a_part_that_breaks_costs_speed_only(setting: str, name: str, method: str) -> None:
    broken: Any = breaking(REGISTRIES[setting], name, method)
    REGISTRIES[setting]["breaks"] = broken
    try:
        cache = wrapped("bert", tau=0.9999, max_entries=4, **{setting: "breaks"})
        asked = [padded([6, 4], seed=seed) for seed in range(0, 8, 2)]
        for inputs in asked:
            cache(**inputs)
        broken.is_broken = True
        for inputs in (*asked, asked[-1], *asked):
            assert_close(cache(**inputs).logits, plain(cache, **inputs))
        assert cache.stats().errors > 0
        broken.is_broken = False
        for inputs in (*asked, asked[-1]):
            assert_close(cache(**inputs).logits, plain(cache, **inputs))
        errors = cache.stats().errors
        with cache.disabled():
            pass
        cache(**asked[-1])
        assert served(cache) == [True, True] and cache.stats().errors == errors
        assert max(cache.stats().n_entries.values()) <= 4
    finally:
        del REGISTRIES[setting]["breaks"]
