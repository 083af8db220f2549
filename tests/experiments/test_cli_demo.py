"""`llmcache demo`: both acts on tiny models, and the rules behind its speed-ups and sentences."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.measures import demo
from experiments.models import loading
from experiments.models.loading import UNTRAINED, load
from tests.experiments.commands import Commands


def test_the_demo_shows_and_keeps_what_it_measures(
    tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMCACHE_MODELS", raising=False)
    classifier, decoder = load(UNTRAINED), load(UNTRAINED, "token")
    decoder.tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    monkeypatch.setattr(loading, "load", lambda name, *rest: decoder if name == loading.SMOLLM2 else classifier)
    monkeypatch.setattr(demo, "find_spec", lambda name: None)  # no ONNX Runtime: an export takes long
    for name, value in {"LEARN": 100, "N_FIT": 100, "MAX_DROPS": (0.3,)}.items():
        monkeypatch.setattr(demo, name, value)
    assert command("demo", "--n", 150, "--json", "figures.json", "--results-dir", "kept") == 0
    report = json.loads(Path("figures.json").read_text())
    _, *rows = report["settings"]
    assert [row["name"] for row in rows] == list(demo.ways()) and rows[0]["changed_answers"] == 0
    assert all(sentence in command.out for sentence in report["conclusion"])
    assert "is left out: no smollm2 in models. Get it: llmcache prepare smollm2 --models-dir models\n" in command.out
    assert Path("llmcache-demo.png").read_bytes().startswith(b"\x89PNG")
    env = json.loads(Path("kept/demo/env.json").read_text())
    assert json.loads(Path("kept/demo/metrics.json").read_text()) | {"environment": env} == report
    monkeypatch.setattr(demo, "run_demo", lambda *given: report | {"environment": env | {"load_average": 99}})
    Path("models/smollm2").mkdir(parents=True)
    Path("models/smollm2", loading.FIGURES).touch()
    assert command("demo") == 0
    assert command.out.startswith("The machine was busy")
    assert "5 of 5 answers are the same, token for token" in command.out


def test_the_demos_speed_is_of_whole_passes_and_its_sentences_follow_the_rows() -> None:
    base: Any = [SimpleNamespace(ms=np.array(ms), drained_s=0.0) for ms in ([1000.0, 2000.0], [3000.0, 4000.0])]
    taken: Any = SimpleNamespace(ms=np.array([500.0, 1000.0]), drained_s=0.5)
    assert [*demo._speedup(base, taken, 0).values()] == [2.5, 1.5, 3.5]  # of (3 + 7) / 2, 3 and 7 s, and 2 s
    assert [*demo._speedup(base, taken, 1).values()] == pytest.approx([2, 4 / 3, 8 / 3])

    def told(changed: float, bound: float | None, **options: Any) -> list[str]:
        row = {"name": "some", "options": options, "hit_rate": 0.4, "speedup": 1.5, "changed_answers": changed}
        return demo.conclude([row | {"bound": bound}])

    (one,) = told(0.02, None, tau=0.85)
    assert "tau 0.85" in one and "no bound" in one and "2.00% of the answers changed" in one
    (one,) = told(0.003, 0.005, max_drop=0.005)
    assert "at most 0.5% of all answers may change" in one and "0.30% of the answers changed" in one
    (one,) = told(0.003, 0.005, max_drop=0.005, draft="int8")
    assert one.startswith("With ONNX Runtime and an int8 draft") and "40% not computed, 1.50 times as fast" in one
    (one,) = told(0.03, 0.02, max_drop=0.02)
    assert one.startswith("some: 3.00% of the answers changed, more than its bound")
