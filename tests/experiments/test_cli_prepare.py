"""`llmcache prepare` on tiny data: every recipe end to end; interrupted, resumed, repeated and refused runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.cli.options import INTERRUPTED
from experiments.data.labelled import Data, read_requests, split
from experiments.data.published import Question, read_squad
from experiments.models.loading import load, prepared_figures
from experiments.prepare import squad_v2, trainer, training
from experiments.support.files import Folders
from experiments.tasks import build, make_task
from llmcache.errors import ConfigError
from tests.experiments.commands import Commands

Prepare = Callable[..., int]
#: By recipe: kind of head, and where the model's figure and its baseline are.
RECIPES = {
    "minilm-squad_v2": ("span", "evaluation: f1", "always no answer: f1"),
    "minilm-openbookqa": ("choice", "test", "chance"),
    "minilm-banking77": ("class", "accuracy", "commonest"),
    "minilm-hwu64": ("class", "accuracy", "commonest"),
    "gpt2-wikitext": ("token", "test: accuracy", "test: unigram: accuracy"),
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def prepare(data: Path, base: Path, models: Path, command: Commands) -> Prepare:
    """Runs the command with tiny data and the tiny base model; its own words come last, so that their options win."""
    options = (f"--data-dir={data}", f"--base={base}", "--limit=24", "--epochs=1", f"--models-dir={models}")
    return lambda *words: command("prepare", *options, *words)


def figures(models: Path, recipe: str) -> Any:
    return prepared_figures(recipe, models)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_training(
    recipe: str, prepare: Prepare, models: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, *shown = RECIPES[recipe]
    assert prepare(recipe) == 0
    *table, last = command.out.splitlines()
    assert last.startswith(f"made: {models / recipe}; in Python: transformers.")
    assert table[0] == recipe and all(f"{name} " in command.out for name in shown)
    assert figures(models, recipe)["options"]["limit"] == 24 and load(recipe, kind, models)
    assert not (models / recipe / "checkpoints").exists()
    monkeypatch.setattr(trainer.SavingTrainer, "train", None)
    assert prepare(recipe) == 0
    assert command.out.splitlines() == [*table, last.replace("made", "there already", 1)]


def test_a_prepared_classifier_is_asked_the_other_half(prepare: Prepare, data: Path, models: Path) -> None:
    assert prepare("minilm-snips", "--epochs=30") == 0
    loaded, known = load("minilm-snips", "class", models), figures(models, "minilm-snips")
    requests = read_requests(Data.make({"path": "snips", "limit": 24}), data, seed=0)
    seen, unseen = split(requests, known["fit_share"], known["seed"])
    assert (known["n_train"], known["n_test"]) == (len(seen), len(unseen)) == (12, 12)
    with torch.inference_mode():
        scores = [loaded.model(**loaded.tokenizer(request.text, return_tensors="pt")).logits for request in unseen]
    told = [loaded.model.config.id2label[int(score.argmax())] for score in scores]
    labels = [request.label for request in unseen]
    assert known["accuracy"] == sum(one == other for one, other in zip(told, labels, strict=True)) / 12
    commonest = max({request.label for request in seen}, key=[request.label for request in seen].count)
    assert known["commonest"] == labels.count(commonest) / 12

    def asked(seed: int = 0, fit_share: float = 0.5, **source: Any) -> list[str]:
        head = {"kind": "ready", "fit_share": fit_share}
        values = {"name": "stream", "model": "minilm-snips", "head": head, "data": {"path": "snips", **source}}
        return [request.text for request in build(make_task(values), Folders(data, models), seed).requests]

    assert sorted(asked(limit=24, order="shuffled")) == sorted(request.text for request in unseen)
    for other, error in (
        ({"limit": 24, "seed": 1}, r"^model: 'minilm-snips' was trained on a part of snips; .* seed=0 \(got 1\)$"),
        ({"limit": 8, "fit_share": 0.0}, r" with data.limit=24 \(got 8\), head.fit_share=0.5 \(got 0.0\)$"),
        ({"limit": 24, "path": ["snips/train.seq.in"]}, r" with data.path=snips \(got snips/train.seq.in\)$"),
    ):
        with pytest.raises(ConfigError, match=error):
            asked(**other)


def test_held_out_articles_are_not_trained_on(
    prepare: Prepare, data: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Question] = []
    given: list[str] = []
    monkeypatch.setattr(squad_v2, "windows", lambda tokenizer, asked: trained.extend(asked) or [{"input_ids": [0]}])
    monkeypatch.setattr(squad_v2, "train", lambda *args: None)
    monkeypatch.setattr(squad_v2, "make_clozes", lambda passages, *args: given.extend(passages) or [])
    assert prepare("minilm-squad_v2") == 0
    held_out = set(figures(models, "minilm-squad_v2")["held_out_articles"])
    questions = read_squad("train", data)
    assert held_out and {question.title for question in trained} == {q.title for q in questions} - held_out
    assert not {question.context for question in questions if question.title in held_out} & set(given)


def test_an_interrupted_training_goes_on(
    prepare: Prepare, models: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, steps, last = "minilm-openbookqa", list[int](), 0
    monkeypatch.setattr(training, "SAVE_EVERY", 2)

    def step(bar: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        steps.append(state.global_step)
        if state.global_step == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer.Bar, "on_step_end", step)
    assert prepare(recipe, "--epochs=2") == 0
    expected, last = load(recipe, "choice", models).model.state_dict(), 3
    assert prepare(recipe, "--epochs=2", f"--models-dir={models / 'again'}") == INTERRUPTED
    assert command.err.startswith(f"llmcache: {recipe}: interrupted; the same command goes on from the last checkpoint")
    checkpoints = models / "again" / recipe / "checkpoints" / "openbookqa"
    assert [path.name for path in checkpoints.glob("checkpoint-*")] == ["checkpoint-2"]
    (checkpoints / "checkpoint-4").mkdir()  # unfinished
    steps.clear()
    last = 0
    assert prepare(recipe, "--epochs=2", f"--models-dir={models / 'again'}") == 0
    found = load(recipe, "choice", models / "again").model.state_dict()
    assert steps[0] == 3 and all(torch.equal(found[name], tensor) for name, tensor in expected.items())
