"""`llmcache advise` and `llmcache calibrate`: logs in each format, and what is refused in a line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments.models.onnx import export
from llmcache import LLMCache
from llmcache.advice import encoder
from llmcache.cli.log_file import read_log
from llmcache.errors import ConfigError
from tests.commands import run_main
from tests.contract.streams import classifier
from tests.fixtures import Patch, Shown
from tests.tiny_models import BARE, build, tokenizer


class Renamed(nn.Module):
    """Takes token ids by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.within = classifier()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.within(input_ids=ids).logits
        return logits


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Folder of a tiny classifier with its tokenizer."""
    folder = tmp_path / "model"
    made = classifier()
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "log.txt"
    path.write_text("".join(" ".join(f"w{word}" for word in rng.integers(30, size=5)) + "\n" for _ in range(400)))
    return path


@pytest.mark.parametrize(
    ("name", "text", "column", "found"),
    [
        ("a.txt", "one\n\n two \n", None, ["one", " two "]),
        ("a.csv", 'id,text\n1,one\n2,"two, three"\n', None, ["one", "two, three"]),
        ("a.csv", "words\none\n", None, ["one"]),
        ("a.csv", "id,said\n1,one\n", "said", ["one"]),
        ("a.jsonl", '{"prompt": "one"}\n\n{"prompt": "two"}\n', None, ["one", "two"]),
        ("a.jsonl", '"one"\n', None, ["one"]),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "one"}]}\n',
            None,
            [[{"role": "user", "content": "one"}]],
        ),
    ],
)
def test_a_log_in_each_format(name: str, text: str, column: str | None, found: list[Any], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_log(tmp_path / name, column) == found


@pytest.mark.parametrize(
    ("name", "text", "column", "error"),
    [
        ("a.txt", "\n \n", None, "it has no requests"),
        ("a.csv", "", None, "choose the column .* it has none"),
        ("a.csv", "id,said\n1,one\n", None, "--column: id, said"),
        ("a.csv", "id,said\n1,one\n", "text", "--column: id, said"),
        ("a.txt", "one\n", "text", "a .txt file has none"),
        ("a.parquet", "", None, "one of these formats: .txt, .csv, .jsonl"),
        ("a.jsonl", "{\n", None, "record 1 is not valid JSON"),
        ("a.jsonl", '{"text": 5}\n', None, "record 1 is a int"),
        ("a.jsonl", '{"text": "one"}\n{"said": "two"}\n', None, "record 2 has no 'text', but said"),
        ("a.jsonl", '{"text": "one"}\n', "said", "record 1 has no 'said', but text"),
    ],
)
def test_a_log_that_cannot_be_read(name: str, text: str, column: str | None, error: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=error):
        read_log(tmp_path / name, column)
    (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        read_log(tmp_path / name, column)


def test_advise_prints_a_table_and_writes_figures(
    model: Path, log: Path, tmp_path: Path, monkeypatch: Patch, capsys: Shown
) -> None:
    monkeypatch.setattr(encoder, "find_missing", lambda: "onnx")
    words = ["advise", "--model", model, "--log", log, "--max-drop", "0.05", "--seconds", "0.2"]
    assert run_main(*map(str, words), "--json", str(tmp_path / "found.json")) == 0
    told = capsys.readouterr().out
    assert "the model alone" in told and "llmcache, exact repeats" in told and "seed" not in told
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["best"] in told and found["recommendation"] in told

    def interrupted(self: Any, *given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(encoder.EncoderTrial, "_exact", interrupted)
    assert run_main(*map(str, words)) == 130
    assert "interrupted, so ways are missing" in capsys.readouterr().out


@pytest.mark.slow
def test_advice_for_a_session(model: Path, log: Path, tmp_path: Path, monkeypatch: Patch, capsys: Shown) -> None:
    path = export(classifier(), {"input_ids": torch.tensor([[3, 9]])}, tmp_path / "model.onnx")
    words = [*map(str, ("--model", model, "--log", log, "--onnx", path)), "--max-drop", "0.05", "--seconds", "0.2"]
    assert run_main("advise", *words) == 0
    told = capsys.readouterr().out
    assert "the session alone" in told and "without --onnx, an int8 draft" in told
    export(Renamed(), {"ids": torch.tensor([[3, 9]])}, path)
    assert run_main("advise", *words) == 2
    assert "must take input_ids" in capsys.readouterr().err
    monkeypatch.setattr("llmcache.engines.onnx.find_missing", lambda: "onnx")
    assert run_main("advise", *words) == 2
    captured = capsys.readouterr()
    assert "--onnx needs onnx: pip install" in captured.err and captured.err.count("\n") == 1


def test_calibrate_saves_what_serve_loads(model: Path, log: Path, tmp_path: Path, capsys: Shown) -> None:
    words = ["calibrate", "--model", model, "--log", log, "--out", tmp_path / "saved", "--max-drop"]
    assert run_main(*map(str, words), "0.3") == 0
    assert f"--save {tmp_path / 'saved'}" in capsys.readouterr().out
    with LLMCache.load(classifier(), tmp_path / "saved", tokenizer=tokenizer()) as cache:
        assert cache.calibration is not None and cache.calibration.chosen is not None


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"log": "w1 w2\n" * 50}, "50 requests: advice needs at least 200"),
        ({"log": ""}, "it has no requests"),
        ({"log": "unheard of words everywhere\n" * 300}, "in its language?"),
        ({"max_drop": "2"}, "max_drop"),
        ({"model": "bare"}, "returns none of them"),
        ({"model": "nowhere"}, "could not be loaded"),
        ({"onnx": "not a graph"}, "--onnx "),
    ],
)
def test_advise_refuses_in_a_line(change: dict[str, str], error: str, model: Path, log: Path, capsys: Shown) -> None:
    if "log" in change:
        log.write_text(change["log"])
    folder = str(model)
    if (name := change.get("model")) is not None:
        folder = str(model.with_name(name))
    if name == "bare":
        build(BARE["bert"]).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    words = ["--model", folder, "--log", str(log), "--max-drop", change.get("max_drop", "0.05")]
    if "onnx" in change:
        (log.parent / "model.onnx").write_text(change["onnx"])
        words += ["--onnx", str(log.parent / "model.onnx")]
    capsys.readouterr()
    assert run_main("advise", *words) == 2
    captured = capsys.readouterr()
    assert error in captured.err and captured.err.count("\n") == 1 and captured.out == ""
