"""Edits of weights and settings before, between and during calls: no stale answer, and nothing is hashed twice."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.errors import BankFileError, StoreError
from llmcache.models import hashing, weights
from tests.calls.helpers import X, wrapped
from tests.contract.judge import ask, check_same
from tests.contract.judge import plain_answer as plain
from tests.tiny_models import BARE, CLASSIFIERS, STRANGE_GENERATORS, build, tokens


def check(cache: LLMCache, n_hits: int, **inputs: Any) -> None:
    """Assert that two calls answer as the model does now, with this number of hits."""
    inputs = inputs or X
    expected, before = plain(cache, **inputs), cache.stats().n_hits
    for _ in range(2):
        check_same(cache(**inputs), expected)
    assert cache.stats().n_hits - before == n_hits


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tensors hashed at a time."""
    counts: list[int] = []

    def counted(tensors: list[Tensor]) -> list[str]:
        counts.append(len(tensors))
        return hashing.digests(tensors)

    monkeypatch.setattr(weights, "digests", counted)
    return counts


# -- edits between calls -----------------------------------------------------------------------------------------------


def test_what_takes_turns_finds_its_own_entries_at_no_cost(hashed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = wrapped(BARE["bert"])
    norm = cache.model.encoder.layer[0].output.LayerNorm
    for norm.eps in (1e-12, 0.5):
        check(cache, n_hits=2)
    hashed.clear()
    monkeypatch.setattr(cache._core.wrapped.weights, "_survey", lambda: pytest.fail("what was seen before is known"))
    for norm.eps in (1e-12, 0.5, 1e-12, 0.5):
        check(cache, n_hits=4)
    assert not hashed


@pytest.mark.parametrize("family", ["bert", "gpt2", "marian"])
def test_calls_in_a_row_look_at_nothing_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = X | ({"decoder_input_ids": tokens(2, 3)} if family == "marian" else {})
    cache = wrapped((CLASSIFIERS | STRANGE_GENERATORS)[family])
    cache(**inputs)  # the first call sees what wrapping changed
    monkeypatch.setattr(cache._core.wrapped.weights, "_refresh", lambda: pytest.fail("nothing was edited"))
    for _ in range(2):
        cache(**inputs)
    assert "weights_changed" not in cache.stats().bypassed and cache.stats().errors == 0


# -- unreadable weights ------------------------------------------------------------------------------------------------


def test_weights_that_cannot_be_read_are_computed_and_never_saved(tmp_path: Path) -> None:
    with wrapped(BARE["bert"]) as cache:
        cache(**X)
        cache.save(tmp_path)
    model = build(BARE["bert"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.encoder.layer[1].output.dense = torch.jit.script(model.encoder.layer[1].output.dense)
    with pytest.raises(BankFileError, match="scripted"):
        LLMCache.load(model, tmp_path)
    cache = LLMCache.wrap(model)
    check(cache, n_hits=0)
    stats = cache.stats()
    assert (stats.bypassed["unseen_weights"], stats.n_stored, stats.errors) == (4, 0, 0)
    with pytest.raises(StoreError, match="scripted"):
        cache.save(tmp_path)


def test_offloaded_weights_are_computed_and_counted() -> None:
    cache = wrapped(BARE["bert"])
    cache(**X)
    expected = plain(cache, **X)
    cpu_offload(cache.model, execution_device=torch.device("cpu"))
    check_same(cache(**X), expected, exact=True)
    stats = cache.stats()
    assert (stats.bypassed["meta_weights"], stats.errors, stats.n_hits) == (2, 0, 0)


# -- edits that no call has seen ---------------------------------------------------------------------------------------


def steady() -> LLMCache:
    """A cache of 70 requests whose weights have been steady for so long that calls are opened without a check."""
    cache = wrapped(BARE["bert"])
    for seed in range(70):
        cache(input_ids=tokens(1, 5, seed))
    assert cache._core.wrapped.weights.is_steady and cache.stats().n_stored == 70
    return cache


def test_what_was_stored_without_a_look_serves_no_other_weights() -> None:
    cache = steady()
    with torch.no_grad():
        cache.model.encoder.layer[0].output.dense.weight.mul_(1.5)
    for seed in (69, 3):
        check(cache, n_hits=1, input_ids=tokens(1, 5, seed))
    assert cache.stats().errors == 0


def test_a_save_holds_nothing_that_was_stored_under_other_weights(tmp_path: Path) -> None:
    cache = steady()
    with torch.no_grad():
        cache.model.embeddings.word_embeddings.weight.mul_(1.5)
    cache.save(tmp_path)
    other = build(BARE["bert"])
    other.load_state_dict(cache.model.state_dict())
    assert LLMCache.load(other, tmp_path).stats().n_stored == 0


def train_a_step(model: nn.Module) -> torch.optim.Optimizer:
    """Run a forward and a backward with gradients; the caller makes the step, which leaves no trace."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True)
    model(**X).logits.sum().backward()
    return optimizer


@pytest.mark.parametrize("most_bytes", [weights.MAX_HELD_BYTES, 1000])
def test_what_holds_gradients_is_hashed_in_each_call_or_the_call_is_computed(
    most_bytes: int, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_HELD_BYTES", most_bytes)
    cache = wrapped(CLASSIFIERS["bert"])
    cache(**X)
    optimizer = train_a_step(cache.model)
    n_trained = sum(parameter.grad is not None for parameter in cache.model.bert.parameters())
    hashed.clear()
    for _ in range(2):
        optimizer.step()
        check_same(ask(cache.model, **X), plain(cache, **X))
    n_computed = cache.stats().bypassed.get("gradients_held", 0)
    assert (set(hashed), n_computed) == ((set(), 4) if most_bytes == 1000 else ({n_trained}, 0))
    optimizer.step()
    optimizer.zero_grad()
    check(cache, n_hits=2)
    hashed.clear()
    check(cache, n_hits=4)
    assert not hashed


def test_hashing_by_several_threads_gives_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((n,), float(n)) for n in range(1, 40)]
    alone = hashing.digests(tensors)
    monkeypatch.setattr(hashing, "_MANY_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert hashing.digests(tensors) == alone
    assert len(set(alone)) == 39
