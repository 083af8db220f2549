"""`llmcache generate` and `llmcache repl`: answers, what they tell of themselves, and bad input in one line."""

import builtins
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmcache.cli import main as cli
from llmcache.generation.chat import Answer
from llmcache.generation.prompt_cache import PromptCache
from tests.tiny_data import passage
from tests.tiny_prompts import write_prompts

FEW = ["--max-new-tokens", "4"]
Say = Callable[..., None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the model `tiny`, whose context has 512 tokens."""
    return str(write_prompts(tmp_path_factory.mktemp("prompts")).models)


def run_main(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(args)
    return int(exit_info.value.code or 0)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Iterator[Say]:
    """Says lines to the conversation; an exception among them is raised instead."""

    def give(*lines: str | BaseException) -> None:
        left = iter(lines)

        def answer(prompt: str) -> str:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", answer)

    yield give


def test_one_prompt_is_answered_and_told(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "told.json"
    args = ["generate", "--model", "tiny", "--models-dir", models, "--prompt", passage(1)[:60], *FEW]
    assert run_main(*args, "--verbose", "--json", str(kept)) == 0
    shown, told = capsys.readouterr().out, json.loads(kept.read_text())
    assert shown.startswith(told["text"])
    assert f"prompt new, {told['n_prompt']} tokens; 0 of {told['n_prompt']} from the store (computed)" in shown
    assert len(told["tokens"]) == len(told["logprobs"]) <= 4
    assert told["e2el_s"] == pytest.approx(told["ttft_s"] + sum(told["itl_s"]))
    assert told["kv_nbytes"] == 2 * 3 * 32 * (told["n_prompt"] + len(told["tokens"]) - 1) * 4
    assert run_main(*args) == 0
    assert capsys.readouterr().out == told["text"] + "\n"


def test_a_line_that_is_not_utf_8_is_refused_and_the_next_one_answered(
    models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\na\n/caf\xe9\n"), encoding="utf-8"))
    assert run_main("repl", "--model", "tiny", "--models-dir", models, *FEW) == 0
    shown = capsys.readouterr()
    assert "the prompt is no valid text: character" in shown.err and "no command '/caf\\udce9'" in shown.err
    assert len(shown.out.split("> ")) == 5 and shown.out.split("> ")[2].strip()


def test_seeded_draws_come_again(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "generate",
        "--model",
        "tiny",
        "--models-dir",
        models,
        "--prompt",
        "a",
        *FEW,
        "--do-sample",
        "--top-k",
        "50",
    ]
    answers = []
    for seed in ("1", "1", "2"):
        assert run_main(*args, "--temperature", "9", "--seed", seed) == 0
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
        (["--prompt", " ".join(passage(i) for i in range(9))], "of which the model can take 384 here"),
    ],
)
def test_bad_input_is_one_line(models: str, more: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = {"--model": "tiny", "--models-dir": models, "--prompt": "a"}
    plain = [part for pair in args.items() for part in pair]
    assert run_main("generate", *plain, *more) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("llmcache: ") and told in error


def talk(models: str, *more: str) -> int:
    return run_main("repl", "--model", "tiny", "--models-dir", models, *FEW, *more)


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


def test_unknown_commands_list_those_there_are(models: str, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    say("/nothing")
    assert talk(models) == 0
    told = capsys.readouterr()
    assert "/stats" in told.out and "no command '/nothing'" in told.err


def test_what_was_left_out_is_told(models: str, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    long = " ".join(passage(i) for i in range(9))
    say(long)
    assert talk(models, "--truncate", "left") == 0
    assert "llmcache: cut off on the left:" in capsys.readouterr().err
    plain = ["generate", "--model", "tiny", "--models-dir", models, "--prompt", long, "--truncate", "left", *FEW]
    assert run_main(*plain) == 0
    assert "llmcache: cut off on the left:" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_told_and_the_conversation_goes_on(
    models: str, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    say("a \udcff b", "a")
    assert talk(models, "--verbose") == 0
    told = capsys.readouterr()
    assert "llmcache: the prompt is no valid text: character 2" in told.err
    assert told.out.count("prompt new") == 1


def test_what_cannot_be_answered_is_told_and_the_conversation_goes_on(
    models: str, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    say(" ".join(passage(i) for i in range(9)), "a", KeyboardInterrupt())
    assert talk(models, "--verbose") == 0
    told = capsys.readouterr()
    assert "llmcache: the prompt has" in told.err
    assert told.out.count("prompt new") == 1


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
