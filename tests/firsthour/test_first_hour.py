"""Ten tasks of a first hour. Each follows one page of the docs and changes no default.

    1   serve a repeated request from memory           docs/index.md
    2   reuse answers within a bound                   docs/index.md
    3   find out why a request was computed            docs/howto.md, Ask why
    4   embed the same texts every night               docs/howto.md, A batch job
    5   keep a cache over a restart                    docs/howto.md, Save and load
    6   keep two tenants apart                         docs/howto.md, Tenants
    7   compute misses by ONNX Runtime                 docs/howto.md, ONNX Runtime
    8   chat, and compute only the new tokens          docs/generation.md
    9   serve a model over HTTP, and see the hits      docs/serving.md
    10  reproduce a measurement of the paper           docs/paper.md

Tiny models stand for those of the hub.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.commands import run_main
from tests.contract.servers import Commands
from tests.examples import DOCS, blocks, save_models, text_of
from tests.serving.served import write

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")]

Follow = Callable[..., dict[str, Any]]
N_LOG = 240  # requests of the user's own


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Follow:
    """A function that runs examples of a page, by heading, and returns the names they define."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *headings: str) -> dict[str, Any]:
        page = DOCS / name
        words = sorted(set(re.findall(r"[a-z]+", " ".join(re.findall(r'"([a-z ]+)"', "\n".join(blocks(page)))))))
        save_models(tmp_path, words)
        rng = np.random.default_rng(0)
        defined: dict[str, Any] = {"log": [" ".join(rng.choice(words, 6)) for _ in range(N_LOG)]}
        for heading in headings:
            for number, example in enumerate(blocks(page, heading)):
                exec(compile(example, f"{name}, {heading}, example {number}", "exec"), defined)
        return defined

    return run


def test_1_a_repeated_request_is_served_from_memory(follow: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    defined = follow("index.md", "Wrap a model")
    assert "exact 0.5" in capsys.readouterr().out
    assert bool((defined["first"].logits == defined["again"].logits).all())


def test_2_answers_are_reused_within_a_bound(follow: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    defined = follow("index.md", "Wrap a model", "Reuse other requests' answers")
    (needed,) = re.findall(r"at least (\d+) are needed", capsys.readouterr().out)  # the page's three are too few
    rng, words = np.random.default_rng(1), sorted({word for text in defined["texts"] for word in text.split()})
    found = defined["cache"].calibrate([" ".join(rng.choice(words, 6)) for _ in range(2 * int(needed))], max_drop=0.01)
    assert found.chosen is not None and found.chosen.bound <= 0.01
    assert "certified" in str(found)


def test_3_it_is_told_why_a_request_was_computed(follow: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    follow("howto.md", "", "Ask why")
    assert capsys.readouterr().out.splitlines()[-2:] == ["served by exact", "computed: nothing stored serves it"]


def test_4_the_same_texts_are_embedded_every_night(follow: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    follow("howto.md", "", "sentence-transformers", "A batch job")
    assert capsys.readouterr().out.splitlines()[-1] == "1.0"


def test_5_a_cache_is_kept_over_a_restart(follow: Follow) -> None:
    defined = follow("howto.md", "", "Calibrate", "Save and load")
    tokenizer, cache = defined["tokenizer"], defined["cache"]
    cache(**tokenizer(defined["log"][0], return_tensors="pt"))
    assert cache.last[0].rung in ("exact", "semantic")


def test_6_tenants_see_nothing_of_each_other(follow: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    follow("howto.md", "", "Calibrate", "Save and load", "Tenants")
    assert capsys.readouterr().out.splitlines()[-2:] == ["None", "1"]


def test_7_misses_are_computed_by_onnx_runtime(
    follow: Follow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMCACHE_HOME", str(tmp_path / "home"))
    follow("howto.md", "", "ONNX Runtime")
    told = capsys.readouterr().out
    assert "onnxruntime" in told and "n_requests=3" in told


def test_8_a_chat_computes_only_the_new_tokens(follow: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    defined = follow("generation.md", "")
    for _ in range(3):  # the first turns fill less than a block
        assert all(isinstance(piece, str) for piece in defined["chat"].ask("what is a prefix"))
        turn = defined["chat"].turn()
    assert turn.generation.n_prefix > 0


def test_9_a_server_shows_its_hits(tmp_path: Path) -> None:
    """The page's first command and its `curl`, with a model of its own."""
    commands = Commands(tmp_path)
    first = re.search(r"^curl \S+?(/\w+) .*? -d '(.*)'$", text_of(DOCS / "serving.md"), re.MULTILINE)
    assert first is not None
    write(tmp_path, "embedding")
    try:
        server = commands.serve(tmp_path / "embedding", "--save", str(tmp_path / "saved"))
        answers = [server.ask(first[1], json.loads(first[2])) for _ in range(2)]
        assert answers[0].status == 200 and np.allclose(answers[0].json, answers[1].json, atol=1e-6)
        assert re.search(r'^llmcache_requests_total{.*rung="exact"} 1', server.ask("/metrics").text, re.MULTILINE)
        assert server.stop() == 0
    finally:
        commands.close()


def test_10_a_measurement_of_the_paper_is_reproduced(tmp_path: Path) -> None:
    """The page's first command."""
    (command,) = re.findall(r"^llmcache run (configs/smoke\.yaml) +#", text_of(DOCS / "paper.md"), re.MULTILINE)
    root = DOCS.parent
    assert run_main("run", str(root / command), "--results-dir", str(tmp_path / "results")) == 0
    assert len(list((tmp_path / "results" / "smoke").glob("*/metrics.json"))) == 6
