"""examples/: notebooks run from the first cell to the last, workers share vectors, the Space's page answers."""

import importlib.util
import json
import multiprocessing
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from experiments.data.labelled import made_requests
from llmcache import LLMCache
from tests.examples import ROOT, save_models
from tests.forks import needs_fork
from tests.serving.served import byte_tokenizer, decoder
from tests.tiny_models import save_bert

EXAMPLES = ROOT / "examples"
#: What tests run on less of: requests, documents, a tiny model, and a prompt that its context holds.
SMALLER = {
    "[1200:]": "[1200:1500]",
    "[:1000]": "[:200]",
    "50 * ": "10 * ",
    "[-1][50:]": "[-1][10:]",
    "packaged_minilm()": "tiny",
    'SYSTEM = "': 'SYSTEM = "short"; _ = "',
}
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of plots that nobody sees


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def save_sentence_model(folder: Path, text: str, *after: nn.Module) -> None:
    """Save a tiny model of sentence-transformers that knows the words of a text."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    trunk = modules.Transformer(str(save_bert(folder.with_name("bert"), text)))
    parts = [trunk, modules.Pooling(32, pooling_mode="mean"), *after]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder))


def dense() -> nn.Module:
    from sentence_transformers.sentence_transformer.modules import Dense

    return Dense(32, 6, activation_function=nn.Identity())


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda one: one.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tiny models where the notebook would make one; its committed outputs have a plot and no error."""
    import matplotlib

    matplotlib.use("Agg")
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    models = tmp_path / "build" / "models"
    if notebook.stem == "chat":
        decoder().save_pretrained(models / "smollm2")
        byte_tokenizer().save_pretrained(models / "smollm2")
    else:
        words = " ".join(one.text for one in made_requests(2000, seed=1))
        after = [dense()] if notebook.stem == "classifier" else []
        save_sentence_model(models / "minilm-support-desk", words, *after)
    defined: dict[str, Any] = {"tiny": models / "minilm-support-desk"}
    for number, cell in enumerate(cells(notebook)):
        source = "".join(cell["source"])
        for whole, small in SMALLER.items():
            source = source.replace(whole, small)
        exec(compile(source, f"{notebook.name}, cell {number}", "exec"), defined)
    if notebook.stem == "nightly":
        assert defined["hits"][0] < 0.02 and min(defined["hits"][1:]) >= 0.949
    else:
        assert len(defined["plain"]) == len(defined["cached"])
    if notebook.stem == "classifier":
        changed = [one != other for one, other in zip(defined["plain"], defined["cached"], strict=True)]
        assert "exact" in defined["rungs"] and sum(changed) <= 0.05 * len(changed)
    if notebook.stem == "chat":
        assert defined["plain"] == defined["cached"] and max(defined["known"]) > 0
    outputs = [output for cell in cells(notebook) for output in cell["outputs"]]
    assert any("image/png" in one.get("data", {}) for one in outputs)
    assert not [one for one in outputs if one["output_type"] == "error"]


@needs_fork
def test_workers_share_what_they_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers are forked from the test, and not spawned: libraries load once."""
    save_sentence_model(tmp_path / "model", " ".join(f"document {number}" for number in range(64)))
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    monkeypatch.setattr(sys, "argv", ["workers.py", str(tmp_path / "model"), str(tmp_path / "vectors")])
    for share in ("0%", "100%"):
        runpy.run_path(str(EXAMPLES / "workers.py"), run_name="__main__")
        assert capsys.readouterr().out == f"64 vectors, {share} of the texts were known\n"


def test_the_space_answers_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradio = pytest.importorskip("gradio")
    save_models(tmp_path, ["the", "parcel", "came", "late"])
    monkeypatch.setenv("MODEL", str(tmp_path / "distilbert" / "distilbert-base-uncased-finetuned-sst-2-english"))
    spec = importlib.util.spec_from_file_location("space", EXAMPLES / "space" / "app.py")
    assert spec is not None and spec.loader is not None
    space = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(space)
    first, second = (space.classify("the parcel came late") for _ in range(2))
    assert first[0] == second[0] and sum(first[0].values()) == pytest.approx(1)
    assert first[1].startswith("computed in") and second[1].startswith("exact in") and "<table" in second[2]
    with pytest.raises(gradio.Error, match="Type a text first"):
        space.classify(" ")
    assert isinstance(space.cache, LLMCache)
    space.cache.unwrap()
