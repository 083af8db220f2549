"""Tasks: requests as they are asked, answers as they are read, and scores worked out by hand."""

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn

from experiments.data.labelled import Labelled
from experiments.data.published import Choice, Question
from experiments.methods.cached import Cached
from experiments.models.heads import PooledClassifier, fit_logistic, pooled_states, ready
from experiments.models.loading import Loaded, encode, load
from experiments.models.onnx import OnnxModel, export
from experiments.prepare.squad_v2 import best_threshold, windows
from experiments.support.files import Folders
from experiments.tasks import make_task, squad_v2
from experiments.tasks.openbookqa import OpenBookQA
from experiments.tasks.squad_v2 import MOST_TOKENS, THRESHOLD, SquadV2, best_span, exact_match, f1, figures, in_context
from experiments.tasks.stream import Stream, divide
from experiments.tasks.wikitext import WikiText
from llmcache.errors import ConfigError
from llmcache.lab import quantise
from tests.experiments.helpers import TASK, desk, save_tiny
from tests.tiny_models import GENERATORS, save_bert
from tests.tiny_models import build as build_tiny

PASSAGE = "Zoë  moved, at last, to São Paulo 🙂 (Brazil)  in 1999."
WORDS = f"{PASSAGE} where did who go? one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_bert(tmp_path_factory.mktemp("bert") / "tiny", WORDS))


@pytest.fixture(scope="module")
def reader(folder: str) -> Loaded:
    torch.manual_seed(0)
    return load(folder, "span", is_new_head=True)


@pytest.mark.parametrize(
    ("told", "accepted", "exact", "overlap"),
    [
        ("Amazon basin", ["the Amazon Basin."], 1, 1),
        ("the big river basin", ["river delta", "big basin"], 0, 4 / 5),  # the best accepted answer counts
        ("a a b b", ["b b b c"], 0, 4 / 6),  # repeated words count as often as both have them; articles are ignored
        ("", [], 1, 1),  # rightly no answer
        ("the", ["x"], 0, 0),  # only an article
        ("", ["The", "..."], 1, 1),  # empty accepted answers count as none
        ("", ["the", "x"], 0, 0),  # beside a real one, empty ones are dropped
        ("été", ["ÉTÉ"], 1, 1),
    ],
)
def test_answers_are_scored_as_by_the_official_script(
    told: str, accepted: list[str], exact: float, overlap: float
) -> None:
    assert (exact_match(told, accepted), f1(told, accepted)) == (exact, pytest.approx(overlap))


def test_figures_are_means_over_all_questions_and_over_those_with_an_answer_or_without() -> None:
    found = figures(["x y", "x", "", "y"], [["x"], ["x", "z"], [], []])
    assert found == pytest.approx(
        {
            "exact": 2 / 4,
            "f1": (2 / 3 + 1 + 1 + 0) / 4,
            "exact_answerable": 1 / 2,
            "f1_answerable": (2 / 3 + 1) / 2,
            "exact_unanswerable": 1 / 2,
        }
    )
    assert figures(["x"], [["x"]])["exact_unanswerable"] is None and figures([""], [[]])["f1_answerable"] is None


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """Draw logits, and offsets of a question, a passage with two characters per token, and an end."""
    passage = [(2 * i, 2 * i + 2) for i in range(draw(st.integers(1, 2 * MOST_TOKENS)))]
    offsets = np.array([(-1, -1)] * draw(st.integers(1, 5)) + passage + [(-1, -1)])
    n = draw(st.integers(1, len(offsets) + 5))  # logits of another request have another length
    logits = arrays(np.float32, n, elements=st.floats(-8, 8, width=32))
    return draw(logits), draw(logits), offsets


@settings(deadline=None)
@given(cases())
def test_the_best_span_is_that_of_an_exhaustive_search(case: tuple[Any, Any, Any]) -> None:
    starts, ends, offsets = case
    span, advantage = best_span(starts, ends, offsets)
    inside = [i for i in range(min(len(starts), len(offsets))) if offsets[i, 0] >= 0]
    scores = {(i, j): starts[i] + ends[j] for i in inside for j in inside if i <= j < i + MOST_TOKENS}
    if span is None:
        assert not inside and advantage == -np.inf
        return
    found = int(np.flatnonzero(offsets[:, 0] == span[0])[0]), int(np.flatnonzero(offsets[:, 1] == span[1])[0])
    assert scores[found] == max(scores.values())
    assert advantage == pytest.approx(scores[found] - starts[0] - ends[0], abs=1e-5)


@given(
    st.lists(
        st.tuples(st.sampled_from([-np.inf, -1.0, -0.5, 0.0, 0.25, 2.0]), st.floats(0, 1), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_the_best_threshold_is_the_best(rows: list[tuple[float, float, bool]]) -> None:
    def total(threshold: float) -> float:
        return sum(gain if advantage >= threshold else float(is_none) for advantage, gain, is_none in rows)

    found = best_threshold(*map(list, zip(*rows, strict=True)))  # type: ignore[arg-type]
    assert np.isfinite(found) and total(found) == pytest.approx(max(map(total, np.arange(-3.0, 4.0, 0.125))))


def question(text: str = "Where did Zoë go?", context: str = PASSAGE, answer: str = "") -> Question:
    return Question("q", "t", text, context, ((answer, context.index(answer)),) if answer else ())


def output(length: int, start: int = 0, end: int = 0) -> Any:
    starts, ends = torch.zeros(1, length), torch.zeros(1, length)
    starts[0, start], ends[0, end] = 5.0, 5.0
    return SimpleNamespace(start_logits=starts, end_logits=ends)


@pytest.mark.parametrize("answer", ["Zoë  moved", "São Paulo 🙂", "(Brazil)  in 1999."])
def test_a_span_is_read_and_trained_as_it_stands_in_the_passage(
    answer: str, reader: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = squad_v2.encode(reader.tokenizer, "Where did Zoë go?", PASSAGE, 64)
    offsets = encoded["offset_mapping"]
    places = in_context(encoded)
    start = int(np.flatnonzero(places[:, 0] == PASSAGE.index(answer))[0])
    end = int(np.flatnonzero(places[:, 1] == PASSAGE.index(answer) + len(answer))[0])
    for threshold, told in ((9.0, answer), (11.0, "")):  # its advantage is 10
        monkeypatch.setattr(reader.model.config, THRESHOLD, threshold, raising=False)
        task = SquadV2(reader, [question(answer=answer)], 64)
        assert task.answer(output(len(places), start, end), 0) == told
    assert task.scores([answer])[0] == task.extras([answer])["exact"] == 1.0
    (example,) = windows(reader.tokenizer, [question(answer=answer)])
    assert PASSAGE[offsets[example["start_positions"]][0] : offsets[example["end_positions"]][1]] == answer
    (example,) = windows(reader.tokenizer, [question()])
    assert example["start_positions"] == example["end_positions"] == 0


def test_a_passage_that_does_not_fit_is_cut_and_nothing_to_read_is_no_answer(reader: Loaded) -> None:
    context = "one two three four five six seven eight nine ten"
    whole, cut = (SquadV2(reader, [question("who?", context)], n) for n in (64, 10))
    assert (whole.facts["share_cut"], cut.facts["share_cut"]) == (0.0, 1.0)
    n_asked = len(reader.tokenizer.tokenize("who?"))
    assert cut.answer(output(10, n_asked + 2, 8), 0) == "one two three four five"
    fits = whole.requests[0].inputs["input_ids"].shape[1]
    assert SquadV2(reader, [question("who?", context + "  ")], fits).facts["share_cut"] == 0.0
    empty = SquadV2(reader, [question(context=""), question("", "")], 64)
    assert [empty.answer(output(3), number) for number in (0, 1)] == ["", ""]
    nothing = torch.full((1, 24), torch.nan)  # states were not stored
    assert cut.answer(SimpleNamespace(start_logits=nothing, end_logits=nothing), 0) == ""


def test_of_choices_the_highest_score_is_the_answer_and_padding_changes_no_score(folder: str) -> None:
    loaded = load(folder, "choice", is_new_head=True)
    asked = Choice("three", "one two", ("three", "four five six seven eight", "nine"), 1)
    task = OpenBookQA(loaded, [asked], 64)
    assert task.requests[0].inputs["input_ids"].shape[:2] == (1, 3) and task.facts["chance"] == 1 / 3
    with torch.inference_mode():
        rows = [loaded.tokenizer(asked.stem, choice, return_tensors="pt") for choice in asked.choices]
        alone = [loaded.model(**{name: x[None] for name, x in row.items()}).logits[0, 0] for row in rows]
        together = loaded.model(**task.requests[0].inputs).logits[0]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-5, rtol=1e-4)
    told = [task.answer(SimpleNamespace(logits=torch.tensor([row])), 0) for row in ([0.0, 2.0, 1.0], [3.0, 1.0, 0.0])]
    assert told == [1, 0] and [task.scores([one]).tolist() for one in told] == [[1.0], [0.0]] and task.show(1) == "B"


class Splitting:
    """Stands for a tokenizer that splits any text into the same tokens; token 4 is `<unk>`."""

    ids = (7, 9, 4, 8, 11, 12, 13, 4, 14, 15, 16)
    decode = str

    def __call__(self, text: str, verbose: bool) -> dict[str, Any]:
        return {"input_ids": self.ids}

    def get_vocab(self) -> dict[str, int]:
        return {"<unk>": 4}


def test_windows_follow_each_other_and_figures_are_those_of_plain_computation() -> None:
    model = build_tiny(GENERATORS["gpt2"])
    task = WikiText(Loaded(model, Splitting()), ["a <unk> b"], 5, None, None)
    windows = [request.inputs["input_ids"] for request in task.requests]
    assert [tuple(window[0].tolist()) for window in windows] == [Splitting.ids[:5], Splitting.ids[5:10]]
    shares, nll = [], []
    with torch.inference_mode():
        told = [task.answer(model(window), i) for i, window in enumerate(windows)]
        for window in windows:
            chances = model(window).logits[0].softmax(dim=-1)
            targets = [(place, token) for place, token in enumerate(window[0, 1:].tolist()) if token != 4]
            shares.append(sum(int(chances[place].argmax()) == token for place, token in targets) / len(targets))
            nll += [-math.log(float(chances[place, token])) for place, token in targets]
    assert len(nll) == 6 and task.scores(told) == pytest.approx(shares)
    assert task.extras(told)["perplexity"] == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-4)
    logits = torch.zeros(1, 5, 96)
    one = task.answer(SimpleNamespace(logits=logits), 1)
    logits[0, -1, 3] = 99.0  # the last position predicts a token after the window
    assert not task.is_changed(one, task.answer(SimpleNamespace(logits=logits), 1))
    logits[0, 1, 3] = 99.0
    assert task.is_changed(one, task.answer(SimpleNamespace(logits=logits), 1))
    with pytest.raises(ConfigError, match="the text has 11 tokens, which is less than one window of 12"):
        WikiText(Loaded(model, Splitting()), ["a"], 12, None, None)


def test_labels_that_a_head_cannot_answer_are_told_and_padding_changes_no_state(tmp_path: Path) -> None:
    loaded = load(str(save_tiny(tmp_path / "tiny")))
    texts = [request.text for request in desk(40, "order_status", "cancel_order")]
    for pool in ("mean", "cls"):
        with torch.inference_mode():
            asked = (encode(loaded.tokenizer, text, 48) for text in texts)
            alone = [PooledClassifier(loaded.model, pool)(**inputs)[0].numpy() for inputs in asked]
        np.testing.assert_allclose(pooled_states(loaded, pool, texts, 48), np.stack(alone), atol=1e-5)
    one, two, strange = (
        [Labelled(0, "where is my order", label) for label in labels] for labels in ("aaa", "ab", "dca")
    )
    for fit, stream, error in (
        (two, strange, r"'c', 'd' occurs in the stream \(2 of 3 requests\) but not among the 2 that"),
        (one, one, r"only one label \('a'\)"),
    ):
        with pytest.raises(ConfigError, match=error):
            fit_logistic(loaded, "mean", fit, stream, 48)
    with pytest.raises(ConfigError, match=r"no trained classifier \(missing: classifier"):
        load(str(tmp_path / "tiny"), "class")
    classifier = load(str(save_tiny(tmp_path / "ready", ("a", "b"))), "class")
    stream = Stream(ready(classifier, two), two, 48, payload=None)
    method = Cached(stream, {"tau": -1.0, "layers": "last"})
    method.begin()
    assert method.payload == "cls" and stream.show(1) == "b"  # what the head reads, so lengths may differ
    with pytest.raises(ConfigError, match="the model does not know 'c', 'd'; it answers with 'a', 'b'"):
        ready(classifier, strange)


def test_a_held_out_stream_is_half_of_train_and_all_of_test(tmp_path: Path) -> None:
    requests = desk(110, "order_status", "cancel_order")
    (tmp_path / "set").mkdir()
    for name, part in (("train", requests[:80]), ("test", requests[80:]), ("valid", requests)):
        lines = "".join(f'"{name} {one.text}",{one.label}\n' for one in part)
        (tmp_path / "set" / f"{name}.csv").write_text(f"text,label\n{lines}", encoding="utf-8")
    task = TASK | {"limit": None, "data": {"path": "set", "order": "shuffled"}}
    known, rest = divide(make_task(task), Folders(tmp_path), 0)
    assert len(known) == 40 and {one.id for one in known}.isdisjoint(one.id for one in rest)
    assert Counter(one.text.split()[0] for one in rest) == {"train": 40, "test": 30}
    assert len({one.text.split()[0] for one in rest[:20]}) == 2  # mixed, not one file after the other
    filled = divide(make_task(task | {"is_filled": True, "max_length": 40}), Folders(tmp_path), 0)
    assert all(len(one.text.split()) >= 40 for part in filled for one in part)
    for arrival, n in (({"name": "repeats", "n": 50}, 50), ({"name": "bursts", "length": 3, "at_once": 1}, 70)):
        _, arranged = divide(make_task(task | {"arrival": arrival}), Folders(tmp_path), 0)
        assert len(arranged) == n and {one.id for one in arranged} <= {one.id for one in rest} and arranged != rest


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.body(x).relu())
        return hidden


def test_an_exported_model_is_the_model_and_its_head_stays_in_float32(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model, x = Two().eval(), torch.randn(3, 64)
    graph = export(model, {"x": x[:1]}, tmp_path / "model.onnx")
    whole, int8 = OnnxModel(graph), OnnxModel(quantise(graph, tmp_path / "int8.onnx"))
    with torch.inference_mode():
        assert torch.allclose(whole(x=x), model(x), atol=1e-5) and 0 < (int8(x=x) - model(x)).abs().max() < 0.1
    kinds = [node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node]
    assert kinds.count("MatMulInteger") == 1 == kinds.count("MatMul")
