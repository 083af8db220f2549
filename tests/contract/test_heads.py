"""Repeats answer as the plain model does, whichever states the head reads."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import LLMCache
from tests.contract.judge import ask, check_calls, check_edits, check_same, wrapped
from tests.contract.models import SIZES
from tests.tiny_models import build, padded, tokens

Make = Callable[[], nn.Module]


def bert(**more: Any) -> Make:
    return lambda: tf.BertForSequenceClassification(tf.BertConfig(**SIZES, **more))


def roberta() -> Any:
    return tf.RobertaForSequenceClassification(tf.RobertaConfig(**SIZES))


def chooser(summary: str) -> Make:
    return lambda: tf.ElectraForMultipleChoice(tf.ElectraConfig(**SIZES, embedding_size=24, summary_type=summary))


def modern(pooling: str) -> Make:
    config = tf.ModernBertConfig(**SIZES, cls_token_id=3, sep_token_id=4, classifier_pooling=pooling)
    return lambda: tf.ModernBertForSequenceClassification(config)


class Around(nn.Module):
    """A user's module that reads more of a classifier's trunk than the head does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = bert()()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.model.bert(input_ids=input_ids, attention_mask=attention_mask)[0].mean(dim=1)  # type: ignore[no-any-return]


class OwnHead(nn.Module):
    """Reads the first state of calls of up to `longest` tokens, else the mean."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.out = nn.Linear(32, 2)
        self.longest = longest

    def forward(self, states: Tensor, **_: Any) -> Tensor:
        return self.out(states[:, 0] if states.shape[1] <= self.longest else states.mean(dim=1))  # type: ignore[no-any-return]


class MeanPooler(nn.Module):
    def forward(self, states: Tensor) -> Tensor:
        return states.mean(dim=1)


def hook(model: Any) -> None:
    model.classifier.register_forward_pre_hook(lambda _, args: (args[0].mean(1, keepdim=True).expand_as(args[0]),))


def mean_head(model: Any) -> None:
    model.classifier = OwnHead(longest=0)


def mean_pooler(model: Any) -> None:
    model.bert.pooler = MeanPooler()


def edited(make: Make, edit: Callable[[Any], object]) -> Make:
    def made() -> nn.Module:
        model = make()
        edit(model)
        return model

    return made


HEADS: dict[str, Make] = {
    "bert": bert(),
    "roberta": roberta,
    "regression": bert(num_labels=1, problem_type="regression"),
    "modernbert, cls": modern("cls"),
    "modernbert, mean": modern("mean"),
    "a head of mean": edited(roberta, mean_head),
    "a pooler of mean": edited(bert(), mean_pooler),
    "a head by length": edited(roberta, lambda model: setattr(model, "classifier", OwnHead(longest=6))),
    "a hook before the head": edited(roberta, hook),
    "around a classifier": Around,
    "choice, electra, first": chooser("first"),
    "choice, electra, mean": chooser("mean"),
    "choice, electra, cls_index": chooser("cls_index"),
}
CASES = [padded([7, 5]), padded([7, 5], left=True), {"input_ids": tokens(2, 6)}, padded([4]), padded([5, 7, 3], 9)]
CHOICES = [{name: value[None] for name, value in case.items()} for case in CASES]


def cases(name: str) -> list[dict[str, Tensor]]:
    return CHOICES if "choice" in name else CASES


@pytest.mark.parametrize("name", HEADS)
def test_a_repeat_is_answered_as_by_the_plain_model(name: str) -> None:
    """An entry keeps the states of the last layer that the head reads (inside/reuse.md, heads and payloads)."""
    with wrapped(HEADS[name]) as (cache, plain):
        assert check_calls(cache, plain, *cases(name)) > 0


#: Edits of a head, by name: the model, and the edit.
EDITS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "head": ("roberta", mean_head),
    "head that reads the same": ("bert", lambda model: setattr(model, "classifier", nn.Linear(32, 2))),
    "pooler": ("bert", mean_pooler),
    "attribute of one's own": ("a head by length", lambda model: setattr(model.classifier, "longest", 0)),
    "hook": ("roberta", hook),
    "attribute": (
        "choice, electra, first",
        lambda model: setattr(model.sequence_summary, "summary_type", "mean"),
    ),
    "config": ("modernbert, cls", lambda model: setattr(model.config, "classifier_pooling", "mean")),
    "the head's own config": ("modernbert, cls", lambda model: setattr(model.config, "classifier_pooling", "mean")),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_head_is_never_shown_less_than_it_reads(name: str) -> None:
    """After a head is edited no hit is stale or lacks states that it reads; one that reads the same is served."""
    model, edit = EDITS[name]
    own_config = edited(HEADS[model], lambda model: setattr(model, "config", deepcopy(model.config)))
    make = own_config if "own config" in name else HEADS[model]
    _, after = check_edits(make, [edit], *cases(model))
    assert after > 0 or name != "head that reads the same"


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
    """Approximate hits have zeros for padding, and serve only heads known not to read padding (inside/reuse.md)."""
    first, second = ({name: value[None] for name, value in padded([7, 5], seed).items()} for seed in (0, 50))
    with wrapped(chooser("mean"), tau=-1.0) as (cache, plain):
        ask(cache.model, **first)
        found, expected = ask(cache.model, **second).logits[0], ask(plain, **second).logits[0]
        assert [row.rung for row in cache.last] == ["paper", None]
    assert torch.isfinite(found).all()
    check_same(found[1:], expected[1:])


@pytest.mark.parametrize("payload", ["auto", "mean"])
def test_a_pooler_over_padding_on_the_left_is_the_models(payload: str) -> None:
    """It reads the first column, whose state depends on how many columns are padded."""
    model, plain = (build(lambda: tf.BertModel(tf.BertConfig(**SIZES))) for _ in range(2))
    with LLMCache.wrap(model, payload=payload), torch.inference_mode():
        for n_padding in (0, 2, 3):
            mask = torch.tensor([[0] * n_padding + [1] * 6])
            ids = torch.cat([torch.zeros(1, n_padding, dtype=torch.int64), tokens(1, 6, seed=4)], dim=1)
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
            check_same(model(**inputs).pooler_output, plain(**inputs).pooler_output)
