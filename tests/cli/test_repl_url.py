"""`llmcache repl --url`: a conversation with a server, and errors if the server refuses or breaks off."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcache.cli.remote import RemoteChat
from llmcache.errors import ConfigError
from llmcache.generation import Sampling, generate
from tests.commands import run_main
from tests.serving.served import byte_tokenizer, decoder, figure, listening, make_server, write

FEW = ["--max-new-tokens", "6"]
Say = Callable[..., None]


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
def test_a_conversation_is_the_models_own(tmp_path: Path, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    server, tokenizer = make_server(write(tmp_path, "decoder"), reveal_hits=True), byte_tokenizer()
    history: list[dict[str, str]] = []
    for question in ("where is my card", "and the cash"):
        history.append({"role": "user", "content": question})
        ids = tokenizer(tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True))["input_ids"]
        made = generate(decoder(), torch.tensor([ids]), Sampling(max_new_tokens=6))
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


def test_what_is_asked(say: Say, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    stream = b": ping\n\n" + said("one ") + said("two") + event(choices=[], usage=usage) + b"data: [DONE]\n\n"
    monkeypatch.setenv("LLMCACHE_KEY", "a key")
    with answering(200, stream) as (url, asked):
        say("hello", "again", "/stats")
        drawn = ["--do-sample", "--temperature", "0.5", "--top-k", "4", "--repetition-penalty", "1.5", "--seed", "7"]
        assert run_main("repl", "--url", f"{url}/v1/", "--system", "be brief", "--verbose", *FEW, *drawn) == 0
        say("hello", "/help")
        assert run_main("repl", "--url", url, *FEW) == 0
    assert [path for path, _, _ in asked] == ["/v1/chat/completions"] * 3
    assert asked[0][1]["authorization"] == "Bearer a key"
    assert asked[1][2] == {
        "max_tokens": 6,
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
def test_what_is_wrong_is_told_and_forgotten(
    status: int, body: bytes, told: str, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, body) as (url, asked):
        say("hello", "again")
        assert run_main("repl", "--url", url, "--verbose") == 0
    assert capsys.readouterr().err.count(f"llmcache: {told}") == 2
    assert [len(one["messages"]) for _, _, one in asked] == [1, 1]


def test_an_answer_may_be_interrupted(say: Say, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def ask(chat: RemoteChat, text: str) -> Iterator[str]:
        yield "one"
        raise KeyboardInterrupt

    monkeypatch.setattr(RemoteChat, "ask", ask)
    say("hello")
    assert run_main("repl", "--url", "http://127.0.0.1:1") == 0
    assert "one ... interrupted" in capsys.readouterr().out


def test_a_server_that_is_not_there(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, b"") as (url, _):
        pass
    say("hello", "/stats")
    assert run_main("repl", "--url", url) == 0
    assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "give --model, or --url of a server"),
        (["--url", "127.0.0.1:8000"], "url='127.0.0.1:8000': give the address of a server"),
        (["--url", "http://[::1"], "give the address of a server"),
        (["--url", "http://a:b"], "give the address of a server"),
        (["--url", "http://a", "--key", "a\nb"], "a key is printable ASCII"),
        (["--url", "http://a", "--truncate", "left"], "truncate='left' has no effect on a server"),
        (["--url", "http://a", "--top-k", "5"], "top_k=5 has no effect"),
    ],
)
def test_bad_input_is_one_line(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("repl", *options) == 2
    assert told in capsys.readouterr().err


def test_addresses() -> None:
    for url in ("https://a.example", "http://[::1]:80/v1"):
        RemoteChat(url, None, {})
    with pytest.raises(ConfigError):
        RemoteChat("ftp://a", None, {})
