"""`llmcache prepare`: every recipe from end to end on tiny data, interrupted, resumed, repeated, refused."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import prepare as recipes
from experiments.data.labelled import Data, read_requests
from experiments.data.squad import Question, read_squad
from experiments.data.wikitext import read_wikitext
from experiments.models.loading import load
from experiments.prepare import RECIPES, squad_v2, trainer, training
from experiments.support.folders import Folders
from experiments.support.lock import held
from experiments.tasks import build, make_task
from experiments.tasks.split import split
from experiments.tasks.squad_v2 import SquadV2
from experiments.tasks.wikitext import WikiText
from experiments.tasks.workload import Workload
from llmcache.cli import main as cli
from llmcache.cli.output import INTERRUPTED
from llmcache.errors import ConfigError

KINDS = {"squad_v2": "span", "openbookqa": "choice", "wikitext": "token"}  # of the others: class


@pytest.fixture
def call(data: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> "Call":
    return Call(data, base, tmp_path / "models", capsys)


class Call:
    """Runs the command with the tiny data and base, and keeps what it printed."""

    def __init__(self, data: Path, base: Path, models: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.models = models
        self.out = ""
        self.err = ""
        self._options = [f"--data-dir={data}", f"--base={base}", "--limit=24", "--epochs=1"]
        self._capsys = capsys

    def __call__(self, *words: str, models: Path | None = None) -> int:
        """Exit status; words come last, so that their options win."""
        with pytest.raises(SystemExit) as done:
            cli.main(["prepare", *self._options, f"--models-dir={models or self.models}", *words])
        self.out, self.err = self._capsys.readouterr()
        return int(done.value.code or 0)

    def weights(self, recipe: str) -> dict[str, Tensor]:
        kind = KINDS.get(recipe.partition("-")[2], "class")
        return load(recipe, kind, self.models).model.state_dict()


def never(*args: object, **options: object) -> None:
    raise AssertionError("it trains again")


#: By recipe: the figure of the model, and the one of knowing nothing that stands beside it.
FIGURES = {
    "minilm-squad_v2": (("evaluation", "f1"), ("always_no_answer", "f1")),
    "minilm-openbookqa": (("test",), ("chance",)),
    "minilm-banking77": (("accuracy",), ("commonest",)),
    "minilm-snips": (("accuracy",), ("commonest",)),
    "minilm-hwu64": (("accuracy",), ("commonest",)),
    "gpt2-wikitext": (("test", "accuracy"), ("test", "unigram", "accuracy")),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FIGURES)
def test_every_training(recipe: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(recipe) == 0
    assert call.err == ""
    *table, last = call.out.splitlines()
    assert last == f"made: {call.models / recipe}"
    assert table[0] == recipe
    figures = json.loads((call.models / recipe / "metrics.json").read_text())
    for path in FIGURES[recipe]:
        value = figures
        for key in path:
            value = value[key]
        assert 0 <= value <= 1
        assert f"{': '.join(path).replace('_', ' ')} " in call.out
    assert figures["recipe"] == recipe and figures["options"]["limit"] == 24
    assert not (call.models / recipe / "checkpoints").exists()
    assert call.weights(recipe)
    monkeypatch.setattr(trainer.SavingTrainer, "train", never)
    assert call(recipe) == 0
    assert call.out.splitlines() == [*table, f"there already: {call.models / recipe}"]


def figures_of(call: Call, recipe: str) -> dict[str, Any]:
    return json.loads((call.models / recipe / "metrics.json").read_text())  # type: ignore[no-any-return]


def answers(task: Workload) -> list[Any]:
    with torch.inference_mode():
        return [task.answer(task.module(**request.inputs), i) for i, request in enumerate(task.requests)]


@pytest.mark.slow
def test_a_prepared_classifier_gives_its_figure_on_the_other_half(call: Call, data: Path) -> None:
    assert call("minilm-snips", "--epochs=30") == 0
    loaded, figures = load("minilm-snips", "class", call.models), figures_of(call, "minilm-snips")
    assert loaded.model.config.id2label == {i: f"intent {i}" for i in range(5)}
    requests = read_requests(Data.make({"path": "snips", "limit": 24}), data, seed=0)
    seen, unseen = split(requests, figures["fit_share"], figures["seed"])
    assert (figures["n_train"], figures["n_test"]) == (len(seen), len(unseen)) == (12, 12)
    n_right = 0
    for request in unseen:
        with torch.inference_mode():
            told = int(loaded.model(**loaded.tokenizer(request.text, return_tensors="pt")).logits.argmax())
        n_right += loaded.model.config.id2label[told] == request.label
    assert figures["accuracy"] == n_right / 12
    commonest = max({request.label for request in seen}, key=[request.label for request in seen].count)
    assert figures["commonest"] == sum(request.label == commonest for request in unseen) / 12


@pytest.mark.slow
def test_a_prepared_classifier_is_not_asked_what_it_was_trained_on(call: Call, data: Path) -> None:
    assert call("minilm-snips") == 0

    def asked(seed: int = 0, fit_share: float = 0.5, **source: Any) -> list[str]:
        head = {"kind": "ready", "fit_share": fit_share}
        values = {"name": "stream", "model": "minilm-snips", "head": head, "data": {"path": "snips", **source}}
        return [request.text for request in build(make_task(values), Folders(data, call.models), seed).requests]

    _, unseen = split(read_requests(Data.make({"path": "snips", "limit": 24}), data), 0.5, 0)
    assert sorted(asked(limit=24, order="shuffled")) == sorted(request.text for request in unseen)
    with pytest.raises(
        ConfigError, match=r"^model: 'minilm-snips' was trained on a part of snips; .* seed=0 \(got 1\)$"
    ):
        asked(limit=24, seed=1)
    with pytest.raises(ConfigError, match=r" with data.limit=24 \(got None\)$"):
        asked()
    with pytest.raises(ConfigError, match=r" with data.limit=24 \(got 8\), head.fit_share=0.5 \(got 0.0\)$"):
        asked(limit=8, fit_share=0.0)
    with pytest.raises(ConfigError, match=r" with data.path=snips \(got snips/train.seq.in, mine.csv\)$"):
        asked(limit=24, path=["snips/train.seq.in", "mine.csv"])
    (data / "mine.csv").write_text("text,label\nto Paris,intent 0\n", encoding="utf-8")
    assert asked(path="mine.csv", fit_share=0.0, seed=1) == ["to Paris"]  # of other data it saw nothing


@pytest.mark.slow
def test_a_prepared_span_model_gives_its_figures_with_its_threshold(call: Call, data: Path) -> None:
    assert call("minilm-squad_v2", "--epochs=2") == 0
    loaded, figures = load("minilm-squad_v2", "span", call.models), figures_of(call, "minilm-squad_v2")
    task = SquadV2(loaded, read_squad("validation", data)[:24], 384)
    assert task.facts["no_answer_threshold"] == figures["threshold"]
    assert task.extras(answers(task)) == pytest.approx(figures["evaluation"])
    assert figures["always_no_answer"]["f1"] == task.facts["share_unanswerable"]


@pytest.mark.slow
def test_a_prepared_language_model_gives_its_figures(call: Call, data: Path) -> None:
    assert call("gpt2-wikitext") == 0
    loaded, figures = load("gpt2-wikitext", "token", call.models), figures_of(call, "gpt2-wikitext")
    task = WikiText(loaded, read_wikitext("test", data), 128, 24, None)
    told = answers(task)
    assert figures["test"]["accuracy"] == pytest.approx(task.scores(told).mean())
    assert figures["test"]["perplexity"] == pytest.approx(task.extras(told)["perplexity"], rel=1e-4)


def test_held_out_articles_are_not_trained_on(call: Call, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Question] = []
    given: list[str] = []
    monkeypatch.setattr(squad_v2, "windows", lambda tokenizer, asked: trained.extend(asked) or [{"input_ids": [0]}])
    monkeypatch.setattr(squad_v2, "train", lambda *args: None)
    monkeypatch.setattr(squad_v2, "make_clozes", lambda passages, *args: given.extend(passages) or [])
    assert call("minilm-squad_v2") == 0
    held_out = set(figures_of(call, "minilm-squad_v2")["held_out_articles"])
    questions = read_squad("train", data)
    assert held_out and held_out < {question.title for question in questions}
    assert {question.title for question in trained} == {question.title for question in questions} - held_out
    assert not {question.context for question in questions if question.title in held_out} & set(given)


class Interrupting:
    """Ends the training with Ctrl-C after some steps, and notes which steps were done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
        self.steps: list[int] = []
        self.last = last
        monkeypatch.setattr(training, "SAVE_EVERY", 2)
        monkeypatch.setattr(trainer.Bar, "on_step_end", self.on_step_end)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.steps.append(state.global_step)
        if state.global_step == self.last:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "phase"), [("minilm-openbookqa", "openbookqa"), ("minilm-squad_v2", "squad")])
def test_an_interrupted_training_goes_on(recipe: str, phase: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squad_v2, "N_CLOZES", 1)  # one step
    options = (recipe, "--epochs=2")
    assert call(*options) == 0
    expected = call.weights(recipe)
    call.models = call.models.with_name("interrupted")
    steps = Interrupting(monkeypatch, last=3)
    assert call(*options) == INTERRUPTED
    assert call.err.startswith(f"llmcache: {recipe}: interrupted; the same command goes on from the last checkpoint")
    assert call.out == ""
    checkpoints = call.models / recipe / "checkpoints" / phase
    assert [path.name for path in checkpoints.glob("checkpoint-*")] == ["checkpoint-2"]
    (checkpoints / "checkpoint-4").mkdir()  # one that was being written
    steps.steps.clear()
    steps.last = -1
    assert call(*options) == 0
    assert steps.steps[0] == 3
    found = call.weights(recipe)
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.slow
def test_seeds(call: Call) -> None:
    found = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        call.models = call.models.with_name(folder)
        assert call("minilm-banking77", "gpt2-wikitext", f"--seed={seed}") == 0
        found.append({**call.weights("minilm-banking77"), **call.weights("gpt2-wikitext")})
    same, other = ([name for name, tensor in found[0].items() if torch.equal(tensor, more[name])] for more in found[1:])
    assert len(same) == len(found[0])
    assert "classifier.weight" not in other and "transformer.wte.weight" not in other


@pytest.mark.slow
@pytest.mark.parametrize("change", ["--seed=1", "--limit=25", "--epochs=2"])
def test_other_options_are_no_second_half(change: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        Interrupting(patched, last=1)
        assert call("minilm-openbookqa") == INTERRUPTED
    assert call("minilm-openbookqa", change) == 2
    theirs = {"--seed=1": "--seed 0", "--limit=25": "--limit 24", "--epochs=2": "--epochs 1.0"}[change]
    assert f": a training with {theirs} was interrupted here; give that again, or delete the folder" in call.err
    assert call("minilm-openbookqa") == 0
    assert call("minilm-openbookqa", change) == 2
    assert f": made with {theirs}, not with {change.replace('=', ' ')}" in call.err
    assert "; give what it was made with, or delete the folder" in call.err


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
def test_one_line_errors(words: list[str], line: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.SavingTrainer, "train", never)
    assert call(*words) == 2
    assert call.err.startswith(f"llmcache: {line}") and call.err.count("\n") == 1
    assert call.out == ""
    assert not list(call.models.glob("*/metrics.json"))


def test_a_folder_that_cannot_be_made(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert call("minilm-snips", models=tmp_path / "file") == 2
    assert call.err == f"llmcache: {tmp_path}/file: File exists\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_checkpoints", "n_bytes", "folder"),
    [
        (True, 20_000, "minilm-openbookqa/checkpoints/openbookqa"),  # a checkpoint's weights
        (True, 200_000, "minilm-openbookqa/checkpoints/openbookqa"),  # its optimizer's state, which is twice their size
        (False, 20_000, "minilm-openbookqa"),  # weights of the model itself
    ],
)
def test_a_full_disk_is_one_line(
    has_checkpoints: bool, n_bytes: int, folder: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there of a checkpoint does no harm: with more room, the same command goes on."""
    if not has_checkpoints:
        monkeypatch.setattr(trainer.SavingTrainer, "_save_checkpoint", lambda *args: None)
    with files_of_at_most(n_bytes):
        assert call("minilm-openbookqa") == 2
    assert call.err.count("\n") == 1
    assert call.err.startswith(f"llmcache: {call.models / folder}: could not be written; is the disk full? (")
    assert call.out == ""
    assert call("minilm-openbookqa") == 0


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """Let the system refuse to write more into a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_one_process_trains_a_model(call: Call) -> None:
    with held(call.models / ".minilm-snips.lock"):
        assert call("minilm-snips") == 2
        assert call.err == f"llmcache: {call.models}: another process holds .minilm-snips.lock; wait for it to end\n"
    assert call("minilm-snips") == 0
    assert [path.name for path in call.models.glob("[!.]*")] == ["minilm-snips"]
    with held(call.models / ".minilm-snips.lock"):
        assert call("minilm-snips") == 0  # what is there needs nobody's leave


@pytest.mark.slow
def test_a_model_that_another_process_finished_meanwhile_is_kept(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("minilm-snips") == 0
    metrics = call.models / "minilm-snips" / "metrics.json"
    hidden = metrics.rename(metrics.with_name("hidden"))

    @contextmanager
    def finished(lock: Path) -> Iterator[None]:
        hidden.rename(metrics)
        yield

    monkeypatch.setattr(recipes, "held", finished)
    monkeypatch.setattr(trainer.SavingTrainer, "train", never)
    assert call("minilm-snips") == 0
    assert "there already" in call.out


def test_too_little_text(call: Call, tmp_path: Path) -> None:
    (tmp_path / "wikitext").mkdir()
    (tmp_path / "wikitext" / "wikitext-2_train.tokens.txt").write_text("three words only")
    assert call("gpt2-wikitext", f"--data-dir={tmp_path}") == 2
    assert call.err == "llmcache: prepare: wikitext: no examples to train on; give more data, or a higher limit\n"


def test_questions_with_different_numbers_of_choices(call: Call, tmp_path: Path) -> None:
    (tmp_path / "openbookqa").mkdir()
    lines = [
        {"id": "x", "question": {"stem": "s", "choices": [{"text": "t", "label": x} for x in labels]}, "answerKey": "A"}
        for labels in ("ABC", "ABCDE")
    ]
    (tmp_path / "openbookqa" / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert call("minilm-openbookqa", f"--data-dir={tmp_path}") == 2
    assert call.err == "llmcache: openbookqa: training takes questions with one number of choices (got [3, 5])\n"


def test_training_needs_its_package(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: object) -> None:
        raise ImportError("no accelerate")

    monkeypatch.setattr("transformers.TrainingArguments", fail)
    assert call("minilm-snips") == 2
    assert call.err == "llmcache: prepare: training needs a package: pip install 'llmcache[exp]'\n"


def test_all_is_every_recipe(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def note(recipe: str, *args: object, **options: object) -> tuple[dict[str, Any], bool]:
        made.append(recipe)
        return {"n": 1234, "f1": 0.123456, "missing": None, "titles": ["a", "b"], "test": {"x_y": 2}}, True

    monkeypatch.setattr(recipes, "prepare", note)
    assert call("all") == 0
    assert made == list(RECIPES)
    rows = [line.split() for line in call.out.splitlines()[3:8]]
    assert rows == [["n", "1,234"], ["f1", "0.1235"], ["missing"], ["titles", "a,", "b"], ["test:", "x", "y", "2"]]
