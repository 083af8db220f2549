"""The paper's rung and the semantic one: where they agree, where they differ, and whose answer a hit returns."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from tests import inside
from tests.tiny_models import CLASSIFIERS, TOKEN_HEADS, build, tokens

ONE, TWO = tokens(1, 6, seed=1), tokens(1, 6, seed=2)

in_both_modes = pytest.mark.parametrize("mode", ["semantic", "paper"])


def bert(**settings: Any) -> LLMCache:
    return LLMCache.wrap(build(CLASSIFIERS["bert"]), **settings)


def both(**settings: Any) -> tuple[LLMCache, LLMCache]:
    """The paper's way and ours, each on its own equal model, with the same payload and layers."""
    common = {"payload": "sequence", "layers": "all", **settings}
    return bert(mode="paper", **common), bert(exact=False, **common)


def logits(cache: LLMCache, *prompts: Tensor) -> Tensor:
    """Of the last of them."""
    for ids in prompts:
        found: Tensor = cache(input_ids=ids).logits
    return found


def n_entries(cache: LLMCache) -> list[int]:
    return list(cache.stats().n_entries.values())


@pytest.mark.slow
@pytest.mark.parametrize(("tau", "layers", "top"), [*((tau, "all", 3) for tau in (-1.0, 0.2, 0.5, 0.9)), (0.3, [2], 2)])
def test_they_agree_where_every_search_finds_the_same_entry(tau: float, layers: Any, top: int) -> None:
    caches = paper, semantic = both(tau=tau, layers=layers)
    for seed in range(12):
        ids = tokens(1 + seed % 3, 6, seed=seed % 8)
        torch.testing.assert_close(*(logits(cache, ids) for cache in caches), atol=1e-5, rtol=1e-5)
    assert paper.stats().n_hits == semantic.stats().n_hits > 0
    assert paper.stats().n_misses == semantic.stats().n_misses
    assert paper.stats().hits_by_layer == semantic.stats().hits_by_layer == {top: paper.stats().n_hits}
    assert semantic.stats().n_layers_skipped == (top + 1) * semantic.stats().n_hits
    assert paper.stats().n_layers_skipped == (4 if layers == "all" else 1) * paper.stats().n_hits


def test_they_differ_when_a_higher_bank_holds_only_another_neighbour() -> None:
    """After uneven eviction: the best neighbour is left in bank 0 only, a worse one above tau in bank 3.

    The semantic rung takes the best neighbour at the deepest layer that still holds it (0) and computes above. The
    paper's rung searches layer 3 by itself, finds the worse neighbour there and returns that one's answer.
    """
    asked = ONE.clone()
    asked[0, 5] = 7
    paper, semantic = caches = both(tau=-1.0)
    with paper.disabled():
        best, worse = logits(paper, ONE), logits(paper, TWO)
    for cache in caches:
        store(cache, ONE, TWO)
        for layer in (1, 2, 3):
            evict_first(cache, layer)
        assert n_entries(cache) == [2, 1, 1, 1]
    torch.testing.assert_close(logits(paper, asked), worse)
    torch.testing.assert_close(logits(semantic, asked), best)  # computed above its layer 0
    assert not torch.allclose(best, worse)


def store(cache: LLMCache, *prompts: Tensor) -> None:
    """Put requests in all banks, although another one would be similar enough."""
    rungs = inside.rungs(cache)
    inside.replace(cache, rungs=[])
    logits(cache, *prompts)
    inside.replace(cache, rungs=rungs)


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
    for cache in (paper, semantic):
        logits(cache, ONE, TWO)
        assert cache.stats().hits_by_layer == {0: 1}
        logits(cache, TWO)
    # The paper stores what it computes on top of another request's layer 0 as the new request's own layers, so from
    # the second time on the top layer is found there; the semantic rung stores nothing on top of foreign states.
    assert (paper.stats().hits_by_layer, n_entries(paper)[-1]) == ({0: 1, 3: 1}, 2)
    assert (semantic.stats().hits_by_layer, n_entries(semantic)[-1]) == ({0: 2}, 1)


@pytest.mark.parametrize("payload", ["cls", "sequence"])
@in_both_modes
def test_a_hit_returns_the_earlier_requests_answer(payload: str, mode: str) -> None:
    """DESIGN 1.1: once a layer's whole output is reused, the logits are those of the earlier request."""
    cache = bert(tau=-1.0, payload=payload, mode=mode)
    earlier = logits(cache, ONE)
    assert torch.equal(logits(cache, TWO), earlier)
    with cache.disabled():
        assert not torch.allclose(logits(cache, TWO), earlier)


@pytest.mark.parametrize("layer", range(4))
def test_a_hit_at_a_lower_layer_computes_above(layer: int) -> None:
    cache = bert(tau=-1.0, payload="sequence", layers=[layer])
    ran: list[int] = []
    for number, module in enumerate(cache.model.bert.encoder.layer):
        module.attention.register_forward_hook(lambda *_, number=number: ran.append(number))
    earlier = logits(cache, ONE)
    ran.clear()
    torch.testing.assert_close(logits(cache, TWO), earlier)
    assert ran == list(range(layer + 1, 4))
    assert cache.stats().n_layers_skipped == layer + 1


@pytest.mark.parametrize(
    ("settings", "n_hits"),
    [({"payload": "sequence", "mode": "semantic"}, 0), ({"payload": "sequence", "mode": "paper"}, 0), ({}, 1)],
)
def test_lengths_are_kept_apart_unless_one_vector_is_kept(settings: dict[str, Any], n_hits: int) -> None:
    cache = bert(tau=-1.0, **settings)
    logits(cache, ONE, tokens(1, 5, seed=1))
    assert cache.stats().n_hits == n_hits


def test_exact_goes_before_semantic() -> None:
    cache = bert(tau=-1.0)
    logits(cache, ONE, ONE, TWO)
    assert cache.stats().hits == {"exact": 1, "semantic": 1}


def test_what_rests_on_another_request_is_never_served_as_exact() -> None:
    cache = bert(tau={0: -1.0}, layers=[0, 3], payload="sequence")
    with cache.disabled():
        plain = logits(cache, TWO)
    logits(cache, ONE, TWO)  # the second one is computed on top of the first one's layer 0
    assert cache.stats().hits == {"semantic": 1}
    inside.replace(cache, rungs=inside.rungs(cache)[:1])
    torch.testing.assert_close(logits(cache, TWO), plain)


@pytest.mark.parametrize("tau", [0.0, 0.4, 0.8, 0.99])
def test_tau_decides_as_a_search_by_hand_does(tau: float) -> None:
    cache = bert(tau=tau, index="flat")
    seen: list[Tensor] = []
    for seed in range(10):
        ids = tokens(1, 4, seed=seed)
        vector = nn.functional.normalize(cache.model.bert.embeddings(ids).mean(1).detach(), dim=1)[0]
        best = max((float(vector @ other) for other in seen), default=-2.0)
        before = cache.stats().n_hits
        logits(cache, ids)
        assert (cache.stats().n_hits > before) == (best >= tau)
        if best < tau:
            seen.append(vector)


@in_both_modes
def test_kv_of_a_hit_is_whole(mode: str) -> None:
    cache = LLMCache.wrap(build(TOKEN_HEADS["causal"]), tau=-1.0, allow_unsafe=True, mode=mode, layers="all")
    cache(input_ids=ONE, use_cache=True)
    output = cache(input_ids=tokens(2, 6, seed=2), use_cache=True)
    assert [layer.get_seq_length() for layer in output.past_key_values.layers] == [6] * 4
    assert cache.stats().n_hits == 2
