"""The rung `draft`, by an int8 copy of the trunk and by another model: what it serves, and what it leaves alone."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.reuse.search_cost import SearchCost
from tests import inside
from tests.calibration.drafting import BOTH, MAX_DROP, drafted_rows, only_copy, only_model
from tests.contract.streams import ask, classifier, requests
from tests.forks import in_child
from tests.tiny_models import batch
from tests.topics import edited

ROUNDED = {"atol": 1e-4, "rtol": 1e-4}  # the model's head, which reads a copy's states, rounds by the batch


def test_sources_and_draft_serve_within_one_bound_in_any_batch(drafted: LLMCache, drafting: Any) -> None:
    """A drafted row is not stored, and has the same logits alone and in a batch: those of the other model, if one."""
    cache, made, own, ids = drafted, drafted.calibration, classifier(), requests(120, seed=2)[0]
    assert made is not None and made.shares == BOTH and made.limit is not None
    assert made.limits == {"semantic": made.limit / 2, "draft": made.limit}
    rows = [row[None, : 5 + number % 4] for number, row in enumerate(ids)]
    rungs, logits, n_changed = [], [], 0
    with torch.inference_mode():
        for row in rows:
            logits.append(cache(input_ids=row, attention_mask=torch.ones_like(row)).logits)
            (found,), expected = cache.last, own(input_ids=row).logits
            rungs.append(found.rung)
            n_changed += int(logits[-1].argmax()) != int(expected.argmax())
            if found.rung == "draft":
                assert found.risk is not None and found.risk <= made.limits["draft"]
                assert (found.source, found.similarity) == (None, None)
                assert drafting is None or torch.equal(logits[-1], drafting(input_ids=row).logits)
            elif found.rung is None:
                torch.testing.assert_close(logits[-1], expected)
    assert {*rungs} == {"semantic", "draft", None} and n_changed <= MAX_DROP * len(rows)
    assert cache.stats().hits["draft"] == rungs.count("draft")
    inside.draft(cache).forget()  # else no row is drafted again
    for first in range(0, len(rows), 32):
        together = cache(**batch(rows[first : first + 32])).logits
        for number, found in enumerate(cache.last, start=first):
            assert found.rung == (rungs[number] or "exact")
            torch.testing.assert_close(together[number - first], logits[number][0], **ROUNDED)
    assert cache.stats().errors == 0


def test_calls_unlike_the_calibrations_are_not_drafted(drafted: LLMCache, drafting: Any) -> None:
    rows, own, positions, draft = drafted_rows(drafted), classifier(), torch.arange(1, 9)[None], inside.draft(drafted)
    left, labels = batch([rows[0], rows[1][:, :4]], left=True), torch.tensor([3])
    with torch.inference_mode():
        found, expected = (model(input_ids=rows[6], labels=labels).loss for model in (drafted.model, own))
        torch.testing.assert_close(found, expected)
        assert drafted.last[0].rung is None
        found = drafted(**left).logits
        assert drafted.last[1].rung != "draft"
        torch.testing.assert_close(found[1], own(**left).logits[1])
        found = drafted(input_ids=rows[2], position_ids=positions).logits
        assert drafted.last[0].rung is None
        torch.testing.assert_close(found, own(input_ids=rows[2], position_ids=positions).logits)
        with torch.autocast("cpu", torch.bfloat16):
            assert ask(drafted, rows[3]) == [None]
    if drafting is not None:
        long = torch.cat([rows[4], *[rows[4][:, 1:-1]] * 5], dim=1)  # longer than the other model takes
        assert ask(drafted, long) == [None]
    assert ask(drafted, rows[5]) == ["draft"] and drafted.stats().errors == 0
    assert draft._recent
    drafted.clear()
    assert not draft._recent and ask(drafted, rows[5]) == [None]


def test_a_draft_that_raises_is_counted_once_and_not_used_again(
    drafted: LLMCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = torch.cat(drafted_rows(drafted))
    inside.draft(drafted).forget()
    monkeypatch.setattr(inside.draft(drafted).drafter, "run", lambda inputs: 1 / 0)
    found = drafted(input_ids=rows).logits
    assert {one.rung for one in drafted.last} == {None}
    torch.testing.assert_close(found, classifier()(input_ids=rows).logits)
    assert drafted.stats().errors == 1
    assert sum("not used again" in one.message for one in caplog.records) == 1


def test_a_draft_that_gives_no_numbers_does_not_serve(drafted: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, drafter = torch.cat(drafted_rows(drafted)), inside.draft(drafted).drafter
    inside.draft(drafted).forget()
    run = drafter.run
    monkeypatch.setattr(drafter, "run", lambda inputs: (run(inputs)[0], np.full(5, np.nan, np.float32)))
    found = drafted(input_ids=rows).logits
    assert {one.rung for one in drafted.last} == {None} and drafted.stats().errors == 0
    torch.testing.assert_close(found, classifier()(input_ids=rows).logits)


def test_a_repeat_of_a_drafted_request_runs_no_draft(drafted: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, draft = torch.cat(drafted_rows(drafted)), inside.draft(drafted)
    monkeypatch.setattr("llmcache.reuse.draft._MOST_RECENT", 16)
    expected = drafted(input_ids=rows).logits
    ask(drafted, requests(400, seed=11)[0])
    assert len(draft._recent) > 40
    monkeypatch.setattr(draft.drafter, "run", lambda inputs: 1 / 0)
    assert torch.equal(drafted(input_ids=rows).logits, expected)
    assert {one.rung for one in drafted.last} == {"draft"} and drafted.stats().errors == 0


def test_proposals_are_kept_within_a_budget(drafted: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcache.reuse.draft._MOST_RECENT", 16)
    monkeypatch.setattr("llmcache.reuse.draft._RECENT_BYTES", 0)
    ask(drafted, requests(400, seed=12)[0])
    assert len(inside.draft(drafted)._recent) == 16


def test_what_is_forgotten_while_it_is_drafted_is_not_kept(drafted: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    row, draft = drafted_rows(drafted)[0], inside.draft(drafted)
    draft.forget()
    run = draft.drafter.run
    monkeypatch.setattr(draft.drafter, "run", lambda inputs: (run(inputs), draft.forget())[0])
    assert ask(drafted, row) == ["draft"] and not draft._recent


def test_threads_and_a_fork_get_the_same_drafts(drafted: LLMCache) -> None:
    rows, draft = drafted_rows(drafted), inside.draft(drafted)
    alone = [drafted(input_ids=row).logits for row in rows]
    draft.forget()

    def work(first: int) -> list[tuple[Tensor, str | None]]:
        return [(drafted(input_ids=row).logits, drafted.last[0].rung) for row in [*rows[first:], *rows[:first]]]

    with ThreadPoolExecutor(3) as pool:
        for first, found in enumerate(pool.map(work, range(3))):
            assert {rung for _, rung in found} == {"draft"}
            for (logits, _), expected in zip(found, [*alone[first:], *alone[:first]], strict=True):
                torch.testing.assert_close(logits, expected, **ROUNDED)
    assert drafted.stats().errors == 0
    if hasattr(os, "fork"):
        draft.forget()
        logits, rung = in_child(lambda: (drafted(input_ids=rows[0]).logits.tolist(), drafted.last[0].rung))
        assert rung == "draft"
        torch.testing.assert_close(torch.tensor(logits), alone[0], **ROUNDED)


# -- what ends it ------------------------------------------------------------------------------------------------------


BIAS = torch.tensor([0.0, 99.0, 0.0, 0.0, 0.0])
EDITS: dict[str, Callable[[Any], object]] = {
    "hook": lambda model: model.classifier.register_forward_hook(lambda module, args, output: output + BIAS),
    "weights": torch.no_grad()(lambda model: model.classifier.bias.add_(BIAS)),
    "module": lambda model: setattr(model, "classifier", nn.Sequential(model.classifier)),
}


@only_copy
@pytest.mark.parametrize("edit", EDITS)
def test_a_copy_serves_only_under_the_head_that_it_was_judged_with(drafted: LLMCache, edit: str) -> None:
    rows = drafted_rows(drafted)
    EDITS[edit](drafted.model)
    for row in rows:
        found = drafted(input_ids=row).logits
        assert drafted.last[0].rung in (None, "exact")  # some rows come again
        assert edit == "module" or int(found.argmax()) == 1
    assert drafted.stats().errors == 0


def until(end: Callable[[], object]) -> ExitStack:
    """Return a context at whose end something is called."""
    stack = ExitStack()
    stack.callback(end)
    return stack


def hooked(module: nn.Module, hook: Callable[..., Any]) -> ExitStack:
    return until(module.register_forward_hook(hook).remove)


def see(module: nn.Module, args: Any, output: Tensor) -> None:
    """Placeholders of drafted rows are NaN."""
    assert output.isfinite().all()


Otherwise = Callable[[Any, Any], AbstractContextManager[None]]
OTHERWISE: dict[str, Otherwise] = {
    "a hook on the draft": lambda model, draft: hooked(draft.classifier, lambda module, args, output: -output),
    "a hook that would see placeholders": lambda model, draft: hooked(model.dropout, see),
    "other weights of the draft": lambda model, draft: edited(draft.classifier.bias),
    "a draft in training mode": lambda model, draft: until(draft.train().eval),
}


@only_model
@pytest.mark.parametrize("otherwise", OTHERWISE.values(), ids=OTHERWISE)
def test_what_the_calibration_did_not_see_ends_drafting(drafted: LLMCache, drafting: Any, otherwise: Otherwise) -> None:
    rows = drafted_rows(drafted)
    inside.draft(drafted).forget()
    with otherwise(drafted.model, drafting):
        assert set(ask(drafted, torch.cat(rows[:5]))) == {None}
    inside.draft(drafted).forget()
    assert set(ask(drafted, torch.cat(rows[5:]))) == {"draft"}


@only_model
def test_outputs_that_logits_cannot_be_put_into_are_computed(
    drafted: LLMCache, drafting: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (other, third, fourth, fifth, *_), own, linear = drafted_rows(drafted), classifier(), nn.functional.linear

    def looked_up(row: Tensor) -> Any:
        ready = drafted.look_up({"input_ids": row}).served
        assert ready is not None
        return ready.inputs

    def refuse_nan(states: Tensor, *given: Tensor) -> Tensor:
        if states.isnan().any():
            raise ValueError("NaN")
        return linear(states, *given)

    with torch.inference_mode():
        # A call of the trunk alone has no logits; a look-up within the model is not for it either.
        states = drafted.model.bert(**looked_up(other)).last_hidden_state
        torch.testing.assert_close(states, own.bert(input_ids=other).last_hidden_state)
        assert torch.equal(drafted(**looked_up(third)).logits, drafting(input_ids=third).logits)
        assert drafted.last[0].rung == "draft"
        tuples = drafted(input_ids=fourth, return_dict=False)
        assert torch.equal(tuples[0], drafting(input_ids=fourth).logits)
        assert drafted.stats().errors == 0 and not caplog.records
        monkeypatch.setattr(nn.functional, "linear", refuse_nan)
        found = drafted(input_ids=fifth, return_dict=False)  # the model makes this output
        assert torch.equal(found[0], own(input_ids=fifth).logits)
    assert ["run the model's head on a draft" in one.message for one in caplog.records] == [True]
    assert drafted.stats().errors == 1 and ask(drafted, fourth) == [None]


@only_copy
def test_a_withdrawn_source_is_not_replaced_by_the_draft(drafted: LLMCache) -> None:
    """The calibration counted what the source would serve, so the draft's answers to these requests have no bound."""
    ids = requests(150, seed=6)[0]
    served = [(row, drafted.last[0].source) for row in ids if ask(drafted, row[None]) == ["semantic"]]
    assert len(served) > 20
    for _, source in served:
        inside.sources(drafted).quarantine(str(source), "default")
    assert {rung for row, _ in served for rung in ask(drafted, row[None])} == {None}


@only_copy
def test_searches_that_do_not_pay_end_no_drafts(
    drafted: LLMCache, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is not searched has no bound with a draft, so the calibration alone says what is searched."""
    monkeypatch.setattr(SearchCost, "pays", lambda account, call: False)
    with LLMCache.load(classifier(), saved, auto_bypass=True) as cache:
        assert {"semantic", "draft"} <= set(ask(cache, requests(150, seed=6)[0]))


@only_copy
def test_input_that_the_model_refuses_is_not_drafted(drafted: LLMCache, caplog: pytest.LogCaptureFixture) -> None:
    row, types = requests(1, seed=9)[0], torch.zeros(1, 8, dtype=torch.int64)
    for seed in range(20):  # the cache knows calls with types now
        drafted(input_ids=requests(1, seed=20 + seed)[0], token_type_ids=types)
    assert drafted.stats().hits["draft"] > 0
    long = torch.cat([row, torch.zeros(1, 80, dtype=torch.int64)], dim=1)
    for wrong in (
        {"input_ids": row, "token_type_ids": types + 9},
        {"input_ids": row, "token_type_ids": types - 1},
        {"input_ids": long, "attention_mask": (torch.arange(88) < 8).long()[None]},
    ):
        with pytest.raises((IndexError, RuntimeError)):
            drafted(**wrong)
    assert drafted.stats().errors == 0 and not caplog.records
    assert "draft" in ask(drafted, requests(40, seed=10)[0])
