"""`llmcache generate` and `llmcache repl`: answers, their figures, and one-line errors."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcache.generation.chat import Answer
from llmcache.generation.prompt_cache import PromptCache
from tests.commands import run_main
from tests.tiny_data import passage
from tests.tiny_prompts import write_prompts

FEW = ["--max-new-tokens", "4"]
LONG = " ".join(passage(i) for i in range(9))
Say = Callable[..., None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the model `tiny`, whose context has 512 tokens."""
    return str(write_prompts(tmp_path_factory.mktemp("prompts")).models)


def generate(models: str, *more: str) -> int:
    return run_main("generate", "--model", "tiny", "--models-dir", models, *FEW, *more)


def talk(models: str, *more: str) -> int:
    return run_main("repl", "--model", "tiny", "--models-dir", models, *FEW, *more)


def test_one_prompt_is_answered_and_told(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "told.json"
    assert generate(models, "--prompt", passage(1)[:60], "--verbose", "--json", str(kept)) == 0
    shown, told = capsys.readouterr().out, json.loads(kept.read_text())
    assert shown.startswith(told["text"])
    assert f"prompt new, {told['n_prompt']} tokens; 0 of {told['n_prompt']} from the store (computed)" in shown
    assert len(told["tokens"]) == len(told["logprobs"]) <= 4
    assert told["e2el_s"] == pytest.approx(told["ttft_s"] + sum(told["itl_s"]))
    assert told["kv_nbytes"] == 2 * 3 * 32 * (told["n_prompt"] + len(told["tokens"]) - 1) * 4
    assert generate(models, "--prompt", passage(1)[:60]) == 0
    assert capsys.readouterr().out == told["text"] + "\n"


def test_a_line_that_is_not_utf_8_is_refused_and_the_next_one_answered(
    models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\na\n/caf\xe9\n"), encoding="utf-8"))
    assert talk(models) == 0
    shown = capsys.readouterr()
    assert "the prompt is no valid text: character" in shown.err and "no command '/caf\\udce9'" in shown.err
    assert len(shown.out.split("> ")) == 5 and shown.out.split("> ")[2].strip()


def test_seeded_draws_come_again(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for seed in ("1", "1", "2"):
        drawn = ("--do-sample", "--top-k", "50", "--temperature", "9", "--seed", seed)
        assert generate(models, "--prompt", "a", *drawn) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--model", "nowhere"], "model: 'nowhere' could not be loaded"),
        (["--temperature", "0.5"], "temperature=0.5 has no effect on greedy tokens"),
        (["--do-sample", "--top-p", "1.5"], "top_p=1.5: give a share of probability"),
        (["--max-new-tokens", "0"], "max_new_tokens=0: give a whole number"),
        (["--max-new-tokens", "512"], "max_new_tokens=512: the model's context has 512 tokens"),
        (["--prompt", LONG], "of which the model can take 508 here"),
    ],
)
def test_bad_input_is_one_line(models: str, more: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(models, "--prompt", "a", *more) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("llmcache: ") and told in error


def test_a_conversation_goes_on_and_says_what_came_from_where(
    models: str, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    say(passage(1)[:200], "and then", "", "/stats", "/clear", passage(1)[:200], "/quit", "never read")
    assert talk(models, "--system", "one two", "--verbose") == 0
    shown = capsys.readouterr().out
    assert shown.count("prompt new") == 2 and shown.count("prompt known") == 1
    assert "(prefix)" in shown and "(exact)" in shown and "(computed)" in shown
    assert "prompt tokens from a stored prefix" in shown and "served" in shown and "cleared" in shown
    assert "never read" not in shown


@pytest.mark.parametrize(
    ("lines", "told", "n_answered"),
    [
        (["/nothing"], "no command '/nothing'", 0),
        (["a \udcff b", "a"], "llmcache: the prompt is no valid text: character 2", 1),
        ([LONG, "a", KeyboardInterrupt()], "llmcache: the prompt has", 1),
    ],
)
def test_what_cannot_be_taken_as_it_is_is_told_and_the_conversation_goes_on(
    lines: list[Any], told: str, n_answered: int, models: str, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    say(*lines)
    assert talk(models, "--verbose") == 0
    shown = capsys.readouterr()
    assert told in shown.err
    assert shown.out.count("prompt new") == n_answered
    assert n_answered or "/stats" in shown.out  # lists the commands


def test_a_prompt_that_was_cut_off_is_told(models: str, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    say(LONG)
    assert talk(models, "--truncate", "left") == 0
    assert "llmcache: cut off on the left:" in capsys.readouterr().err
    assert generate(models, "--prompt", LONG, "--truncate", "left") == 0
    assert "llmcache: cut off on the left:" in capsys.readouterr().err


def test_an_interruption_before_the_answer_begins_is_survived(
    models: str, say: Say, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PromptCache, "encode", stop)
    say("a b c")
    assert talk(models, "--verbose") == 0
    shown = capsys.readouterr()
    assert shown.out.count("interrupted") == 1
    assert "prompt" not in shown.err


def test_an_interrupted_answer_is_forgotten(
    models: str, say: Say, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(answer: Answer) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Answer, "__next__", stop)
    say("a b c", "a b c")
    assert talk(models, "--verbose") == 0
    shown = capsys.readouterr().out
    assert shown.count("interrupted") == shown.count("no token") == 2
    assert shown.count("prompt known") == 1  # the first question is not in the second prompt
