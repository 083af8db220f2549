"""Spans: they match characters, the best one equals brute force, and any logits give an answer."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from experiments.data.squad import Question
from experiments.models.loading import Loaded, load
from experiments.prepare.squad_v2 import best_threshold, windows
from experiments.tasks.squad_v2 import MOST_TOKENS, THRESHOLD, SquadV2, best_span, encode, in_context
from tests.tiny_models import save_bert

PASSAGE = "Zoë  moved, at last, to São Paulo 🙂 (Brazil)  in 1999."
WORDS = f"{PASSAGE} where did who go? one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    torch.manual_seed(0)
    return load(str(save_bert(tmp_path_factory.mktemp("bert") / "tiny", WORDS)), "span", is_new_head=True)


def question(text: str = "Where did Zoë go?", context: str = PASSAGE, answer: str = "", title: str = "t") -> Question:
    return Question("q", title, text, context, ((answer, context.index(answer)),) if answer else ())


def output(length: int, start: int = 0, end: int = 0) -> Any:
    """Logits of a model that is sure where the answer begins and ends."""
    starts, ends = torch.zeros(1, length), torch.zeros(1, length)
    starts[0, start], ends[0, end] = 5.0, 5.0
    return SimpleNamespace(start_logits=starts, end_logits=ends)


# The best span.


def brute_force(starts: Any, ends: Any, offsets: Any) -> float:
    """Return the best span's score minus the score of no answer."""
    inside = [i for i in range(min(len(starts), len(offsets))) if offsets[i, 0] >= 0]
    scores = [starts[i] + ends[j] for i in inside for j in inside if i <= j < i + MOST_TOKENS]
    return float(max(scores) - starts[0] - ends[0])


def layout(n_asked: int, n_passage: int) -> np.ndarray:
    """Return offsets of a question, a passage with two characters per token, and an end."""
    passage = [(2 * i, 2 * i + 2) for i in range(n_passage)]
    return np.array([(-1, -1)] * n_asked + passage + [(-1, -1)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    offsets = layout(draw(st.integers(1, 5)), draw(st.integers(1, 2 * MOST_TOKENS)))
    n = draw(st.integers(1, len(offsets) + 5))  # logits of another request have another length
    logits = arrays(np.float32, n, elements=st.floats(-8, 8, width=32))
    return draw(logits), draw(logits), offsets


@settings(deadline=None)
@given(cases())
def test_best_span_is_the_best(case: tuple[Any, Any, Any]) -> None:
    starts, ends, offsets = case
    span, advantage = best_span(starts, ends, offsets)
    if not (offsets[: len(starts), 0] >= 0).any():
        assert span is None and advantage == -np.inf
        return
    assert advantage == pytest.approx(brute_force(starts, ends, offsets), abs=1e-5)
    assert span is not None
    first = int(np.flatnonzero(offsets[:, 0] == span[0])[0])
    last = int(np.flatnonzero(offsets[:, 1] == span[1])[0])
    assert first <= last < first + MOST_TOKENS and last < len(starts)
    assert starts[first] + ends[last] - starts[0] - ends[0] == pytest.approx(advantage, abs=1e-5)


# Tokens and characters.


def test_tokens_stand_for_their_characters(loaded: Loaded) -> None:
    encoded = encode(loaded.tokenizer, "Where did Zoë go?", PASSAGE, 64)
    n_asked = encoded.sequence_ids(0).index(1)
    offsets = in_context(encoded)
    assert "offset_mapping" not in encoded
    assert (offsets[:n_asked] == -1).all() and (offsets[-1] == -1).all()
    told = [PASSAGE[start:end] for start, end in offsets[n_asked:-1]]
    assert " ".join(told) == "Zoë moved , at last , to São Paulo 🙂 ( Brazil ) in 1999 ."


@pytest.mark.parametrize(
    "answer", ["Zoë", "Zoë  moved", "São Paulo 🙂", "🙂", "(Brazil)", "(Brazil)  in 1999.", "1999"]
)
def test_a_span_is_read_as_it_stands_in_the_passage(answer: str, loaded: Loaded) -> None:
    task = SquadV2(loaded, [question(answer=answer)], 64)
    places = task._offsets[0]
    begin = PASSAGE.index(answer)
    start = int(np.flatnonzero(places[:, 0] == begin)[0])
    end = int(np.flatnonzero(places[:, 1] == begin + len(answer))[0])
    assert task.answer(output(len(places), start, end), 0) == answer
    assert task.scores([answer])[0] == task.extras([answer])["exact"] == 1.0


def test_training_examples_point_at_the_answer(loaded: Loaded) -> None:
    for answer in ("Zoë  moved", "São Paulo 🙂", "1999", " (Brazil)  "):
        (example,) = windows(loaded.tokenizer, [question(answer=answer)])
        offsets = encode(loaded.tokenizer, "Where did Zoë go?", PASSAGE, 64)["offset_mapping"]
        start, end = offsets[example["start_positions"]][0], offsets[example["end_positions"]][1]
        assert PASSAGE[start:end] == answer.strip()
    (example,) = windows(loaded.tokenizer, [question()])
    assert example["start_positions"] == example["end_positions"] == 0


def test_a_passage_that_does_not_fit_is_cut(loaded: Loaded) -> None:
    context = "one two three four five six seven eight nine ten"
    whole, cut = (SquadV2(loaded, [question("who?", context)], n) for n in (64, 10))
    assert (whole.facts["share_cut"], cut.facts["share_cut"]) == (0.0, 1.0)
    assert cut.requests[0].inputs["input_ids"].shape == (1, 10)
    n_asked = len(loaded.tokenizer.tokenize("who?"))
    assert cut.answer(output(10, n_asked + 2, 8), 0) == "one two three four five"
    fits = whole.requests[0].inputs["input_ids"].shape[1]
    assert SquadV2(loaded, [question("who?", context + "  ")], fits).facts["share_cut"] == 0.0
    assert SquadV2(loaded, [question("who?", context)], fits - 1).facts["share_cut"] == 1.0


def test_nothing_to_read_is_no_answer(loaded: Loaded) -> None:
    task = SquadV2(loaded, [question(context=""), question("", "")], 64)
    assert task.facts["share_cut"] == 0.0
    for number, request in enumerate(task.requests):
        assert task.read(output(request.inputs["input_ids"].shape[1]), number) == ("", -np.inf)
        assert task.answer(output(3), number) == ""
    nothing = torch.full((1, 24), torch.nan)  # states were not stored
    assert SquadV2(loaded, [question()], 64).answer(SimpleNamespace(start_logits=nothing, end_logits=nothing), 0) == ""


@given(length=st.integers(1, 80), seed=st.integers(0, 9))
def test_logits_of_another_length_give_an_answer(length: int, seed: int, loaded: Loaded) -> None:
    task = SquadV2(loaded, [question()], 64)
    generator = torch.Generator().manual_seed(seed)
    starts, ends = torch.randn(2, 1, length, generator=generator)
    assert task.answer(SimpleNamespace(start_logits=starts, end_logits=ends), 0) in PASSAGE


def test_a_model_answers(loaded: Loaded) -> None:
    task = SquadV2(loaded, [question(), question("who?")], 64)
    with torch.inference_mode():
        told = [task.read(task.module(**request.inputs), i)[0] for i, request in enumerate(task.requests)]
    assert all(text and text in PASSAGE for text in told)
    assert task.is_changed("a", "b") and not task.is_changed("a", "a")


def test_the_threshold_of_the_config_decides(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    for threshold, told in ((9.0, "Zoë"), (11.0, "")):
        monkeypatch.setattr(loaded.model.config, THRESHOLD, threshold, raising=False)
        task = SquadV2(loaded, [question()], 64)
        first = int(np.flatnonzero(task._offsets[0][:, 0] == 0)[0])
        assert task.read(output(24, first, first), 0) == ("Zoë", 10.0)
        assert task.answer(output(24, first, first), 0) == told
        assert task.facts["no_answer_threshold"] == threshold


# The threshold.


@given(
    st.lists(
        st.tuples(st.sampled_from([-np.inf, -1.0, -0.5, 0.0, 0.25, 2.0]), st.floats(0, 1), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_best_threshold_is_the_best(rows: list[tuple[float, float, bool]]) -> None:
    def total(threshold: float) -> float:
        return sum(gain if advantage >= threshold else float(is_none) for advantage, gain, is_none in rows)

    found = best_threshold(*map(list, zip(*rows, strict=True)))  # type: ignore[arg-type]
    assert np.isfinite(found)
    assert total(found) == pytest.approx(max(map(total, np.arange(-3.0, 4.0, 0.125))))
