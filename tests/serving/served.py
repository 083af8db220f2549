"""Writes tiny models to folders, and serves them in process or on a free port."""

import http.client
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from starlette.testclient import TestClient

from llmcache.config import CacheConfig
from llmcache.serving.app import create_app
from llmcache.serving.loading import load_served
from llmcache.serving.saving import Saves
from llmcache.serving.server import Server
from llmcache.serving.settings import ServerSettings
from tests import tiny_models
from tests.fixtures import Log
from tests.tiny_models import VOCABULARY, build

LABELS = ("card", "cash", "change", "credit", "other")
WORDS = ("lost", "my", "card", "where", "is", "cash", "change", "the", "rate", "please", *(f"w{i}" for i in range(70)))
_ID2LABEL = dict(enumerate(LABELS))
CONTEXT = 256  # of the decoder
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['content'].startswith('odd') %}{{ raise_exception('no ' + m['content']) }}{% endif %}"
    "{{ m['role'] }}: {{ m['content'] }}" + END + "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_TEXT = ["the card was lost, and the cash is there", "where is my card? it costs 5 € and a naïve 🙂 more"]


def tokenizer() -> tf.PreTrainedTokenizerFast:
    """Return a word tokenizer with BERT's special tokens around texts and pairs."""
    return tiny_models.tokenizer(words=[*WORDS])


@once
def byte_tokenizer() -> tf.PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with an end-of-text token; shared, so do not edit it."""
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(_TEXT * 4, vocab_size=300, special_tokens=[END], show_progress=False)
    made = tf.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END)
    made.chat_template = TEMPLATE
    return made


def decoder() -> Any:
    """A GPT-2 of two layers with random weights."""
    shape = {"vocab_size": len(byte_tokenizer()), "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}
    return build(lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)))


def _config(**more: Any) -> tf.BertConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    return tf.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes, **more)


def write(folder: Path, kind: str) -> Path:
    """Write a model of this kind and its tokenizer; return the folder."""
    makes: dict[str, Callable[[], Any]] = {
        "classifier": lambda: build(lambda: tf.BertForSequenceClassification(_config(id2label=_ID2LABEL))),
        "reranker": lambda: build(lambda: tf.BertForSequenceClassification(_config(num_labels=1))),
        "embedding": lambda: build(lambda: tf.BertModel(_config())),
        "decoder": decoder,
    }
    makes[kind]().save_pretrained(folder / kind)
    (byte_tokenizer() if kind == "decoder" else tokenizer()).save_pretrained(folder / kind)
    return folder / kind


def make_server(folder: Path, cache: dict[str, Any] | None = None, **settings: Any) -> Server:
    """Return a server of the model in a folder, not started."""
    made = ServerSettings.model_validate({"model": folder.name, "warmup_tokens": 8, **settings})
    served = load_served(str(folder))
    saves = Saves(made.save)
    return Server(made, served, saves.attach_cache(served, None if cache is None else CacheConfig.make(cache)), saves)


class Client(TestClient):
    """An in-process client; as a context manager it starts and stops its server."""

    def __init__(self, server: Server) -> None:
        super().__init__(create_app(server), raise_server_exceptions=False)
        self.server = server


#: Returns the client of a server for a kind of model and settings; see the fixture `serve`.
Serve = Callable[..., Client]


def figure(server: Server, name: str, **labels: str) -> float:
    """Return a figure of `/metrics`, summed over labels not given."""
    samples = (sample for family in server.metrics.registry.collect() for sample in family.samples)
    named = (sample for sample in samples if sample.name == f"llmcache_{name}")
    return sum(sample.value for sample in named if labels.items() <= sample.labels.items())


def is_computing(server: Server, n_waiting: int = 0) -> bool:
    """Whether the encoder computes one input while `n_waiting` others wait."""
    assert server.encoder is not None
    return len(server.encoder) == 1 + n_waiting and server.n_waiting == n_waiting


@contextmanager
def listening(server: Server) -> Iterator[tuple[Any, str]]:
    """Serve on a free port within the context; yield the Uvicorn runner and the address."""
    from llmcache.serving.running import Uvicorn

    uvicorn = Uvicorn(server, "127.0.0.1", 0)
    thread = threading.Thread(target=uvicorn.run, daemon=True)
    thread.start()
    while not uvicorn.started and thread.is_alive():
        thread.join(0.01)
    assert uvicorn.started
    try:
        port = uvicorn.servers[0].sockets[0].getsockname()[1]
        yield uvicorn, f"http://127.0.0.1:{port}"
    finally:
        uvicorn.should_exit = True
        thread.join()


#: Opens a connection to a port of this machine, and sends bytes; see the fixture `dial`.
Dial = Callable[[int, bytes], socket.socket]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def received(connection: socket.socket) -> bytes:
    """Return a response of JSON, or all that comes until the server closes the connection."""
    found = b""
    while part := connection.recv(65_536):
        found += part
        if found[-1:] in b"}]" and b"connection: close" not in found.lower():
            break
    return found


def ask(place: tuple[str, int], method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    """Send a request over a connection of its own; return the status and the body of the answer."""
    with closing(http.client.HTTPConnection(*place, timeout=30)) as connection:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()


@contextmanager
def unharmed(folder: Path, path: str, body: Any, caplog: Log) -> Iterator[tuple[str, int]]:
    """Host and port of a server. At the end it is healthy, answers `body` as before, and has logged no failure."""

    def numbers() -> list[float]:
        status, text = ask(place, "POST", path, json.dumps(body).encode())
        assert status == 200, text
        return [float(one) for one in re.findall(rb"-?\d+\.[\de-]+", text)]

    caplog.set_level(logging.ERROR)
    with listening(make_server(folder, max_client_batch_size=8, payload_limit=1_100_000)) as (_, url):
        place = "127.0.0.1", port_of(url)
        before = numbers()
        yield place
        assert before and numbers() == pytest.approx(before, abs=1e-5)
    assert not caplog.records


@contextmanager
def model_held(server: Server) -> Iterator[None]:
    """Block the model's thread within the context."""
    release, is_held = threading.Event(), threading.Event()
    server.thread.submit(lambda: (is_held.set(), release.wait(20)))
    assert is_held.wait(20)
    try:
        yield
    finally:
        release.set()
