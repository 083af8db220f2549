"""Training: the seed decides order and dropout, and mixed precision ends with the run."""

from pathlib import Path

import pytest
import torch

from experiments.data.openbookqa import read_openbookqa
from experiments.models.loading import load
from experiments.prepare import openbookqa, training
from experiments.prepare.openbookqa import Collator
from experiments.tasks.openbookqa import OpenBookQA


def test_the_seed_decides_order_and_dropout_too(data: Path, base: Path, tmp_path: Path) -> None:
    questions = read_openbookqa("train", data)[:16]
    found = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(0)
        loaded = load(str(base), "choice", is_new_head=True)
        collate = Collator(loaded.tokenizer)
        schedule = training.Schedule(epochs=1, batch_size=4, learning_rate=1e-3)
        training.train(loaded.model, questions, collate, schedule, tmp_path / folder, seed, "phase")
        found.append(loaded.model.state_dict()["classifier.weight"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_a_trained_model_computes_as_a_loaded_one(
    data: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_has_fast_bf16", lambda: True)
    order = training.Order(str(base), tmp_path / "m", data, limit=24, epochs=1)
    loaded, _ = openbookqa.prepare(order)
    loaded.model.save_pretrained(tmp_path / "m")  # type: ignore[operator]
    loaded.tokenizer.save_pretrained(tmp_path / "m")
    again = load(str(tmp_path / "m"), "choice")
    inputs = OpenBookQA(loaded, read_openbookqa("test", data)[:1], 64).requests[0].inputs
    with torch.inference_mode():
        assert torch.equal(loaded.model(**inputs).logits, again.model(**inputs).logits)
