"""Calls that are answered before the trunk runs: only where the output is understood, and as the trunk would."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from llmcache import LLMCache
from llmcache.models.arguments import Arguments
from tests.execution.calls import agree, assert_close, pair, quietly, run, rungs, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, build, tokens
from tests.topics import batched, classifier, requests

IDS, OTHER = tokens(1, 6), tokens(1, 6, seed=1)


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


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(BARE))
@pytest.mark.parametrize("more", [{}, {"return_dict": False}])
def test_what_is_answered_early_is_what_the_trunk_puts_out(family: str, more: dict[str, Any]) -> None:
    cache, alone = pair(BARE[family])
    asked = {"input_ids": tokens(2, 6), "use_cache": False, **more}
    first, second, plain = cache(**asked), cache(**asked), quietly(alone, **asked)
    assert rungs(cache) == ["exact", "exact"]
    assert type(first) is type(second) is type(plain)
    values = (list(out.values()) if hasattr(out, "values") else out for out in (first, second, plain))
    for one, other, expected in zip(*values, strict=True):
        assert one is other is expected is None or torch.equal(one, other)
        assert expected is None or torch.equal(one, expected)
    layers = cache.stats().n_layers_skipped
    assert layers % 2 == 0 and layers > 0


@pytest.mark.parametrize(("settings", "n_embedded"), [({}, 1), ({"tau": 0.9}, 3)], ids=["by tokens", "by states"])
def test_a_hit_embeds_nothing_but_for_a_fingerprint_of_states(settings: dict[str, Any], n_embedded: int) -> None:
    cache = wrapped(CLASSIFIERS["bert"], **settings)
    embedded = Embedded(cache.model)
    for _ in range(3):
        cache(input_ids=IDS)
    assert embedded.n == n_embedded
    cache(input_ids=OTHER)
    assert embedded.n == n_embedded + 1


@pytest.mark.slow
def test_approximate_hits_embed_nothing_either() -> None:
    model = classifier()
    embedded = Embedded(model)
    with LLMCache.wrap(model, audit=0.0, auto_bypass=False) as cache:
        cache.calibrate(batched(requests(500)[0]), max_drop=0.05)
        cache(**requests(1, seed=7)[0][0])
        embedded.n = n_hits = 0
        for one in requests(100, seed=8)[0]:
            cache(**one)
            n_hits += rungs(cache) != [None]
        assert n_hits > 0
        assert embedded.n == 100 - n_hits


@pytest.mark.parametrize("family", sorted(BARE))
def test_of_a_batch_the_rows_that_miss_alone_are_run(family: str) -> None:
    cache, alone = pair(BARE[family])
    for _ in range(2):
        cache(input_ids=IDS, use_cache=False)
    both = {"input_ids": torch.cat([IDS, OTHER]), "use_cache": False}
    agree(cache, alone, **both)
    assert rungs(cache) == ["exact", None]
    assert cache.stats().n_layers_skipped > cache.stats().n_hits  # of both hits, all layers
    agree(cache, alone, **both)
    assert rungs(cache) == ["exact", "exact"]


def test_where_rows_cannot_be_run_alone_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    for _ in range(2):
        cache(input_ids=IDS)
    monkeypatch.setattr(Arguments, "replace", lambda *_: 1 / 0)
    agree(cache, alone, input_ids=torch.cat([IDS, OTHER]))
    assert (rungs(cache), cache.stats().errors) == ([None, None], 1)
    monkeypatch.undo()
    agree(cache, alone, input_ids=torch.cat([OTHER, IDS]))
    assert rungs(cache) == ["exact", "exact"]


@pytest.mark.parametrize("change", ["wider", "no tensor", "named otherwise"])
def test_of_a_trunk_that_packs_its_output_otherwise_nothing_is_kept(change: str) -> None:
    cache = wrapped(BARE["bert"])
    cache(input_ids=IDS)
    packed = {"wider": torch.zeros(1, 7, 32), "no tensor": None, "named otherwise": torch.zeros(1, 6, 32)}[change]
    made = BaseModelOutput(last_hidden_state=packed) if change != "named otherwise" else ModelOutput(states=packed)
    swap = vars(cache.model)["forward"]
    run_trunk, swap.listener.run = (
        swap.listener.run,
        lambda frame, _, args, kwargs: run_trunk(frame, lambda *_, **__: made, args, kwargs),
    )
    assert cache(input_ids=OTHER) is made
    swap.listener.run = run_trunk
    assert (cache.stats().n_stored, cache.stats().errors, cache.stats().n_misses) == (1, 0, 2)


def test_another_dtype_is_read_anew() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    for _ in range(2):
        cache(input_ids=IDS)
    cache.model.double()
    for rung in (None, "exact"):
        assert cache(input_ids=IDS).logits.dtype == torch.float64
        assert rungs(cache) == [rung]
    assert cache.stats().errors == 0


def test_an_output_that_is_not_understood_comes_from_the_trunk() -> None:
    model = build(BARE["bert"])
    forward = model.forward

    def moved(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + 1
        return output

    model.forward = moved
    embedded = Embedded(model)
    cache = LLMCache.wrap(model)
    first, second = (cache(input_ids=IDS).last_hidden_state for _ in range(2))
    assert_close(first, second)
    assert embedded.n == 2


def test_hooks_run_as_ever() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    embedded, ran = Embedded(cache.model), []
    for _ in range(2):
        cache(input_ids=IDS)
    hook = cache.model.bert.encoder.register_forward_hook(lambda *_: ran.append(1))
    cache(input_ids=IDS)
    assert (embedded.n, len(ran)) == (2, 1)
    hook.remove()
    cache(input_ids=IDS)
    assert (embedded.n, len(ran)) == (2, 1)


def test_another_pooler_is_asked_itself() -> None:
    cache, alone = pair(CLASSIFIERS["bert"])
    for _ in range(2):
        cache(input_ids=IDS)
    pooler = type(alone.bert.pooler)(alone.config).eval()
    cache.model.bert.pooler = alone.bert.pooler = pooler
    for _ in range(3):
        agree(cache, alone, input_ids=IDS)
    assert rungs(cache) == ["exact"]


def test_a_pooler_that_takes_more_leaves_calls_alone() -> None:
    model = build(BARE["bert"])
    pool, forward = model.pooler.forward, model.forward

    def takes_more(states: torch.Tensor, mask: torch.Tensor) -> Any:
        return pool(states)

    def masked(*args: Any, **kwargs: Any) -> Any:
        model.pooler.forward = pool
        try:
            return forward(*args, **kwargs)
        finally:
            model.pooler.forward = takes_more

    model.pooler.forward, model.forward = takes_more, masked
    cache = LLMCache.wrap(model)
    first, second = (cache(input_ids=IDS).pooler_output for _ in range(2))
    assert_close(first, second)
    assert cache.stats().errors == 1


@pytest.fixture
def failing() -> tuple[LLMCache, list[Exception]]:
    """A wrapped classifier, and what its pooler raises next."""
    model = build(CLASSIFIERS["bert"])
    pool = model.bert.pooler.forward
    failures: list[Exception] = []

    def may_fail(states: torch.Tensor) -> Any:
        if failures and states.shape[:2] == IDS.shape:  # no trial of the cache
            raise failures.pop()
        return pool(states)

    model.bert.pooler.forward = may_fail
    return LLMCache.wrap(model), failures


def test_a_failed_forward_teaches_nothing(failing: tuple[LLMCache, list[Exception]]) -> None:
    cache, failures = failing
    embedded = Embedded(cache.model)
    failures.append(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cache(input_ids=IDS)
    for _ in range(3):
        cache(input_ids=IDS)
    assert embedded.n < 4


def test_what_fails_at_the_door_is_computed_and_counted_once(failing: tuple[LLMCache, list[Exception]]) -> None:
    cache, failures = failing
    for _ in range(2):
        cache(input_ids=IDS)
    before = cache.stats()
    failures.append(ValueError("once"))
    cache(input_ids=IDS)
    after = cache.stats()
    assert after.errors == before.errors + 1
    assert after.n_layers_skipped == before.n_layers_skipped
    assert after.reuses_by_layer == before.reuses_by_layer


def test_a_call_without_rows_is_left_to_the_model() -> None:
    cache, alone = pair(BARE["bert"])
    none = torch.zeros(0, 6, dtype=torch.long)
    with pytest.raises(RuntimeError, match="reshape"):
        run(alone, input_ids=none)
    for _ in range(2):
        cache(input_ids=IDS)
    with pytest.raises(RuntimeError, match="reshape"):
        cache(input_ids=none)
    assert (cache.stats().hits, cache.stats().errors) == ({"exact": 1}, 0)
