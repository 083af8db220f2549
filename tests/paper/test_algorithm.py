"""`tau` follows Algorithm 1: the same hits, layers and states as a plain implementation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.paper.reference import Reference, assert_close, served, wrapped
from tests.tiny_models import BARE, batch, states, tokens

CASES: dict[str, tuple[str, Any, bool]] = {
    **{f"bert {tau}": ("bert", tau, False) for tau in (0.3, 0.6, 0.95)},
    **{family: (family, 0.5, False) for family in ("roberta", "distilbert", "gpt2", "llama", "t5", "bart", "mpnet")},
    "some layers": ("bert", {0: 0.2, 3: 0.7}, False),
    "per layer": ("distilbert", 0.6, True),
    "per layer, own tau": ("gpt2", {0: 0.4, 1: 0.9, 3: 0.6}, True),
}


def prompts() -> list[Tensor]:
    """Return requests of two lengths, new or with one to three tokens of an earlier one changed."""
    generator, made = torch.Generator().manual_seed(1), list[Tensor]()
    for number in range(24):
        ids = tokens(1, 5 + number % 2, seed=number)[0]
        if number > 3 and number % 3:
            ids = made[int(torch.randint(number, (1,), generator=generator))].clone()
            for _ in range(number % 4):
                ids[int(torch.randint(len(ids), (1,), generator=generator))] = int(tokens(1, 1, seed=number)[0])
        made.append(ids)
    return made


@pytest.mark.parametrize("name", CASES)
def test_requests_one_by_one_go_as_algorithm_1_says(name: str) -> None:
    family, tau, per_layer = CASES[name]
    reference = Reference(family, tau, per_layer)
    cache = wrapped(BARE[family], tau=tau, fingerprint={"name": "mean", "per_layer": per_layer})
    for ids in prompts():
        assert_close(states(cache(input_ids=ids[None]))[0], reference.ask(ids))
    stats = cache.stats()
    hits = {layer: n for layer, n in enumerate(reference.hits) if n}
    assert hits and stats.reuses_by_layer == hits
    assert stats.n_layers_skipped == sum(hits.values())
    assert [stats.n_entries.get(n, 0) for n in range(4)] == [len(bank) for bank in reference.banks]
    assert (stats.errors, stats.bypassed) == (0, {})


@pytest.mark.parametrize(("family", "left"), [("bert", False), ("gpt2", False), ("gpt2", True)])
def test_rows_of_a_padded_batch_are_decided_one_by_one(family: str, left: bool) -> None:
    reference, cache = Reference(family, 0.6), wrapped(BARE[family], tau=0.6)
    asked = prompts()
    for start in range(0, 24, 4):
        rows = asked[start : start + 4]
        inputs = batch([ids[None] for ids in rows], left)
        if left and family == "gpt2":
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        before, new = sum(reference.hits), list[tuple[int, Tensor, Any]]()
        expected = [reference.ask(ids, new) for ids in rows]
        found = states(cache(**inputs))
        for row in range(len(rows)):
            assert_close(found[row][inputs["attention_mask"][row].bool()], expected[row])
        assert (sum(reference.hits) > before) == any(served(cache))
        reference.store(new)
    assert cache.stats().reuses_by_layer == dict(enumerate(reference.hits))


def test_a_row_is_told_how_similar_the_nearest_request_is_whether_it_serves_or_not() -> None:
    cache, seen = wrapped("bert", tau=0.4, layers="last"), list[Tensor]()
    for seed in range(12):
        ids = tokens(1, 4, seed=seed)
        embedded = cache.model.bert.embeddings(ids).mean(1).detach()
        vector = torch.nn.functional.normalize(embedded, dim=1)[0]
        best = max((float(vector @ other) for other in seen), default=-2.0)
        cache(input_ids=ids)
        assert served(cache) == [best >= 0.4]
        assert cache.last[0].similarity == (pytest.approx(best, abs=1e-5) if seen else None)
        if best < 0.4:
            seen.append(vector)


def test_a_repeat_hits_at_a_tau_of_one() -> None:
    cache = wrapped("bert", tau=1.0)
    for seed in range(20):
        cache(input_ids=tokens(1, 7, seed=seed))
    for seed in range(20):
        cache(input_ids=tokens(1, 7, seed=seed))
        assert served(cache) == [True] and cache.last[0].source == cache.last[0].key


def test_max_bytes_is_shared_equally_by_the_banks() -> None:
    row = 6 * 32 * 4
    cache = wrapped("bert", tau=0.999, max_bytes=4 * 3 * row)
    for seed in range(5):
        cache(input_ids=tokens(1, 6, seed=seed))
    stats = cache.stats()
    assert stats.n_entries == dict.fromkeys(range(4), 3) and stats.nbytes == 4 * 3 * row
    assert stats.max_nbytes_by_layer == dict.fromkeys(range(4), 3 * row)
    cache(input_ids=tokens(1, 20))
    assert cache.stats().n_too_large == 4 and cache.stats().errors == 0
