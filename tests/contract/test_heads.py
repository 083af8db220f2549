"""Repeats answer as the plain model does, whichever states the head reads."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import LLMCache
from tests.contract.judge import ask, check_calls, check_same
from tests.contract.models import SIZES
from tests.tiny_models import build, llama, padded, tokens

CASES = [padded([7, 5]), padded([7, 5], left=True), {"input_ids": tokens(2, 6)}, padded([4]), padded([5, 7, 3], 9)]


def wrap(model: nn.Module) -> LLMCache:
    return LLMCache.wrap(model, auto_bypass=False)


def electra(kind: Any, **more: Any) -> Callable[[], nn.Module]:
    return lambda: kind(tf.ElectraConfig(**SIZES, embedding_size=24, **more))


def bert(kind: Any = tf.BertForSequenceClassification, **more: Any) -> Callable[[], nn.Module]:
    return lambda: kind(tf.BertConfig(**SIZES, **more))


def modern(pooling: str) -> Callable[[], nn.Module]:
    config = tf.ModernBertConfig(**SIZES, cls_token_id=3, sep_token_id=4, classifier_pooling=pooling)
    return lambda: tf.ModernBertForSequenceClassification(config)


class MeanHead(nn.Module):
    """Replaces a head that reads the first state; reads the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(32, 2)

    def forward(self, states: Tensor, **_: Any) -> Any:
        return self.dense(states.mean(dim=1))


class Around(nn.Module):
    """A user's module that reads more of a classifier's trunk than the head does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.model.bert(input_ids=input_ids, attention_mask=attention_mask)[0].mean(dim=1)


class OwnHead(nn.Module):
    """Reads the first state of calls of up to `longest` tokens, else the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(32, 3)
        self.longest = 6

    def forward(self, states: Tensor, **_: Any) -> Tensor:
        return self.out(states[:, 0] if states.shape[1] <= self.longest else states.mean(dim=1))


def with_own_head() -> nn.Module:
    model = tf.RobertaForSequenceClassification(tf.RobertaConfig(**SIZES))
    model.classifier = OwnHead()
    return model


def with_hook() -> nn.Module:
    model = tf.RobertaForSequenceClassification(tf.RobertaConfig(**SIZES))
    _hook(model)
    return model


def _hook(model: Any) -> None:
    model.classifier.register_forward_pre_hook(lambda _, args: (args[0].mean(1, keepdim=True).expand_as(args[0]),))


def with_mean_head() -> nn.Module:
    model: Any = tf.RobertaForSequenceClassification(tf.RobertaConfig(**SIZES))
    model.classifier = MeanHead()
    return model


def with_mean_pooler() -> nn.Module:
    model: Any = bert()()
    model.bert.pooler = MeanPooler()
    return model


class MeanPooler(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return states.mean(dim=1)


CHOOSERS = {f"electra, {one}": electra(tf.ElectraForMultipleChoice, summary_type=one) for one in
            ("first", "mean", "cls_index")} | {"bert": bert(tf.BertForMultipleChoice)}  # fmt: skip
HEADS = {
    "bert": bert(),
    "next sentence": bert(tf.BertForNextSentencePrediction),
    "regression": bert(num_labels=1, problem_type="regression"),
    "deberta": lambda: tf.DebertaV2ForSequenceClassification(tf.DebertaV2Config(**SIZES)),
    "modernbert, cls": modern("cls"),
    "modernbert, mean": modern("mean"),
    "llama": lambda: tf.LlamaForSequenceClassification(llama(use_cache=False)),
    "a head of mean": with_mean_head,
    "a pooler of mean": with_mean_pooler,
    "a head by length": with_own_head,
    "a hook before the head": with_hook,
    "around a classifier": lambda: Around(bert()()),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_repeat_is_answered_as_by_the_plain_model(name: str) -> None:
    """An entry keeps the states of the last layer that the head reads (docs/reuse.md, heads and payloads)."""
    plain, model = build(HEADS[name]), build(HEADS[name])
    with wrap(model) as cache:
        check_calls(model, plain, *CASES)
        assert cache.stats().n_hits > 0


@pytest.mark.parametrize("name", CHOOSERS)
def test_a_repeated_choice_is_the_plain_one(name: str) -> None:
    """Heads that choose between several rows answer a repeat as the plain model does, whichever states they read."""
    plain, model = build(CHOOSERS[name]), build(CHOOSERS[name])
    cases = [{key: value[None] for key, value in case.items()} for case in CASES]
    with wrap(model) as cache:
        check_calls(model, plain, *cases)
        assert cache.stats().n_hits > 0


def of_its_own(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Give the model a config that it does not share with its trunk."""

    def made() -> nn.Module:
        model: Any = make()
        model.config = deepcopy(model.config)
        return model

    return made


def _exchange(model: Any) -> None:
    torch.manual_seed(1)
    model.classifier = MeanHead().eval()


def _exchange_pooler(model: Any) -> None:
    model.bert.pooler = MeanPooler()


def _summarise(model: Any) -> None:
    model.sequence_summary.summary_type = "mean"


def _pool_otherwise(model: Any) -> None:
    model.config.classifier_pooling = "mean"


@pytest.mark.parametrize(
    ("make", "edit", "choices"),
    [
        (lambda: tf.RobertaForSequenceClassification(tf.RobertaConfig(**SIZES)), _exchange, False),
        (bert(), _exchange_pooler, False),
        (with_own_head, lambda model: setattr(model.classifier, "longest", 0), False),
        (lambda: tf.RobertaForSequenceClassification(tf.RobertaConfig(**SIZES)), _hook, False),
        (electra(tf.ElectraForMultipleChoice), _summarise, True),
        (modern("cls"), _pool_otherwise, False),
        (of_its_own(modern("cls")), _pool_otherwise, False),
    ],
    ids=["head", "pooler", "attribute of one's own", "hook", "attribute", "config", "the head's config"],
)
def test_a_head_that_is_exchanged_after_wrapping_is_never_shown_less_than_it_reads(
    make: Callable[[], nn.Module], edit: Callable[[Any], None], choices: bool
) -> None:
    """After a head is replaced, no hit is stale or lacks states that the head reads (docs/reuse.md)."""
    plain, model = build(make), build(make)
    cases = [{key: value[None] if choices else value for key, value in case.items()} for case in CASES]
    with wrap(model):
        check_calls(model, plain, *cases)
        edit(plain)
        edit(model)
        check_calls(model, plain, *cases)


@pytest.mark.parametrize("settings", [{}, {"tau": 0.999}], ids=["exact", "tau"])
def test_a_padding_id_that_changes_between_calls(settings: dict[str, Any]) -> None:
    """A classifier that finds the last token by its config's padding id is served the state there (docs/reuse.md)."""
    make = of_its_own(HEADS["llama"])
    plain, model = build(make), build(make)
    calls = [padded([5, 7]), {"input_ids": tokens(2, 6)}]
    calls[1]["input_ids"][:, 4:] = 95
    with LLMCache.wrap(model, auto_bypass=False, **settings) as cache:
        for pad_id in (0, 95, 0, 95):
            plain.config.pad_token_id = model.config.pad_token_id = pad_id
            check_calls(model, plain, *calls)
        assert cache.stats().n_hits > 0


def test_a_head_that_is_exchanged_for_one_of_its_kind_is_served() -> None:
    """Exact repeats stay on after a head is replaced by another that reads the same states."""
    plain, model = build(HEADS["bert"]), build(HEADS["bert"])
    with wrap(model) as cache:
        check_calls(model, plain, *CASES)
        for one in (plain, model):
            torch.manual_seed(1)
            one.classifier = nn.Linear(32, 4)
        before = cache.stats().n_hits
        check_calls(model, plain, *CASES)
        assert cache.stats().n_hits > before


def test_wrapping_leaves_the_model_alone() -> None:
    """Wrapping runs no hook of the user's, draws no random number and changes no buffer, mode or gradient."""
    model: Any = build(HEADS["bert"])
    seen: list[str] = []
    for name, part in model.named_modules():
        part.register_forward_hook(lambda *_, name=name: seen.append(name))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    LLMCache.wrap(model).unwrap()
    assert torch.equal(torch.rand(3), expected)
    assert seen == [] and model.training and torch.is_grad_enabled()
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    check_same(dict(model.named_buffers()), buffers, exact=True)


def test_a_head_that_reads_padding_is_not_given_another_request_s() -> None:
    """Approximate hits have zeros for padding, and serve only heads known not to read padding (docs/reuse.md)."""
    make = electra(tf.ElectraForMultipleChoice, summary_type="mean")
    plain, model = build(make), build(make)
    first, second = ({key: value[None] for key, value in padded([7, 5], seed).items()} for seed in (0, 50))
    with LLMCache.wrap(model, tau=-1.0) as cache:
        ask(model, **first)
        found, expected = ask(model, **second).logits[0], ask(plain, **second).logits[0]
        assert [row.rung for row in cache.last] == ["paper", None]
    assert torch.isfinite(found).all()
    check_same(found[1:], expected[1:])
