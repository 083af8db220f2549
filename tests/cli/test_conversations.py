"""`llmcache generate`, and `llmcache repl` with a model or a server: answers, figures, and one-line errors."""

import builtins
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcache.cli.remote import RemoteChat
from llmcache.generation import Sampling
from llmcache.generation import generate as generate_plain
from llmcache.generation.chat import Answer
from llmcache.generation.prompt_cache import PromptCache
from tests.commands import run_main
from tests.fixtures import Patch, Shown
from tests.serving.served import byte_tokenizer, decoder, figure, listening, make_server, write
from tests.tiny_data import passage
from tests.tiny_prompts import write_prompts

FEW = ["--max-new-tokens", "4"]
LONG = " ".join(passage(i) for i in range(9))
Say = Callable[..., None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the model `tiny`, whose context has 512 tokens."""
    return str(write_prompts(tmp_path_factory.mktemp("prompts")).models)


@pytest.fixture
def say(monkeypatch: Patch) -> Say:
    """Types lines into the conversation; raises lines that are exceptions."""

    def give(*lines: str | BaseException) -> None:
        left = iter(lines)

        def answer(prompt: str) -> str:
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", answer)

    return give


def generate(models: str, *more: str) -> int:
    return run_main("generate", "--model", "tiny", "--models-dir", models, *FEW, *more)


def talk(models: str, *more: str) -> int:
    return run_main("repl", "--model", "tiny", "--models-dir", models, *FEW, *more)


def test_one_prompt_is_answered_and_told(models: str, tmp_path: Path, capsys: Shown) -> None:
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
    assert generate(models, "--prompt", LONG, "--truncate", "left") == 0
    assert "llmcache: cut off on the left:" in capsys.readouterr().err


def test_a_line_that_is_not_utf_8_is_refused_and_the_next_one_answered(
    models: str, monkeypatch: Patch, capsys: Shown
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\na\n/caf\xe9\n"), encoding="utf-8"))
    assert talk(models) == 0
    shown = capsys.readouterr()
    assert "the prompt is no valid text: character" in shown.err and "no command '/caf\\udce9'" in shown.err
    assert len(shown.out.split("> ")) == 5 and shown.out.split("> ")[2].strip()


def test_seeded_draws_come_again(models: str, capsys: Shown) -> None:
    answers = []
    for seed in ("1", "1", "2"):
        drawn = ("--do-sample", "--top-k", "50", "--temperature", "9", "--seed", seed)
        assert generate(models, "--prompt", "a", *drawn) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


def test_a_conversation_goes_on_and_says_what_came_from_where(models: str, say: Say, capsys: Shown) -> None:
    say(passage(1)[:200], "and then", "", "/stats", "/clear", passage(1)[:200], "/quit", "never read")
    assert talk(models, "--system", "one two", "--verbose") == 0
    shown = capsys.readouterr().out
    assert shown.count("prompt new") == 2 and shown.count("prompt known") == 1
    assert "(prefix)" in shown and "(exact)" in shown and "(computed)" in shown
    assert "prompt tokens saved" in shown and "served" in shown and "cleared" in shown
    assert "never read" not in shown


@pytest.mark.parametrize(
    ("lines", "more", "told", "n_answered"),
    [
        (["/nothing"], [], "no command '/nothing'", 0),
        ([LONG, "a", KeyboardInterrupt()], [], "llmcache: the prompt has", 1),
        ([LONG], ["--truncate", "left"], "cut off on the left:", 1),
    ],
)
def test_what_cannot_be_taken_as_it_is_is_told_and_the_conversation_goes_on(
    lines: list[Any], more: list[str], told: str, n_answered: int, models: str, say: Say, capsys: Shown
) -> None:
    say(*lines)
    assert talk(models, "--verbose", *more) == 0
    shown = capsys.readouterr()
    assert told in shown.err + shown.out
    assert shown.out.count("prompt new") == n_answered
    assert n_answered or "/stats" in shown.out  # lists the commands


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupted_answer_is_forgotten(
    begun: bool, models: str, say: Say, capsys: Shown, monkeypatch: Patch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*(Answer, "__next__", stop) if begun else (PromptCache, "encode", stop))
    say("a b c", "a b c")
    assert talk(models, "--verbose") == 0
    shown = capsys.readouterr()
    assert shown.out.count("interrupted") == 2
    assert shown.out.count("no token") == 2 * begun
    assert shown.out.count("prompt known") == begun  # the first question is not in the second prompt
    assert "prompt" not in shown.err


# -- with a server ---------------------------------------------------------------------------------------------------


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, list[Any]]]:
    """Run a server with one fixed answer; yield its address and the (path, headers, body) of each request."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            asked.append((self.path, self.headers, json.loads(content)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def said(text: str) -> bytes:
    return event(choices=[{"delta": {"content": text}}])


@pytest.mark.slow
def test_a_conversation_is_the_models_own(tmp_path: Path, say: Say, capsys: Shown) -> None:
    server, tokenizer = make_server(write(tmp_path, "decoder"), reveal_hits=True), byte_tokenizer()
    history: list[dict[str, str]] = []
    for question in ("where is my card", "and the cash"):
        history.append({"role": "user", "content": question})
        ids = tokenizer(tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True))["input_ids"]
        made = generate_plain(decoder(), torch.tensor([ids]), Sampling(max_new_tokens=4))
        history.append({"role": "assistant", "content": tokenizer.decode(made.tokens, skip_special_tokens=True)})
    with listening(server) as (_, url):
        say("where is my card", "and the cash", "/stats", "/clear", "where is my card", "word " * 300, "/quit")
        assert run_main("repl", "--url", url, "--model", "decoder", "--verbose", *FEW) == 0
        assert run_main("repl", "--url", url, "--model", "gpt-9") == 0
        assert figure(server, "time_to_first_token_seconds_count") == 3
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{history[1]['content']}\n[prompt ")
    assert f"\n{history[3]['content']}\n[prompt {len(ids)} tokens, " in shown.out
    assert shown.out.count("not computed; first text") == 3 and ", 0 not computed" in shown.out
    assert "prompt tokens not computed" in shown.out and "cleared" in shown.out
    assert "llmcache: the server refused it (400): the prompt has" in shown.err


def test_what_is_asked(say: Say, capsys: Shown, monkeypatch: Patch) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    stream = b": ping\n\n" + said("one ") + said("two") + event(choices=[], usage=usage) + b"data: [DONE]\n\n"
    monkeypatch.setenv("LLMCACHE_KEY", "a key")
    for known in ("https://a.example", "http://[::1]:80/v1"):
        RemoteChat(known, None, {})
    with answering(200, stream) as (url, asked):
        say("hello", "again", "/stats")
        drawn = ["--do-sample", "--temperature", "0.5", "--top-k", "4", "--repetition-penalty", "1.5", "--seed", "7"]
        assert run_main("repl", "--url", f"{url}/v1/", "--system", "be brief", "--verbose", *FEW, *drawn) == 0
        say("hello", "/help")
        assert run_main("repl", "--url", url, *FEW) == 0
    assert [path for path, _, _ in asked] == ["/v1/chat/completions"] * 3
    assert asked[0][1]["authorization"] == "Bearer a key"
    assert asked[1][2] == {
        "max_tokens": 4,
        "seed": 7,
        "repetition_penalty": 1.5,
        "temperature": 0.5,
        "top_k": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "one two"},
            {"role": "user", "content": "again"},
        ],
    }
    assert asked[2][2]["temperature"] == 0
    shown = capsys.readouterr().out
    assert shown.count("one two\n[prompt 9 tokens; first text") == 2 and "/clear" in shown


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (429, b'{"error": {"message": "later"}}', "the server refused it (429): later"),
        (502, b"<html>", "the server refused it (502 Bad Gateway)"),
        (200, b"[]", "the server broke off before the end"),
        (200, said("one"), "the server broke off before the end"),
        (200, b"event: error\n" + event(error={"message": "no more"}), "the server broke off: no more"),
        (200, b"data: {\n\n", "the server did not answer as /v1/chat/completions does (JSONDecodeError)"),
        (200, event(choices=[{}]), "the server did not answer as /v1/chat/completions does (KeyError)"),
    ],
)
def test_what_is_wrong_is_told_and_forgotten(status: int, body: bytes, told: str, say: Say, capsys: Shown) -> None:
    with answering(status, body) as (url, asked):
        say("hello", "again")
        assert run_main("repl", "--url", url, "--verbose") == 0
    assert capsys.readouterr().err.count(f"llmcache: {told}") == 2
    assert [len(one["messages"]) for _, _, one in asked] == [1, 1]


def test_an_answer_may_be_interrupted_and_a_server_absent(say: Say, capsys: Shown, monkeypatch: Any) -> None:
    with answering(200, b"") as (url, _):
        pass
    say("hello", "/stats")
    assert run_main("repl", "--url", url) == 0
    assert "refused" in capsys.readouterr().err

    def ask(chat: RemoteChat, text: str) -> Iterator[str]:
        yield "one"
        raise KeyboardInterrupt

    monkeypatch.setattr(RemoteChat, "ask", ask)
    say("hello")
    assert run_main("repl", "--url", url) == 0
    assert "one ... interrupted" in capsys.readouterr().out


GENERATE = ["generate", "--model", "tiny", *FEW, "--prompt", "a"]
REPL = ["repl", "--url", "http://a"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([*GENERATE, "--model", "nowhere"], "model: 'nowhere' could not be loaded"),
        ([*GENERATE, "--temperature", "0.5"], "temperature=0.5 has no effect on greedy tokens"),
        ([*GENERATE, "--do-sample", "--top-p", "1.5"], "top_p=1.5: give a share of probability"),
        ([*GENERATE, "--max-new-tokens", "0"], "max_new_tokens=0: give a whole number"),
        ([*GENERATE, "--max-new-tokens", "512"], "max_new_tokens=512: the model's context has 512 tokens"),
        ([*GENERATE, "--prompt", LONG], "of which the model can take 508 here"),
        (["repl"], "give --model, or --url of a server"),
        ([*REPL, "--url", "127.0.0.1:8000"], "url='127.0.0.1:8000': give the address of a server"),
        *(([*REPL, "--url", one], "give the address of a server") for one in ("ftp://a", "http://[::1", "http://a:b")),
        ([*REPL, "--key", "a\nb"], "a key is printable ASCII"),
        ([*REPL, "--truncate", "left"], "truncate='left' has no effect on a server"),
        ([*REPL, "--top-k", "5"], "top_k=5 has no effect"),
    ],
)
def test_bad_input_is_one_line(models: str, options: list[str], told: str, capsys: Shown) -> None:
    assert run_main(*options, "--models-dir", models) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("llmcache: ") and told in error
