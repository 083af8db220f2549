"""Tasks of a first hour. Each follows one page of the docs and changes no default; models are tiny ones.

Two more are elsewhere: misses by ONNX Runtime in the tests of the pages, and a measurement of the paper (the first
command of docs/paper.md) in those of `llmcache run`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.servers import Commands
from tests.examples import DOCS, run, text_of
from tests.serving.served import write

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")]

Follow = Callable[..., dict[str, Any]]


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Follow:
    """Runs examples of a page, by heading, and returns the names they define."""
    monkeypatch.chdir(tmp_path)
    return lambda name, *headings: run(tmp_path, DOCS / name, *headings)


#: By task: headings of docs/howto.md, and what their examples print at the end.
TOLD: dict[str, tuple[list[str], str]] = {
    "find out why a request was computed": (["Ask why"], r"served by exact\ncomputed: nothing stored serves it"),
    "embed the same texts every night": (["sentence-transformers", "A batch job"], r"1\.0"),
    "keep a cache over a restart and two tenants apart": (["Calibrate", "Save and load", "Tenants"], r"None\n1"),
}


@pytest.mark.parametrize("task", TOLD)
def test_what_a_page_prints(task: str, follow: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    headings, told = TOLD[task]
    defined = follow("howto.md", "", *headings)
    assert re.search(rf"(^|\n){told}\n\Z", capsys.readouterr().out, re.DOTALL)
    if "restart" in task:
        defined["cache"](**defined["tokenizer"](defined["log"][0], return_tensors="pt"))
        assert defined["cache"].last[0].rung in ("exact", "semantic")


def test_answers_are_reused_within_a_bound(follow: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    defined = follow("index.md", "Wrap a model", "Reuse other requests' answers")
    (needed,) = re.findall(r"at least (\d+) are needed", capsys.readouterr().out)  # the page's three are too few
    rng, words = np.random.default_rng(1), sorted({word for text in defined["texts"] for word in text.split()})
    found = defined["cache"].calibrate([" ".join(rng.choice(words, 6)) for _ in range(2 * int(needed))], max_drop=0.01)
    assert found.chosen is not None and found.chosen.bound <= 0.01
    assert "certified" in str(found)


def test_a_chat_computes_only_the_new_tokens(follow: Follow) -> None:
    defined = follow("generation.md", "")
    for _ in range(3):  # the first turns fill less than a block
        assert all(isinstance(piece, str) for piece in defined["chat"].ask("what is a prefix"))
        turn = defined["chat"].turn()
    assert turn.generation.n_prefix > 0


def test_a_server_shows_its_hits(tmp_path: Path) -> None:
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
