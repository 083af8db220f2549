"""Approximate reuse serves no call that the model refuses, or with unusual arguments; its audit runs no hooks."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from llmcache import AuditStats, LLMCache
from tests.contract.judge import ask, check_same
from tests.contract.streams import ask as rungs_of
from tests.contract.streams import batched, calibrated, classifier, requests
from tests.tiny_models import PAD

FRESH = requests(12, seed=7)[0]
N_TOKENS = FRESH.shape[1]
PLACES = torch.arange(N_TOKENS)[None]
POSITIONS: dict[str, Any] = {"attention_mask": 1, "position_ids": PLACES}
#: Arguments that the classifier takes, and like arguments that it refuses.
BEYOND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token types": ({"token_type_ids": 0}, {"token_type_ids": 2}),
    "negative token types": ({"token_type_ids": 0}, {"token_type_ids": -1}),
    "positions": (POSITIONS, POSITIONS | {"position_ids": PLACES + 60}),
    "negative positions": (POSITIONS, POSITIONS | {"position_ids": PLACES - 1}),
    "dtype of token types": ({"token_type_ids": 0}, {"token_type_ids": torch.zeros(1, N_TOKENS, dtype=torch.uint8)}),
    "dtype of ids": ({}, {"input_ids": torch.int16}),
    "length": ({}, {"input_ids": 9}),
    "padding": ({"attention_mask": 1}, {"attention_mask": 1, "padding": 60}),
}


@pytest.fixture
def cache() -> Iterator[LLMCache]:
    with calibrated(audit=0) as cache:
        yield cache


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return classifier()


def made(ids: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
    """Make a call: a number fills an argument or repeats the ids; a dtype converts the ids."""
    call = {"input_ids": ids[None]}
    for name, value in given.items():
        if name == "input_ids":
            call[name] = ids[None].to(value) if isinstance(value, torch.dtype) else ids[None].repeat(1, value)
        elif name != "padding":
            call[name] = value if isinstance(value, Tensor) else torch.full_like(ids[None], value)
    return {name: pad(value, (0, given.get("padding", 0))) for name, value in call.items()}


def rung(cache: LLMCache, call: dict[str, Tensor]) -> str | None:
    cache(**call)
    return cache.last[0].rung


@pytest.mark.parametrize("name", BEYOND)
def test_what_the_model_refuses_is_answered_by_no_other_request(cache: LLMCache, plain: nn.Module, name: str) -> None:
    """A call that the plain model refuses is refused, even if a similar request could serve it."""
    taken, refused = BEYOND[name]
    assert "semantic" in [rung(cache, made(row, taken)) for row in FRESH]
    for row in requests(5, seed=8)[0]:
        with pytest.raises((IndexError, RuntimeError)) as expected:
            ask(plain, **made(row, refused))
        with pytest.raises(expected.type):
            ask(cache.model, **made(row, refused))


@pytest.mark.parametrize(
    "given",
    [
        {"position_ids": PLACES + 3},
        {"token_type_ids": 1},
        {"token_type_ids": (PLACES > 3).long()},
        {"token_type_ids": (PLACES < 1).long()},
    ],
    ids=["positions", "one type", "types that change within a text", "types that fall"],
)
def test_a_request_with_unusual_arguments_is_computed(cache: LLMCache, plain: nn.Module, given: dict[str, Any]) -> None:
    """Unusual positions or token types may change the answer, and a fingerprint reads tokens only."""
    for row in FRESH:
        call = made(row, {"attention_mask": 1} | given)
        output = ask(cache.model, **call)
        assert cache.last[0].rung is None
        check_same(output, ask(plain, **call))


def test_usual_token_types_of_a_pair_are_reused(cache: LLMCache) -> None:
    """Token types that change after a separator, as tokenizers set them, allow approximate hits."""
    rungs = []
    for row in FRESH:
        pair = torch.cat([row, torch.tensor([PAD]), row[1:]])  # the only special token of this model
        types = (torch.arange(len(pair)) > len(row)).long()[None]
        rungs.append(rung(cache, made(pair, {"attention_mask": 1, "token_type_ids": types})))
    assert "semantic" in rungs


LABELLED: dict[str, Any] = {
    "by name": lambda model, ids, labels: model(input_ids=ids, labels=labels),
    "by position": lambda model, ids, labels: model(ids, None, None, None, None, labels),
    "as a tuple": lambda model, ids, labels: model(input_ids=ids, labels=labels, return_dict=False),
}


@pytest.mark.parametrize("how", LABELLED)
def test_a_loss_is_that_of_the_request_itself(cache: LLMCache, plain: nn.Module, how: str) -> None:
    """A bound covers answers: a call with labels is computed, or an exact repeat (docs/calibration.md)."""
    ids, labels = requests(24, seed=5)[0], torch.arange(24) % 5
    found = cache.look_up({"input_ids": ids})
    assert found.served is not None
    with torch.inference_mode():
        for number in range(2):
            expected, made = (LABELLED[how](model, ids, labels) for model in (plain, cache.model))
            torch.testing.assert_close(made[0], expected[0])
            assert {one.rung for one in cache.last} == {("exact" if number else None)}
        rows = list(found.served.rows)  # looked up before labels were given
        made = cache(**found.served.inputs, labels=labels[rows])
        torch.testing.assert_close(made.loss, plain(input_ids=ids[rows], labels=labels[rows]).loss)
    assert cache.stats().errors == 0 and "semantic" in rungs_of(cache, requests(24, seed=6)[0])


# -- audit -------------------------------------------------------------------------------------------------------------


MORE = requests(40, seed=7)[0]


class Watch:
    """Counts, by thread, the runs of hooks on a model and its head; these hooks cause no bypass."""

    def __init__(self, model: Any) -> None:
        self.n_calls: Counter[int] = Counter()
        for part in (model, model.dropout, model.classifier):
            part.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.n_calls[threading.get_ident()] += 1


@pytest.fixture
def watched() -> Iterator[tuple[LLMCache, Watch]]:
    model = classifier()
    watch = Watch(model)
    with calibrated(model, audit=1.0) as cache:
        yield cache, watch


def audit_of(cache: LLMCache) -> AuditStats:
    audit = cache.stats().audit
    assert audit is not None
    return audit


def drained(cache: LLMCache) -> AuditStats:
    """Drain the audit from another thread and return its figures."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(cache.drain).result()
    return audit_of(cache)


def test_hits_are_audited_without_hooks_and_count_as_no_requests(watched: tuple[LLMCache, Watch]) -> None:
    """The audit runs no hook of the user's in any thread, and `last` and `stats` cover the user's calls only."""
    cache, watch = watched
    seen: list[torch.Size] = []
    cache.model.register_forward_hook(lambda module, args, output: seen.append(output.logits.shape))
    n_hits = rungs_of(cache, MORE).count("semantic")
    assert seen == [torch.Size([1, 5])] * len(MORE)  # each call, served or not
    before, last, n_calls = cache.stats(), cache.last, watch.n_calls.copy()
    audit = drained(cache)
    cache.drain()
    assert watch.n_calls == n_calls and set(n_calls) == {threading.get_ident()} and len(seen) == len(MORE)
    after = cache.stats()
    assert (after.n_requests, after.n_hits, after.bypassed) == (len(MORE), before.n_hits, before.bypassed)
    assert 0 < n_hits == audit.n_recomputed and after.errors == 0 and cache.last == last


def test_the_audit_sees_the_model_of_now(watched: tuple[LLMCache, Watch]) -> None:
    """The audit compares the answer of each hit with the model's own, computed with the present weights."""
    cache, watch = watched
    for seed in (8, 9):
        ids = requests(40, seed=seed)[0]
        answers, served = [], []
        for row in ids:
            answers.append(int(cache(input_ids=row[None]).logits.argmax()))
            served.append(cache.last[0].rung == "semantic")
        before = audit_of(cache).n_changed if seed == 9 else 0
        changed = drained(cache).n_changed - before
        with cache.disabled():
            own = cache(input_ids=ids).logits.argmax(dim=-1).tolist()
        wrong = [a != b for a, b, is_hit in zip(answers, own, served, strict=True) if is_hit]
        assert changed == sum(wrong) and wrong
        cache.model.classifier.weight = nn.Parameter(cache.model.classifier.weight.detach().clone())
        assert audit_of(cache).status == "certified"
    assert set(watch.n_calls) == {threading.get_ident()}


@pytest.mark.slow
def test_learning_and_renewal_run_hooks_in_the_callers_threads_alone() -> None:
    """Learning in service and renewal run the user's hooks only in the threads that call."""
    model = classifier()
    watch = Watch(model)
    settings: dict[str, Any] = {"max_drop": 0.1, "auto_bypass": False, "audit": 1.0, "learn": 100, "recalibrate": 100}
    with LLMCache.wrap(model, **settings) as cache:
        for call in batched(requests(100)[0], 20):
            cache(**call)
        cache.drain()
        first, n_recomputed = cache.calibration, 0
        assert first is not None
        for call in batched(requests(140, seed=3)[0], 20):
            cache(**call)
            n_recomputed += drained(cache).n_recomputed
        assert cache.calibration not in (None, first)
        assert cache.stats().errors == 0 and n_recomputed > 0
    assert set(watch.n_calls) == {threading.get_ident()}
