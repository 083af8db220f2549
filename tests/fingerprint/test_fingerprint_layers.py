"""Fingerprints that need a layer to have run: prefix attention, and the states that enter each layer."""

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from llmcache import ConfigError, LLMCache
from llmcache.fingerprint import AttentionMean, View
from llmcache.models.adapters import ADAPTERS, first_attention, locate, unpack
from tests import inside
from tests.tiny_models import BARE, CLASSIFIERS, STRANGERS, TOKEN_HEADS, build, padded, states, tokens

SPECIAL = SimpleNamespace(all_special_ids=[0, 7])
WITH_ATTENTION = {**BARE, **{name: STRANGERS[name] for name in ("qwen3", "modernbert")}}


def bert(**settings: Any) -> LLMCache:
    return LLMCache.wrap(build(CLASSIFIERS["bert"]), **settings)


def seen_by_first_attention(model: nn.Module, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What enters layer 0 and what its self-attention makes of it, (B, T, D) each, by hooks of the test's own."""
    trunk = locate(model)
    seen: list[Tensor] = []
    handles = [
        trunk.layers[0].register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((args or tuple(kwargs.values()))[0].clone()), with_kwargs=True
        ),
        first_attention(trunk).register_forward_hook(lambda module, args, output: seen.append(unpack(output).clone())),
    ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    hidden, attended = seen
    return hidden, attended


def with_special_tokens(left: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Padded rows with a special token in the middle of each, and which tokens carry content (B, T)."""
    inputs = padded([9, 6], left=left)
    inputs["input_ids"][:, 4] = 7
    return inputs, inputs["attention_mask"].bool() & (inputs["input_ids"] != 7)


def mean_over(hidden: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([row[valid.bool()].mean(0) for row, valid in zip(hidden, mask, strict=True)])


@pytest.mark.parametrize("weight", [0.2, 0.5, 1.0])
def test_its_cosine_is_the_weighted_cosine_of_the_halves(weight: float) -> None:
    content = torch.ones(2, 4, dtype=torch.bool)
    view = View(torch.randn(2, 4, 8), content, torch.zeros(2, 4, dtype=torch.int64), 100 * torch.randn(2, 4, 8))
    fingerprint = AttentionMean(weight=weight)
    a, b = fingerprint.project(fingerprint.features(view).numpy())
    attended, embedded = (normalize(x.mean(1)) for x in (view.attention, view.hidden))
    expected = weight * attended[0] @ attended[1] + (1 - weight) * embedded[0] @ embedded[1]
    assert a @ b == pytest.approx(float(expected), abs=1e-5)
    for wrong in (0.0, 1 + weight, float("nan")):
        with pytest.raises(ConfigError, match="weight="):
            bert(tau=0.9, fingerprint={"name": "attention", "weight": wrong})


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_ATTENTION)
def test_every_family_shows_its_first_attention(family: str) -> None:
    """Two requests are as alike as the means of what layer 0 receives and of what its self-attention makes of it."""
    model = build(WITH_ATTENTION[family])
    inputs = padded([8, 8], seed=3)
    hidden, attended = seen_by_first_attention(model, **inputs)
    halves = [normalize(mean_over(x, inputs["attention_mask"])) for x in (hidden, attended)]
    expected = 0.5 * sum(float(half[0] @ half[1]) for half in halves)
    one, two = ({name: value[i : i + 1] for name, value in inputs.items()} for i in (0, 1))
    with LLMCache.wrap(model, tau=-1.0, exact=False, fingerprint="attention") as cache:
        answer = states(cache(**one))
        torch.testing.assert_close(states(cache(**two)), answer)
        assert cache.stats().errors == 0
        (outcome,) = cache.last
    assert outcome.rung == "semantic"
    assert outcome.similarity == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_ATTENTION)
@pytest.mark.parametrize("layer", [0, 1, -1])
def test_layer_0_runs_once_for_all_rows_and_is_never_counted_as_skipped(family: str, layer: int) -> None:
    model = build(WITH_ATTENTION[family])
    trunk = locate(model)
    inputs = padded([9, 4, 7])
    where = inputs["attention_mask"].bool()
    with torch.inference_mode():
        plain = states(model(**inputs))
    n_runs: list[int] = []
    first_attention(trunk).register_forward_hook(lambda module, args, output: n_runs.append(len(unpack(output))))
    settings = {"tau": 0.9999, "fingerprint": "attention", "layers": [layer], "payload": "sequence"}
    with LLMCache.wrap(model, **settings) as cache:
        assert torch.equal(states(cache(**inputs)), plain)
        cache(**{name: value[1:2] for name, value in inputs.items()})
        cache(**{name: torch.cat([value[:2], value[2:] + (name == "input_ids")]) for name, value in inputs.items()})
        warm = states(cache(**inputs))
        torch.testing.assert_close(warm[where], plain[where], atol=1e-5, rtol=1e-5)
        stats = cache.stats()
    assert n_runs == [3, 1, 3, 3]
    assert stats.hits == {"exact": 1 + 2 + 3}
    assert stats.n_layers_skipped == (1 + 2 + 3) * (layer % trunk.depth)
    assert stats.errors == 0


@pytest.mark.parametrize("mode", ["semantic", "paper"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("static", [False, True])
def test_layer_0_writes_kv_once_and_a_hit_gets_the_stored_one(mode: str, family: str, static: bool) -> None:
    from transformers import DynamicCache, StaticCache

    model = build(BARE[family])
    one, two = tokens(1, 6, seed=1), tokens(1, 6, seed=2)
    with torch.inference_mode():
        plain = model(input_ids=one, use_cache=True).past_key_values
    make = (lambda: StaticCache(config=model.config, max_cache_len=9)) if static else DynamicCache
    settings = {"fingerprint": "attention", "layers": "all", "payload": "sequence", "allow_unsafe": True}
    with LLMCache.wrap(model, tau=-1.0, mode=mode, **settings) as cache:
        cache(input_ids=one, past_key_values=make(), use_cache=True)
        kv = cache(input_ids=torch.cat([two, one]), past_key_values=make(), use_cache=True).past_key_values
        assert cache.stats().n_hits == 2
    assert [int(layer.get_seq_length()) for layer in kv.layers] == [6] * 4
    for ours, theirs in zip(kv.layers, plain.layers, strict=True):
        for row in (0, 1):  # the hit has the K/V of the request it was served from, in layer 0 as in all others
            torch.testing.assert_close(ours.keys[row, :, :6], theirs.keys[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.values[row, :, :6], theirs.values[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["semantic", "paper"])
def test_refused_rows_pass_through(mode: str) -> None:
    model = build(CLASSIFIERS["bert"])
    inputs = padded([6, 1, 4])
    inputs["input_ids"][1, 0] = 0
    with torch.inference_mode():
        plain = model(**inputs).logits
    with LLMCache.wrap(model, tau=0.9999, mode=mode, fingerprint="attention") as cache:
        for _ in range(2):
            torch.testing.assert_close(cache(**inputs).logits, plain, atol=1e-5, rtol=1e-5)
        assert cache.stats().bypassed == {"no_content": 2}
        assert cache.stats().n_hits == 2


def test_a_fingerprint_that_fails_after_layer_0_ran_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 0 has written its K/V by then: run again, it would write them twice."""
    model = build(TOKEN_HEADS["causal"])
    inputs = {"input_ids": tokens(2, 6)}
    with torch.inference_mode():
        plain = model(**inputs, use_cache=True)
    cache = LLMCache.wrap(model, tau=0.9, allow_unsafe=True, fingerprint="attention")
    monkeypatch.setattr(inside.fingerprint(cache), "features", lambda view: 1 / 0)
    output = cache(**inputs, use_cache=True)
    assert torch.equal(output.logits, plain.logits)
    assert [layer.get_seq_length() for layer in output.past_key_values.layers] == [6] * 4
    assert (cache.stats().errors, cache.stats().bypassed) == (1, {"error": 2})


@pytest.mark.parametrize("family", ["megatron", "convbert"])
def test_a_family_whose_attention_is_not_known_is_refused_with_the_fix(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(STRANGERS[family])
    with pytest.raises(ConfigError, match=r"self-attention is not known; register an adapter.*attention="):
        LLMCache.wrap(model, tau=0.9, fingerprint="attention")
    LLMCache.wrap(model, tau=0.9).unwrap()
    monkeypatch.setitem(ADAPTERS, "bert", replace(ADAPTERS["bert"], attention="attention.myself"))
    with pytest.raises(ConfigError, match=r"no self-attention at 'attention\.myself'.*register an adapter"):
        bert(tau=0.9, fingerprint="attention")


def test_the_hook_leaves_nothing_behind_and_copies_do_without_it() -> None:
    model = build(CLASSIFIERS["bert"])
    attention = first_attention(locate(model))
    before = dict(attention._forward_hooks)
    cache = LLMCache.wrap(model, tau=0.9, fingerprint="attention")
    assert len(attention._forward_hooks) == len(before) + 1
    twin = copy.deepcopy(model)
    with torch.inference_mode():
        assert torch.equal(twin(**padded([5])).logits, model(**padded([5])).logits)
    assert cache.stats().n_requests == 1
    cache.unwrap()
    assert dict(attention._forward_hooks) == before


def test_threads_see_their_own_attention() -> None:
    """One hook serves all threads: what one of them captures must not become another's fingerprint."""
    cache = bert(tau=0.99999, exact=False, fingerprint="attention", index="flat")
    requests = [tokens(1, 6, seed=seed) for seed in range(8)]
    keys = []
    for ids in requests:
        cache(input_ids=ids)
        keys.append(cache.last[0].key)
    barrier = threading.Barrier(len(requests))

    def work(number: int) -> list[str | None]:
        barrier.wait()
        sources = []
        for _ in range(10):
            cache(input_ids=requests[number])
            sources.append(cache.last[0].source)
        return sources

    with ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(work, range(8))) == [[key] * 10 for key in keys]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", ["distilbert", "gpt2", "llama"])
def test_states_are_averaged_over_content_tokens(family: str, left: bool) -> None:
    """Both halves of what serves all layers, and those that enter each layer."""
    model = build(BARE[family])
    inputs, content = with_special_tokens(left)
    hidden, attended = (normalize(mean_over(x, content)) for x in seen_by_first_attention(model, **inputs))
    with torch.no_grad():
        entering = model(**inputs, output_hidden_states=True).hidden_states[:4]
    halves = {None: torch.cat([attended, hidden], dim=1) * 0.5**0.5}
    means = {layer: normalize(mean_over(states, content)) for layer, states in enumerate(entering)}
    each_layer = {"mode": "paper", "fingerprint_per_layer": True}
    for settings, expected in (({"fingerprint": "attention"}, halves), (each_layer, means)):
        with LLMCache.wrap(model, tau=0.9999, tokenizer=SPECIAL, allow_unsafe=True, **settings) as cache:
            cache(**inputs)
            records = inside.records(cache)
        for layer, vectors in expected.items():
            found = [slot.vector for record in records for slot in record.slots if slot.layer == layer]
            torch.testing.assert_close(torch.from_numpy(np.stack(found)), vectors, atol=1e-5, rtol=1e-5)


# -- the states that enter each layer ----------------------------------------------------------------------------------


def per_layer(**settings: Any) -> LLMCache:
    return bert(mode="paper", fingerprint_per_layer=True, **{"payload": "sequence", "layers": "all", **settings})


def entering(model: nn.Module, ids: Tensor) -> Iterator[Tensor]:
    """Mean of the states (B, T, D) that enter each layer of the plain model, L2 norm 1, (D,)."""
    with torch.no_grad():
        hidden = model.bert(input_ids=ids, output_hidden_states=True).hidden_states
    return (normalize(states.mean(1), dim=1)[0] for states in hidden[:-1])


def test_a_layer_goes_by_what_enters_it_and_not_by_the_embeddings() -> None:
    """A threshold between two requests' similarity at layer 0 and that at another layer parts the two settings."""
    model = build(CLASSIFIERS["bert"])
    one, two = tokens(1, 6, seed=1), tokens(1, 6, seed=2)
    alike = [float(a @ b) for a, b in zip(entering(model, one), entering(model, two), strict=True)]
    layer = min(range(1, 4), key=alike.__getitem__)
    assert alike[layer] < alike[0] - 0.005
    tau = (alike[layer] + alike[0]) / 2
    for is_per_layer in (True, False):
        settings = {"mode": "paper", "fingerprint_per_layer": is_per_layer, "index": "flat"}
        with LLMCache.wrap(model, tau=tau, layers=[layer], **settings) as cache:
            cache(input_ids=one)
            cache(input_ids=two)
            assert cache.last[0].rung == (None if is_per_layer else "paper")
            assert cache.last[0].similarity == pytest.approx(alike[layer if is_per_layer else 0], abs=1e-5)


def test_above_a_reused_layer_the_search_goes_by_the_reused_states() -> None:
    """Algorithm 1: h_{l-1} is whatever came out below. So above a hit the source is found again, at similarity 1."""
    cache = per_layer(tau={0: -1.0, 1: 0.9999, 2: 0.9999, 3: 0.9999})
    one, two = tokens(1, 6, seed=1), tokens(1, 6, seed=2)
    answer = cache(input_ids=one).logits
    source = cache.last[0].key
    torch.testing.assert_close(cache(input_ids=two).logits, answer)
    (outcome,) = cache.last
    assert (outcome.layer, outcome.source) == (3, source)
    assert outcome.similarity == pytest.approx(1.0, abs=1e-5)
    assert cache.stats().n_layers_skipped == 4


def test_a_request_stored_again_on_other_states_is_found_under_those() -> None:
    """Its entry of a layer is overwritten, so the vector must go with it."""
    cache = per_layer(tau={0: 1.0, 1: 1.0}, layers=[0, 1], index="flat")
    banks = inside.banks(cache)
    one, two = tokens(1, 6, seed=1), tokens(1, 6, seed=2)
    cache(input_ids=one)
    cache(input_ids=two)
    first, second = (record.slots[1].vector for record in banks.records())
    rung = inside.rungs(cache)[0]
    rung._tau = {0: -1.0, 1: 1.1}  # from now on any request takes the first one's layer 0, and computes layer 1
    key = banks.records()[0].key
    banks.layer_banks[0].remove(banks.records()[1].key)
    banks._let_go(0, banks.records()[1].key)
    cache(input_ids=two)
    assert cache.last[0].source == key
    again = next(record for record in banks.records() if record.key == cache.last[0].key)
    (vector,) = (place.vector for place in again.slots if place.layer == 1)
    assert abs(vector - first).max() < 1e-5 < abs(vector - second).max()


def test_a_fingerprint_that_fails_at_a_layer_leaves_it_to_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = per_layer(tau=-1.0)
    cache(input_ids=tokens(1, 6, seed=1))
    fine, fingerprint, n_calls = inside.fingerprint(cache).features, inside.fingerprint(cache), []

    def features(view: View) -> Tensor:
        n_calls.append(1)
        return fine(view) if len(n_calls) == 1 else 1 / 0

    monkeypatch.setattr(fingerprint, "features", features)
    cache(input_ids=tokens(1, 6, seed=2))
    assert (cache.last[0].layer, cache.stats().errors) == (0, 3)
    monkeypatch.undo()
    cache(input_ids=tokens(1, 6, seed=3))
    assert (cache.last[0].layer, cache.stats().errors) == (3, 3)


@pytest.mark.parametrize("fingerprint", ["minhash", "attention", "pca"])
def test_per_layer_needs_the_papers_mode_and_a_fingerprint_of_any_layers_states(fingerprint: str) -> None:
    with pytest.raises(ConfigError, match=f"fingerprint_per_layer=True.*{fingerprint!r}.*mean, simhash"):
        per_layer(tau=0.9, fingerprint=fingerprint)
    with pytest.raises(ConfigError, match=r"fingerprint_per_layer=True.*'semantic'.*mode='paper'"):
        bert(tau=0.9, fingerprint_per_layer=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"fingerprint": "minhash", "tau": 0.01},
        {"fingerprint": "attention", "tau": -1.0},
        {"mode": "paper", "fingerprint": "mean", "fingerprint_per_layer": True, "tau": {1: 1.0, 3: -1.0}},
        {"mode": "paper", "fingerprint": "simhash", "fingerprint_per_layer": True, "tau": {1: 1.0, 3: -1.0}},
    ],
    ids=lambda settings: settings["fingerprint"],
)
def test_similarities_survive_a_restart(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Found by others after a restart as before it, at the same similarity, layer by layer where that is asked for."""
    ids = tokens(3, 8, seed=1)
    other = ids.clone()
    other[:, -1] = 9
    with bert(payload="sequence", layers=[1, 3], **settings) as cache:
        cache(input_ids=ids)
        cache.save(tmp_path)
        cache(input_ids=other)
        before = cache.last
    assert {outcome.rung for outcome in before} == {settings.get("mode", "semantic")}
    with LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path) as again:
        again(input_ids=other)
        assert again.last == before
