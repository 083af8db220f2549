"""`llmcache prepare` on tiny data: every recipe end to end; interrupted, resumed, repeated and refused runs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.cli.options import INTERRUPTED
from experiments.data.labelled import Data, read_requests, split
from experiments.data.squad import Question, read_squad
from experiments.models.loading import load
from experiments.prepare import squad_v2, trainer, training
from experiments.support.files import Folders
from experiments.tasks import build, make_task
from llmcache.errors import ConfigError
from tests.experiments.commands import Commands

PATHS = ["snips/train.seq.in", "mine.csv"]
KINDS = {"squad_v2": "span", "openbookqa": "choice", "wikitext": "token"}  # others: class


@dataclass
class Prepare:
    """Runs the command with tiny data and the tiny base model."""

    command: Commands
    options: list[str]
    models: Path

    def __call__(self, *words: str) -> int:
        """Run the command; return its exit status. `words` come last, so that their options win."""
        return self.command("prepare", *self.options, f"--models-dir={self.models}", *words)

    def refused(self, *words: str) -> str:
        return self.command.refused("prepare", *self.options, f"--models-dir={self.models}", *words)

    def weights(self, recipe: str) -> dict[str, Tensor]:
        kind = KINDS.get(recipe.partition("-")[2], "class")
        return load(recipe, kind, self.models).model.state_dict()

    def figures(self, recipe: str) -> dict[str, Any]:
        return json.loads((self.models / recipe / "metrics.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture
def prepare(data: Path, base: Path, tmp_path: Path, command: Commands) -> Prepare:
    options = [f"--data-dir={data}", f"--base={base}", "--limit=24", "--epochs=1"]
    return Prepare(command, options, tmp_path / "models")


#: By recipe: the model's figure, and its baseline.
FIGURES = {
    "minilm-squad_v2": ("evaluation: f1", "always no answer: f1"),
    "minilm-openbookqa": ("test", "chance"),
    "minilm-banking77": ("accuracy", "commonest"),
    "minilm-snips": ("accuracy", "commonest"),
    "minilm-hwu64": ("accuracy", "commonest"),
    "gpt2-wikitext": ("test: accuracy", "test: unigram: accuracy"),
}


@pytest.mark.parametrize("recipe", FIGURES)
def test_every_training(recipe: str, prepare: Prepare, command: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare(recipe) == 0
    assert all(line.startswith("Training (") for line in command.err.splitlines())  # progress, if it takes seconds
    *table, last = command.out.splitlines()
    assert last.startswith(f"made: {prepare.models / recipe}; in Python: transformers.")
    assert table[0] == recipe
    figures = prepare.figures(recipe)
    for name in FIGURES[recipe]:
        value: Any = figures
        for key in name.split(": "):
            value = value[key.replace(" ", "_")]
        assert 0 <= value <= 1
        assert f"{name} " in command.out
    assert figures["recipe"] == recipe and figures["options"]["limit"] == 24
    assert not (prepare.models / recipe / "checkpoints").exists()
    assert prepare.weights(recipe)
    monkeypatch.setattr(trainer.SavingTrainer, "train", None)
    assert prepare(recipe) == 0
    assert command.out.splitlines() == [*table, last.replace("made", "there already", 1)]


def test_a_prepared_classifier_is_asked_the_other_half(prepare: Prepare, data: Path) -> None:
    assert prepare("minilm-snips", "--epochs=30") == 0
    loaded, figures = load("minilm-snips", "class", prepare.models), prepare.figures("minilm-snips")
    names = loaded.model.config.id2label
    assert names == {i: f"intent {i}" for i in range(5)}
    requests = read_requests(Data.make({"path": "snips", "limit": 24}), data, seed=0)
    seen, unseen = split(requests, figures["fit_share"], figures["seed"])
    assert (figures["n_train"], figures["n_test"]) == (len(seen), len(unseen)) == (12, 12)
    with torch.inference_mode():
        scores = [loaded.model(**loaded.tokenizer(request.text, return_tensors="pt")).logits for request in unseen]
    told = zip(scores, unseen, strict=True)
    assert figures["accuracy"] == sum(names[int(score.argmax())] == request.label for score, request in told) / 12
    commonest = max({request.label for request in seen}, key=[request.label for request in seen].count)
    assert figures["commonest"] == sum(request.label == commonest for request in unseen) / 12

    def asked(seed: int = 0, fit_share: float = 0.5, **source: Any) -> list[str]:
        head = {"kind": "ready", "fit_share": fit_share}
        values = {"name": "stream", "model": "minilm-snips", "head": head, "data": {"path": "snips", **source}}
        return [request.text for request in build(make_task(values), Folders(data, prepare.models), seed).requests]

    assert sorted(asked(limit=24, order="shuffled")) == sorted(request.text for request in unseen)
    (data / "mine.csv").write_text("text,label\nto Paris,intent 0\n", encoding="utf-8")
    assert asked(path="mine.csv", fit_share=0.0, seed=1) == ["to Paris"]  # it was not trained on other data
    for other, error in (
        ({"limit": 24, "seed": 1}, r"^model: 'minilm-snips' was trained on a part of snips; .* seed=0 \(got 1\)$"),
        ({}, r" with data.limit=24 \(got None\)$"),
        ({"limit": 8, "fit_share": 0.0}, r" with data.limit=24 \(got 8\), head.fit_share=0.5 \(got 0.0\)$"),
        ({"limit": 24, "path": PATHS}, rf" with data.path=snips \(got {', '.join(PATHS)}\)$"),
    ):
        with pytest.raises(ConfigError, match=error):
            asked(**other)


def test_held_out_articles_are_not_trained_on(prepare: Prepare, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Question] = []
    given: list[str] = []
    monkeypatch.setattr(squad_v2, "windows", lambda tokenizer, asked: trained.extend(asked) or [{"input_ids": [0]}])
    monkeypatch.setattr(squad_v2, "train", lambda *args: None)
    monkeypatch.setattr(squad_v2, "make_clozes", lambda passages, *args: given.extend(passages) or [])
    assert prepare("minilm-squad_v2") == 0
    held_out = set(prepare.figures("minilm-squad_v2")["held_out_articles"])
    questions = read_squad("train", data)
    assert held_out and held_out < {question.title for question in questions}
    assert {question.title for question in trained} == {question.title for question in questions} - held_out
    assert not {question.context for question in questions if question.title in held_out} & set(given)


class Interrupting:
    """Interrupts training at step `last` as Ctrl-C does; records the steps done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
        self.steps: list[int] = []
        self.last = last
        monkeypatch.setattr(training, "SAVE_EVERY", 2)
        monkeypatch.setattr(trainer.Bar, "on_step_end", self.on_step_end)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.steps.append(state.global_step)
        if state.global_step == self.last:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("recipe", "phase"), [("minilm-openbookqa", "openbookqa"), ("minilm-squad_v2", "squad")])
def test_an_interrupted_training_goes_on(
    recipe: str, phase: str, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(squad_v2, "N_CLOZES", 1)  # one step
    options = (recipe, "--epochs=2")
    assert prepare(*options) == 0
    expected = prepare.weights(recipe)
    prepare.models = prepare.models.with_name("interrupted")
    steps = Interrupting(monkeypatch, last=3)
    assert prepare(*options) == INTERRUPTED
    assert prepare.command.err.startswith(
        f"llmcache: {recipe}: interrupted; the same command goes on from the last checkpoint"
    )
    assert prepare.command.out == ""
    checkpoints = prepare.models / recipe / "checkpoints" / phase
    assert [path.name for path in checkpoints.glob("checkpoint-*")] == ["checkpoint-2"]
    (checkpoints / "checkpoint-4").mkdir()  # unfinished
    steps.steps.clear()
    steps.last = -1
    assert prepare(*options) == 0
    assert steps.steps[0] == 3
    found = prepare.weights(recipe)
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["no-such"], "recipe: 'no-such' is not known; known: minilm-squad_v2, "),
        (["minilm-snips", "no-such"], "recipe: 'no-such' is not known"),
        (["minilm-snips", "--epochs=0"], "epochs: must be more than 0 (got 0.0)"),
        (["minilm-snips", "--base=/no/such"], "model: '/no/such' could not be loaded (Repo id must"),
        (["minilm-snips", "--data-dir=/no/such"], "data.path: no file /no/such/snips/train.seq.in; say where"),
        (["minilm-squad_v2", "--data-dir=/no/such"], "data: no file /no/such/squad_v2/train-subset.json; say where"),
        (["minilm-openbookqa", "--data-dir=/no/such"], "data: no file /no/such/openbookqa/train.jsonl; say where"),
        (["gpt2-wikitext", "--data-dir=/no/such"], "data: no file /no/such/wikitext/wikitext-2_train.tokens.txt;"),
    ],
)
def test_one_line_errors(words: list[str], line: str, prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.SavingTrainer, "train", None)
    assert prepare.refused(*words).startswith(line)
    assert not list(prepare.models.glob("*/metrics.json"))
