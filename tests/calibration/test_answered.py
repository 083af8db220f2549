"""Where logits are known for all rows of a call, they are the answer, and no part of the model runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from llmcache import LLMCache
from llmcache.models import hooks
from tests import inside
from tests.calibration.drafting import drafted_rows, only_copy
from tests.contract.streams import N_TOPICS, ask, batched, calibrated, classifier, requests

#: Logits of a source were made in a batch of others.
ROUNDED = {"atol": 1e-3, "rtol": 1e-4}


@pytest.fixture
def cache() -> Iterator[LLMCache]:
    with calibrated(audit=0) as made:
        ask(made, requests(1, seed=7)[0])  # shows the form of an output
        yield made


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What heads read."""
    read: list[Tensor] = []
    linear = nn.functional.linear

    def run(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if len(weight) == N_TOPICS:
            read.append(states)
        return linear(states, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", run)
    return read


def served(cache: LLMCache) -> list[tuple[Tensor, Any]]:
    """Return rows (1, T) that sources serve, and the source of each."""
    rows = [row[None] for row in requests(60, seed=5)[0]]
    found = [(row, cache.last[0].source) for row in rows if ask(cache, row) == ["semantic"]]
    assert len(found) > 20
    return found


def test_a_source_answers_with_its_own_logits_in_a_new_tensor(cache: LLMCache, heads: list[Tensor]) -> None:
    rows = served(cache)
    kept = {source.key: torch.from_numpy(source.logits) for source in inside.sources(cache)}
    heads.clear()
    for row, source in rows:
        output = cache(input_ids=row)
        assert type(output) is SequenceClassifierOutput and [*output] == ["logits"]
        assert torch.equal(output.logits[0], kept[source])
        with torch.inference_mode():
            output.logits.fill_(0)  # a caller may write to it
        assert torch.equal(cache(input_ids=row).logits[0], kept[source])
    ids = torch.cat([row for row, _ in rows[:8]])
    together = cache(input_ids=ids).logits
    assert torch.equal(together, torch.stack([kept[source] for _, source in rows[:8]]))
    assert not heads
    with torch.inference_mode():
        cache.model.bert(input_ids=requests(1, seed=8)[0])  # the trunk alone returns states, in a form of its own
        states = cache.model.bert(input_ids=ids).pooler_output
        torch.testing.assert_close(cache.model.classifier(states), together, **ROUNDED)


@only_copy
def test_a_copy_answers_with_its_head(drafted: LLMCache, heads: list[Tensor]) -> None:
    rows = drafted_rows(drafted)
    heads.clear()
    one, together = drafted(input_ids=rows[0]).logits, drafted(input_ids=torch.cat(rows)).logits
    assert not heads and torch.equal(one[0], together[0])
    assert [found.rung for found in drafted.last] == ["draft"] * len(rows)
    graph = inside.draft(drafted).drafter.engine  # type: ignore[union-attr]
    assert graph.twin.names == ("logits",)
    # Only the trunk's products are int8: from int8 states, the model's own head makes the same.
    trunk = inside.graph(drafted, "int8")
    states = trunk.compute({"input_ids": rows[0]})[1]
    torch.testing.assert_close(classifier().classifier(states), one, **ROUNDED)


@pytest.mark.parametrize("part", ["classifier", "bert"])
def test_a_hook_sees_what_the_head_makes(cache: LLMCache, heads: list[Tensor], part: str) -> None:
    ((row, _), *_), seen = served(cache), list[Any]()
    hook = getattr(cache.model, part).register_forward_hook(lambda module, args, output: seen.append(output))
    heads.clear()
    found = cache(input_ids=row).logits
    assert heads and len(seen) == 1 and cache.last[0].rung == "semantic"
    hook.remove()
    torch.testing.assert_close(cache(input_ids=row).logits, found, **ROUNDED)
    heads.clear()
    cache(input_ids=row)
    assert not heads


@pytest.mark.parametrize("name", ["dropout", ""])
def test_a_head_in_training_mode_runs(cache: LLMCache, heads: list[Tensor], name: str) -> None:
    ((row, _), *_), part = served(cache), cache.model.get_submodule(name)
    part.training = True
    heads.clear()
    cache(input_ids=row)
    assert heads and cache.last[0].rung == "semantic"
    part.training = False
    for _ in range(2):  # the first shows the form of an output
        heads.clear()
        cache(input_ids=row)
    assert not heads


def test_the_head_runs_once_a_model_is_on_another_device(cache: LLMCache, heads: list[Tensor]) -> None:
    ((row, _), *_), swap = served(cache), vars(cache.model)["forward"]
    swap._form = swap._form._replace(logits=swap._form.logits.to("meta"))
    for n_runs in (1, 0):
        heads.clear()
        assert cache(input_ids=row).logits.device == row.device
        assert len(heads) == n_runs


def test_a_call_while_the_models_forward_is_replaced_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, swaps_of, answers = classifier(), hooks._swaps_of, []
    row = requests(1, seed=5)[0]

    def ask_meanwhile(swap: Any) -> Any:
        if isinstance(swap, hooks.ModelForward) and not answers and vars(model).get("forward") is swap:
            answers.append(model(input_ids=row).logits)
        return swaps_of(swap)

    monkeypatch.setattr(hooks, "_swaps_of", ask_meanwhile)
    expected = model(input_ids=row).logits
    cache = calibrate(model)
    (found,) = answers
    torch.testing.assert_close(found, expected, **ROUNDED)
    assert cache.stats().errors == 0


class Scaled(BertForSequenceClassification):
    """A head with a number, a list and a dict."""

    scale, shifts, knobs = 1.0, [0.0], {"sign": 1.0}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        pooled = self.bert(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        logits = self.scale * self.knobs["sign"] * self.classifier(pooled) + self.shifts[0]
        return SequenceClassifierOutput(logits=logits)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "scale", 3.0),
        lambda model: model.shifts.__setitem__(0, 1.0),
        lambda model: model.knobs.update(sign=-1.0),
    ],
    ids=["a number", "a list", "a dict"],
)
def test_no_logits_outlive_what_they_were_made_with(
    change: Callable[[Any], object], heads: list[Tensor], tmp_path: Path
) -> None:
    model = own(Scaled, scale=1.0, shifts=[0.0], knobs={"sign": 1.0})
    cache = calibrate(model)
    (row, _), (other, _), *_ = served(cache)
    heads.clear()
    expected = cache(input_ids=row).logits
    assert not heads
    cache.save(tmp_path)
    change(model)
    assert ask(cache, other) == [None]
    with LLMCache.load(own(Scaled, scale=3.0, shifts=[0.0], knobs={"sign": 1.0}), tmp_path) as loaded:
        assert ask(loaded, row) == [None]
    with LLMCache.load(own(Scaled, scale=1.0, shifts=[0.0], knobs={"sign": 1.0}), tmp_path) as loaded:
        assert ask(loaded, row) == ["semantic"] and torch.equal(loaded(input_ids=row).logits, expected)


class Sorted(BertForSequenceClassification):
    """Its trunk gets the rows in another order."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        order = input_ids[:, 1].argsort(stable=True)
        pooled = self.bert(input_ids=input_ids[order]).pooler_output
        return SequenceClassifierOutput(logits=self.classifier(pooled)[order.argsort()])


class Cut(BertForSequenceClassification):
    """Its trunk gets a part of the row."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        pooled = self.bert(input_ids=input_ids[:, :-1]).pooler_output
        return SequenceClassifierOutput(logits=self.classifier(pooled) + input_ids[:, -1:])


class Mixed(BertForSequenceClassification):
    """Its logits depend on the rows beside."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        logits = self.classifier(self.bert(input_ids=input_ids).pooler_output)
        return SequenceClassifierOutput(logits=logits - 0.5 * logits.mean(dim=0, keepdim=True))


class Noisy(BertForSequenceClassification):
    """No two answers are equal."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        pooled = self.bert(input_ids=input_ids).pooler_output
        return SequenceClassifierOutput(logits=self.classifier(pooled) + 1e-3 * torch.rand(len(input_ids), 5))


class Noting(BertForSequenceClassification):
    """Its head counts calls."""

    n_calls = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        self.n_calls += 1
        return SequenceClassifierOutput(logits=self.classifier(self.bert(input_ids=input_ids).pooler_output))


class Pair(NamedTuple):
    logits: Tensor
    name: str = ""


class Named(BertForSequenceClassification):
    """It returns a class of its own."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return Pair(self.classifier(self.bert(input_ids=input_ids).pooler_output))


@pytest.mark.parametrize("kind", [Sorted, Cut, Mixed, Noisy, Noting, Named])
def test_unusual_models_run_their_heads(kind: type[Any], heads: list[Tensor]) -> None:
    settings: dict[str, Any] = {"answer_of": lambda output: output[0]} if kind is Named else {}
    cache = calibrate(own(kind), **settings)
    rows = torch.cat([row for row, _ in served(cache)[:8]])
    heads.clear()
    cache(input_ids=rows)
    assert heads and cache.stats().errors == 0


class Catching(BertForSequenceClassification):
    """It answers zeros where its trunk raises."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        try:
            pooled = self.bert(input_ids=input_ids).pooler_output
        except:  # noqa: E722 - that is what is tried
            pooled = torch.zeros(len(input_ids), 32)
        return SequenceClassifierOutput(logits=self.classifier(pooled))


def test_a_model_that_catches_everything_is_answered_all_the_same() -> None:
    cache = calibrate(own(Catching))
    kept = {source.key: source.logits for source in inside.sources(cache)}
    for row, source in served(cache):
        assert torch.equal(cache(input_ids=row).logits[0], torch.from_numpy(kept[source]))


def own(kind: type[Any], **attributes: Any) -> Any:
    """Return the classifier as a class of the user's."""
    model = classifier()
    model.__class__ = kind
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def calibrate(model: Any, **settings: Any) -> LLMCache:
    cache = LLMCache.wrap(model, max_drop=0.05, auto_bypass=False, audit=0, answer="class", **settings)
    assert cache.calibrate(batched(requests(300)[0], size=1)).is_certified
    ask(cache, requests(2, seed=7)[0])
    return cache


def test_other_outputs_are_made_by_the_model(cache: LLMCache, heads: list[Tensor]) -> None:
    ((row, _), (other, _), *_) = served(cache)
    expected = cache(input_ids=row).logits
    heads.clear()
    (logits,) = cache(input_ids=row, return_dict=False)
    torch.testing.assert_close(logits, expected, **ROUNDED)
    with torch.inference_mode():
        torch.testing.assert_close(cache.model(row).logits, expected, **ROUNDED)
    cache.model.config.return_dict = False
    assert type(cache(input_ids=other)) is tuple
    cache.model.config.return_dict = True
    assert len(heads) == 3
    mixed = torch.cat([row, requests(1, seed=77, noise=1.0)[0]])
    found = cache(input_ids=mixed).logits
    if cache.last[1].rung is None:
        torch.testing.assert_close(found[1:], classifier()(input_ids=mixed[1:]).logits)
    torch.testing.assert_close(found[:1], expected, **ROUNDED)


def test_a_forward_that_was_replaced_runs(cache: LLMCache, heads: list[Tensor]) -> None:
    ((row, _), *_), called = served(cache), list[int]()
    own = cache.model.classifier.forward
    cache.model.classifier.forward = lambda states: (called.append(1), own(states))[1]
    cache(input_ids=row)
    assert called == [1]


def test_logits_are_saved_and_gone_with_their_source(cache: LLMCache, tmp_path: Path) -> None:
    ((row, source), *_) = served(cache)
    expected = cache(input_ids=row).logits
    cache.save(tmp_path)
    with LLMCache.load(classifier(), tmp_path) as loaded:
        ask(loaded, row)
        assert torch.equal(loaded(input_ids=row).logits, expected)
        kept = {one.key: one.logits for one in inside.sources(loaded)}
        assert all(logits is not None for logits in kept.values())
        inside.sources(loaded).bury(source, "default")
        assert {one.key: one.logits for one in inside.sources(loaded)}[source] is None
        assert ask(loaded, row) != ["semantic"] or loaded.last[0].source != source
        loaded.save(tmp_path)
    with LLMCache.load(classifier(), tmp_path) as again:
        assert {one.key for one in inside.sources(again) if one.logits is None} == {source}


def test_an_error_within_the_look_up_is_no_answer(cache: LLMCache, monkeypatch: pytest.MonkeyPatch) -> None:
    ((row, _), *_), own = served(cache), classifier()
    monkeypatch.setattr(inside.sources(cache), "search", lambda *given: 1 / 0)
    torch.testing.assert_close(cache(input_ids=row).logits, own(input_ids=row).logits)
    assert cache.stats().errors == 1


def test_only_if_cached_and_outcomes_are_as_with_a_head(cache: LLMCache) -> None:
    ((row, source), *_) = served(cache)
    with cache.only_if_cached():
        assert cache(input_ids=row).logits.shape == (1, 5)
    assert (cache.last[0].rung, cache.last[0].source) == ("semantic", source)
    with cache.disabled():
        torch.testing.assert_close(cache(input_ids=row).logits, classifier()(input_ids=row).logits)
