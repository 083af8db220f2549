"""Language modelling: figures equal a plain computation; windows repeat at the given shares."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.models.loading import Loaded
from experiments.prepare.wikitext import make_tokenizer
from experiments.tasks.wikitext import Repeats, WikiText, repeat
from llmcache.errors import ConfigError
from tests.tiny_models import GENERATORS, build, tokenizer

LINES = ["w1 w2 w3 <unk> w5 w6", "w7 <unk> w9 w10 w11 w12", "w13 w14 w15 w16 w17"]
WINDOW = 5
UNK = 4  # the token of "<unk>" below


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    words = tokenizer()
    vocabulary = words.get_vocab()
    words.get_vocab = lambda: vocabulary | {"<unk>": UNK}  # type: ignore[method-assign]
    return Loaded(build(GENERATORS["gpt2"]), Splitting(words))


def repeats_of(whole: float, prefix: float, changed: float, share_replaced: float, seed: int) -> Repeats:
    values = {"whole": whole, "prefix": prefix, "changed": changed, "share_replaced": share_replaced, "seed": seed}
    return Repeats.make(values, "repeats")


class Splitting:
    """A tokenizer of whole words, without special tokens around texts; `<unk>` has its own token."""

    def __init__(self, words: Any) -> None:
        self.vocabulary = words.get_vocab()

    def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [self.vocabulary[word] for word in text.split()]}

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))

    def __len__(self) -> int:
        return 96


def words(text: str) -> list[int]:
    return [UNK if word == "<unk>" else 5 + int(word[1:]) for word in text.split()]


def test_windows_follow_each_other(loaded: Loaded) -> None:
    task = WikiText(loaded, LINES, WINDOW, None, None)
    ids = words(" ".join(LINES))
    assert [request.inputs["input_ids"][0].tolist() for request in task.requests] == [ids[:5], ids[5:10], ids[10:15]]
    assert [request.id for request in task.requests] == ["0-new", "1-new", "2-new"]
    assert all((request.inputs["attention_mask"] == 1).all() for request in task.requests)
    assert task.facts == {"unk_rate": 2 / 17, "words_per_token": 1.0, "shares": {"new": 1.0}}
    assert len(WikiText(loaded, LINES, WINDOW, 2, None).requests) == 2


def test_figures_against_plain_computation(loaded: Loaded) -> None:
    task = WikiText(loaded, LINES, WINDOW, None, None)
    with torch.inference_mode():
        told = [task.answer(task.module(**request.inputs), i) for i, request in enumerate(task.requests)]
        shares, nll = [], []
        for request in task.requests:
            ids = request.inputs["input_ids"]
            chances = loaded.model(input_ids=ids).logits[0].softmax(dim=-1)
            targets = [(place, token) for place, token in enumerate(ids[0, 1:].tolist()) if token != UNK]
            shares.append(sum(int(chances[place].argmax()) == token for place, token in targets) / len(targets))
            nll += [-math.log(float(chances[place, token])) for place, token in targets]
    assert len(nll) == 3 * (WINDOW - 1) - 2
    assert task.scores(told) == pytest.approx(shares)
    perplexity = math.exp(sum(nll) / len(nll))
    assert task.extras(told) == {
        "perplexity": pytest.approx(perplexity, rel=1e-4),
        "word_perplexity": pytest.approx(perplexity, rel=1e-4),
    }


def test_answers_differ_by_their_tokens(loaded: Loaded) -> None:
    task = WikiText(loaded, LINES, WINDOW, None, None)
    logits = torch.zeros(1, WINDOW, 96)
    right = task.requests[1].reference[1:]
    logits[0, range(WINDOW - 1), right] = 50.0
    logits[0, 0, 3] = 99.0
    sure = task.answer(SimpleNamespace(logits=logits), 1)
    assert sure.tokens.tolist() == [3, *right[1:]]
    logits[0, -1] = torch.arange(96)  # the last position predicts a token after the window
    assert not task.is_changed(sure, task.answer(SimpleNamespace(logits=logits), 1))
    logits[0, 1, 3] = 99.0
    assert task.is_changed(sure, task.answer(SimpleNamespace(logits=logits), 1))


def test_a_text_shorter_than_a_window(loaded: Loaded) -> None:
    with pytest.raises(ConfigError, match=r"the text has 17 tokens, which is less than one window of 18"):
        WikiText(loaded, LINES, 18, None, None)


# Repeated windows.

FRESH = np.arange(400 * 8).reshape(400, 8)  # unique tokens show each row's source


@settings(deadline=None, max_examples=20)
@given(
    shares=st.tuples(*[st.floats(0, 0.33)] * 3),
    share_replaced=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_windows_come_back_as_said(shares: tuple[float, float, float], share_replaced: float, seed: int) -> None:
    repeats = repeats_of(*shares, share_replaced, seed)
    rows, kinds, sources = repeat(FRESH, repeats, len(FRESH))
    again, *_ = repeat(FRESH, repeats, len(FRESH))
    assert rows.shape == FRESH.shape and (rows == again).all() and kinds[0] == "new"
    n_replaced = max(1, round(share_replaced * 8))
    unused = iter(FRESH)
    for number, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        same = (rows[:number] == row).sum(axis=1) if number else np.zeros(1)
        if kind == "new":
            assert (row == next(unused)).all()
        elif kind == "whole":
            assert same.max() == 8
        elif kind == "prefix":
            assert (rows[:number, :4] == row[:4]).all(axis=1).any()
            assert (row[4:] == next(unused)[4:]).all()
        else:
            assert kind == "changed" and 8 - n_replaced in same
    for kind, share in zip(("whole", "prefix", "changed"), shares, strict=True):
        assert kinds.count(kind) / 400 == pytest.approx(share, abs=0.13)  # over five standard deviations
    shorter, _, _ = repeat(FRESH, repeats, 150)
    assert (shorter == rows[:150]).all()
    assert {kinds[source] for source in sources} == {"new"}
    assert repeat(FRESH, repeats_of(*shares, share_replaced, seed + 1), len(FRESH))[1] != kinds or sum(shares) < 0.05


def test_the_task_streams_them(loaded: Loaded) -> None:
    lines = [" ".join(f"w{i % 80}" for i in range(600))]
    task = WikiText(loaded, lines, WINDOW, 100, repeats_of(0.5, 0.25, 0.0, 0.1, 3))
    assert len(task.requests) == 100
    kinds = [request.id.partition("-")[2] for request in task.requests]
    assert task.facts["shares"] == {kind: kinds.count(kind) / 100 for kind in ("new", "prefix", "whole")}
    assert len({request.text for request in task.requests}) < 60


# The recipe's tokenizer.


def test_the_recipes_tokenizer_gives_back_the_text() -> None:
    made = make_tokenizer(["One été , 1999 .", "two <unk> words"])
    text = "two <unk> été 🙂  end"
    ids = made(text)["input_ids"]
    assert made.decode(ids) == text
    assert ids.count(made.get_vocab()["<unk>"]) == 1
