"""Calls that are answered before the trunk runs: only where the output is understood, and as the trunk would."""

from typing import Any

import pytest
import torch
from torch import nn

from llmcache import LLMCache
from tests.tiny_models import BARE, CLASSIFIERS, build
from tests.topics import batched, classifier, requests


class Embedded:
    """Counts how often a model embeds tokens, without a hook."""

    def __init__(self, model: nn.Module) -> None:
        self.n = 0
        table = model.get_input_embeddings()
        self._embed = table.forward
        table.forward = self._count

    def _count(self, ids: torch.Tensor) -> torch.Tensor:
        self.n += 1
        embedded: torch.Tensor = self._embed(ids)
        return embedded


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 90, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", sorted(BARE))
@pytest.mark.parametrize("more", [{}, {"return_dict": False}])
def test_what_is_answered_early_is_what_the_trunk_puts_out(family: str, more: dict[str, Any]) -> None:
    model = build(BARE[family])
    ids = tokens(2, 6)
    with LLMCache.wrap(model) as cache:
        first, second = (cache(input_ids=ids, use_cache=False, **more) for _ in range(2))
        assert [outcome.rung for outcome in cache.last] == ["exact", "exact"]
        layers = cache.stats().n_layers_skipped
    assert type(first) is type(second) and len(first) == len(second)
    for one, other in zip(
        first.values() if hasattr(first, "values") else first,
        second.values() if hasattr(second, "values") else second,
        strict=True,
    ):
        assert one is other is None or torch.equal(one, other)
    assert layers % 2 == 0 and layers > 0


def test_a_hit_embeds_nothing() -> None:
    model = build(CLASSIFIERS["bert"])
    embedded = Embedded(model)
    with LLMCache.wrap(model) as cache:
        for _ in range(3):
            cache(input_ids=tokens(1, 6))
        assert embedded.n == 1
        cache(input_ids=tokens(1, 6, seed=1))
        assert embedded.n == 2


@pytest.mark.slow
def test_approximate_hits_embed_nothing_either() -> None:
    model = classifier()
    embedded = Embedded(model)
    with LLMCache.wrap(model, audit=0.0, auto_bypass=False) as cache:
        cache.calibrate(batched(requests(500)[0]), max_drop=0.05)
        cache(**requests(1, seed=7)[0][0])
        embedded.n = 0
        hits = 0
        for one in requests(100, seed=8)[0]:
            cache(**one)
            hits += cache.last[0].rung is not None
        assert hits > 0
        assert embedded.n == 100 - hits


def test_a_batch_of_which_some_rows_miss_goes_the_whole_way() -> None:
    model = build(CLASSIFIERS["bert"])
    known, new = tokens(1, 6), tokens(1, 6, seed=1)
    with LLMCache.wrap(model) as cache:
        cache(input_ids=known)
        cache(input_ids=known)
        together = cache(input_ids=torch.cat([known, new])).logits
        assert [outcome.rung for outcome in cache.last] == ["exact", None]
    with torch.inference_mode():
        torch.testing.assert_close(together, model(input_ids=torch.cat([known, new])).logits)


def test_fingerprints_of_states_wait_for_the_embedding() -> None:
    model = build(CLASSIFIERS["bert"])
    embedded = Embedded(model)
    with LLMCache.wrap(model, tau=0.9) as cache:
        for _ in range(3):
            cache(input_ids=tokens(1, 6))
    assert embedded.n == 3


def test_another_dtype_is_read_anew() -> None:
    model = build(CLASSIFIERS["bert"])
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            cache(input_ids=tokens(1, 6))
        model.double()
        for rung in (None, "exact"):
            assert cache(input_ids=tokens(1, 6)).logits.dtype == torch.float64
            assert cache.last[0].rung == rung
        assert cache.stats().errors == 0


def test_an_output_that_is_not_understood_comes_from_the_trunk() -> None:
    model = build(BARE["bert"])
    plain = model.forward
    model.forward = lambda *args, **kwargs: _moved(plain(*args, **kwargs))  # type: ignore[method-assign]
    embedded = Embedded(model)
    with LLMCache.wrap(model) as cache:
        first, second = (cache(input_ids=tokens(1, 6)).last_hidden_state for _ in range(2))
    torch.testing.assert_close(first, second)
    assert embedded.n == 2


def test_hooks_run_as_ever() -> None:
    model = build(CLASSIFIERS["bert"])
    embedded, ran = Embedded(model), []
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            cache(input_ids=tokens(1, 6))
        hook = model.bert.encoder.register_forward_hook(lambda *_: ran.append(1))
        cache(input_ids=tokens(1, 6))
        assert (embedded.n, len(ran)) == (2, 1)
        hook.remove()
        cache(input_ids=tokens(1, 6))
        assert (embedded.n, len(ran)) == (2, 1)


def test_another_pooler_is_asked_itself() -> None:
    model = build(CLASSIFIERS["bert"])
    ids = tokens(1, 6)
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            cache(input_ids=ids)
        model.bert.pooler = type(model.bert.pooler)(model.config).eval()
        with torch.inference_mode(), cache.disabled():
            alone = model(input_ids=ids).logits
        for _ in range(3):
            torch.testing.assert_close(cache(input_ids=ids).logits, alone)
        assert cache.last[0].rung == "exact"


def test_a_pooler_that_takes_more_leaves_calls_alone() -> None:
    model = build(BARE["bert"])
    pool = model.pooler.forward
    model.pooler.forward = lambda states, mask: pool(states)
    forward = model.forward

    def masked(*args: Any, **kwargs: Any) -> Any:
        model.pooler.forward = pool
        try:
            return forward(*args, **kwargs)
        finally:
            model.pooler.forward = lambda states, mask: pool(states)

    model.forward = masked  # type: ignore[method-assign]
    with LLMCache.wrap(model) as cache:
        first, second = (cache(input_ids=tokens(1, 6)).pooler_output for _ in range(2))
        torch.testing.assert_close(first, second)
        assert cache.stats().errors == 1


def test_a_failed_forward_teaches_nothing() -> None:
    model = build(CLASSIFIERS["bert"])
    embedded = Embedded(model)
    pool = model.bert.pooler.forward
    with LLMCache.wrap(model) as cache:
        model.bert.pooler.forward = lambda states: 1 / 0
        with pytest.raises(ZeroDivisionError):
            cache(input_ids=tokens(1, 6))
        model.bert.pooler.forward = pool
        for _ in range(3):
            cache(input_ids=tokens(1, 6))
        assert embedded.n < 4


def test_what_fails_at_the_door_is_computed_and_counted_once() -> None:
    model = build(CLASSIFIERS["bert"])
    pool = model.bert.pooler.forward
    failures: list[Exception] = []

    def may_fail(states: torch.Tensor) -> torch.Tensor:
        if failures:
            raise failures.pop()
        pooled: torch.Tensor = pool(states)
        return pooled

    model.bert.pooler.forward = may_fail
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            cache(input_ids=tokens(1, 6))
        before = cache.stats()
        failures.append(ValueError("once"))
        cache(input_ids=tokens(1, 6))
        after = cache.stats()
        assert after.errors == before.errors + 1
        assert after.n_layers_skipped == before.n_layers_skipped
        assert after.reuses_by_layer == before.reuses_by_layer


def test_a_call_without_rows_is_left_to_the_model() -> None:
    model = build(BARE["bert"])
    none = torch.zeros(0, 6, dtype=torch.long)
    with pytest.raises(RuntimeError, match="reshape"), torch.inference_mode():
        model(input_ids=none)
    with LLMCache.wrap(model) as cache:
        for _ in range(2):
            cache(input_ids=tokens(1, 6))
        with pytest.raises(RuntimeError, match="reshape"):
            cache(input_ids=none)
        assert (cache.stats().hits, cache.stats().errors) == ({"exact": 1}, 0)


def _moved(output: Any) -> Any:
    output.last_hidden_state = output.last_hidden_state + 1
    return output
