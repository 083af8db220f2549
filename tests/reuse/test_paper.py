"""The paper's rung and the semantic one: where they agree, where they differ, and whose answer a hit returns."""

from typing import Any

import pytest
import torch
from torch import nn

from llmcache import LLMCache
from tests import inside
from tests.tiny_models import BARE, CLASSIFIERS, TOKEN_HEADS, build, tokens


def bert() -> nn.Module:
    return build(CLASSIFIERS["bert"])


def both(**settings: Any) -> tuple[LLMCache, LLMCache]:
    """The paper's way and ours, each on its own equal model, with the same payload and layers."""
    common = {"payload": "sequence", "layers": "all", **settings}
    return LLMCache.wrap(bert(), mode="paper", **common), LLMCache.wrap(bert(), exact=False, **common)


def entry_of(cache: LLMCache) -> list[int]:
    return list(cache.stats().n_entries.values())


@pytest.mark.parametrize("tau", [-1.0, 0.2, 0.5, 0.9])
def test_they_agree_where_every_search_finds_the_same_entry(tau: float) -> None:
    paper, semantic = both(tau=tau)
    for seed in range(12):
        ids = tokens(1 + seed % 3, 6, seed=seed % 8)
        torch.testing.assert_close(paper(input_ids=ids).logits, semantic(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    assert paper.stats().n_hits == semantic.stats().n_hits > 0
    assert paper.stats().n_misses == semantic.stats().n_misses


def test_they_agree_on_one_layer() -> None:
    paper, semantic = both(tau=0.3, layers=[2])
    for seed in range(8):
        ids = tokens(2, 6, seed=seed % 5)
        torch.testing.assert_close(paper(input_ids=ids).logits, semantic(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    assert paper.stats().n_hits == semantic.stats().n_hits > 0
    assert set(paper.stats().hits_by_layer) == {2}


def test_they_differ_when_a_higher_bank_holds_only_another_neighbour() -> None:
    """After uneven eviction: the best neighbour is left in bank 0 only, a worse one above tau in bank 3.

    The semantic rung takes the best neighbour at the deepest layer that still holds it (0) and computes above. The
    paper's rung searches layer 3 by itself, finds the worse neighbour there and returns that one's answer.
    """
    best, worse = tokens(1, 6, seed=1), tokens(1, 6, seed=2)
    asked = best.clone()
    asked[0, 5] = 7
    answers = []
    for cache in both(tau=-1.0):
        with cache.disabled():
            first, second = cache(input_ids=best).logits, cache(input_ids=worse).logits
        store(cache, best)
        store(cache, worse)
        for layer in (1, 2, 3):
            evict_first(cache, layer)
        assert entry_of(cache) == [2, 1, 1, 1]
        answers.append((cache(input_ids=asked).logits, first, second))
    (paper, _, other), (semantic, own, _) = answers
    torch.testing.assert_close(paper, other)  # the worse neighbour's answer
    torch.testing.assert_close(semantic, own)  # the best neighbour's, computed above its layer 0
    assert not torch.allclose(paper, semantic)


def store(cache: LLMCache, ids: torch.Tensor) -> None:
    """Put a request in all banks, although another one would be similar enough."""
    parts = inside.components(cache)
    rungs, parts.rungs = parts.rungs, []
    try:
        cache(input_ids=ids)
    finally:
        parts.rungs = rungs


def evict_first(cache: LLMCache, layer: int) -> None:
    """What a full bank does to its oldest entry."""
    banks = inside.banks(cache)
    bank = banks.layer_banks[layer]
    key = bank.keys()[0]
    bank.remove(key)
    banks._let_go(layer, key)


def test_they_differ_when_tau_by_layer_admits_an_upper_layer_only_by_its_own_search() -> None:
    """With a strict tau on top and a loose one below, both stop at the loose layer and compute above it."""
    paper, semantic = both(tau={0: -1.0, 3: 0.9999})
    one, two = tokens(1, 6, seed=1), tokens(1, 6, seed=2)
    for cache in (paper, semantic):
        cache(input_ids=one)
        cache(input_ids=two)
        assert cache.stats().hits_by_layer == {0: 1}
    # The paper stores what it computes on top of another request's layer 0 as the new request's own layers, so from
    # the second time on the top layer is found there; the semantic rung stores nothing on top of foreign states.
    paper(input_ids=two)
    semantic(input_ids=two)
    assert paper.stats().hits_by_layer == {0: 1, 3: 1}
    assert semantic.stats().hits_by_layer == {0: 2}
    assert entry_of(paper)[-1] == 2
    assert entry_of(semantic)[-1] == 1


def test_layers_skipped_are_counted_one_by_one() -> None:
    paper, semantic = both(tau=0.99)
    for cache in (paper, semantic):
        cache(input_ids=tokens(2, 6))
        cache(input_ids=tokens(2, 6))
    assert semantic.stats().n_layers_skipped == 2 * 4
    assert paper.stats().n_layers_skipped == 2 * 4


@pytest.mark.parametrize("payload", ["cls", "sequence"])
@pytest.mark.parametrize("mode", ["semantic", "paper"])
def test_a_hit_returns_the_earlier_requests_answer(payload: str, mode: str) -> None:
    """DESIGN 1.1: once a layer's whole output is reused, the logits are those of the earlier request."""
    model = bert()
    cache = LLMCache.wrap(model, tau=-1.0, payload=payload, mode=mode)
    earlier = cache(input_ids=tokens(1, 6, seed=1)).logits
    later = cache(input_ids=tokens(1, 6, seed=2)).logits
    assert torch.equal(later, earlier)
    with cache.disabled():
        assert not torch.allclose(cache(input_ids=tokens(1, 6, seed=2)).logits, earlier)


@pytest.mark.parametrize("layer", range(4))
def test_a_hit_at_a_lower_layer_computes_above(layer: int) -> None:
    model = bert()
    ran: list[int] = []
    for number, module in enumerate(model.bert.encoder.layer):
        module.attention.register_forward_hook(lambda *_, number=number: ran.append(number))
    cache = LLMCache.wrap(model, tau=-1.0, payload="sequence", layers=[layer])
    earlier = cache(input_ids=tokens(1, 6, seed=1)).logits
    ran.clear()
    later = cache(input_ids=tokens(1, 6, seed=2)).logits
    assert ran == list(range(layer + 1, 4))
    torch.testing.assert_close(later, earlier)
    assert cache.stats().n_layers_skipped == layer + 1


def test_lengths_are_kept_apart_where_every_token_is_kept() -> None:
    for mode in ("semantic", "paper"):
        cache = LLMCache.wrap(bert(), tau=-1.0, payload="sequence", mode=mode)
        cache(input_ids=tokens(1, 6, seed=1))
        cache(input_ids=tokens(1, 5, seed=1))
        assert cache.stats().n_hits == 0
    cache = LLMCache.wrap(bert(), tau=-1.0)  # one vector fits any length
    cache(input_ids=tokens(1, 6, seed=1))
    cache(input_ids=tokens(1, 5, seed=1))
    assert cache.stats().n_hits == 1


def test_exact_goes_before_semantic() -> None:
    cache = LLMCache.wrap(bert(), tau=-1.0)
    cache(input_ids=tokens(1, 6, seed=1))
    cache(input_ids=tokens(1, 6, seed=1))
    cache(input_ids=tokens(1, 6, seed=2))
    assert cache.stats().hits == {"exact": 1, "semantic": 1}


def test_what_rests_on_another_request_is_never_served_as_exact() -> None:
    model = build(BARE["bert"])
    one, two = tokens(1, 6, seed=1), tokens(1, 6, seed=2)
    with torch.inference_mode():
        plain = model(input_ids=two).last_hidden_state
    cache = LLMCache.wrap(model, tau={0: -1.0}, layers=[0, 3])
    cache(input_ids=one)
    cache(input_ids=two)  # computed on top of the first one's layer 0
    assert cache.stats().hits == {"semantic": 1}
    inside.replace(cache, rungs=inside.rungs(cache)[:1])
    torch.testing.assert_close(cache(input_ids=two).last_hidden_state, plain)


@pytest.mark.parametrize("tau", [0.0, 0.4, 0.8, 0.99])
def test_tau_decides_as_a_search_by_hand_does(tau: float) -> None:
    model = bert()
    cache = LLMCache.wrap(model, tau=tau, index="flat")
    seen: list[torch.Tensor] = []
    with torch.no_grad():
        for seed in range(10):
            ids = tokens(1, 4, seed=seed)
            vector = nn.functional.normalize(model.bert.embeddings(ids).mean(1), dim=1)[0]
            best = max((float(vector @ other) for other in seen), default=-2.0)
            before = cache.stats().n_hits
            cache(input_ids=ids)
            assert (cache.stats().n_hits > before) == (best >= tau)
            if best < tau:
                seen.append(vector)


@pytest.mark.parametrize("mode", ["semantic", "paper"])
def test_kv_of_a_hit_is_whole(mode: str) -> None:
    model = build(TOKEN_HEADS["causal"])
    cache = LLMCache.wrap(model, tau=-1.0, allow_unsafe=True, mode=mode, layers="all")
    cache(input_ids=tokens(1, 6, seed=1), use_cache=True)
    output = cache(input_ids=tokens(2, 6, seed=2), use_cache=True)
    assert [layer.get_seq_length() for layer in output.past_key_values.layers] == [6] * 4
    assert cache.stats().n_hits == 2
