"""`llmcache serve` over HTTP: answers are sentence-transformers' own, hits do not show, failures are logged."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.servers import Answer, Command, Commands
from tests.tiny_models import BARE, GENERATORS, build, tokenizer

PROMPTS = {"query": "w1 w2 w3 ", "document": "w4 ", "none": ""}
TEXTS = ["w10 w11 w12", "w20", "w1 w2 w3 w10 w11 w12", "w7 w8 w9 w10 w11 w12 w13 w14 w15"]
BROKEN = "w80"  # a word whose embedding is not finite
#: By first word: `odd` raises, `short` reads a missing message, `unsafe` breaks the sandbox, `wrong` divides by zero.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['content'].startswith('odd') %}{{ raise_exception('no ' + m['content']) }}{% endif %}"
    "{% if m['content'].startswith('short') %}{{ messages[9]['content'] }}{% endif %}"
    "{% if m['content'].startswith('unsafe') %}{{ m['content'].__class__.__mro__ }}{% endif %}"
    "{% if m['content'].startswith('wrong') %}{{ 1 // 0 }}{% endif %}"
    "{{ m['content'] }} {% endfor %}"
)
CHAT = [{"role": "user", "content": "w10 w11 w12 w13 w14 w15 w16 w17 w18 w19"}]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    made = Commands(tmp_path_factory.mktemp("output"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models: an embedding model whose pooling leaves prompts out, and a decoder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    made = tmp_path_factory.mktemp("models")
    bert: Any = build(BARE["bert"])
    (broken,) = tokenizer()(BROKEN, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        bert.embeddings.word_embeddings.weight[broken] = torch.nan
    for name, model, template in (("bert", bert, None), ("decoder", build(GENERATORS["llama"]), TEMPLATE)):
        model.save_pretrained(made / name)
        words = tokenizer()
        words.chat_template = template
        words.save_pretrained(made / name)
    torch.manual_seed(0)
    pooling = Pooling(32, pooling_mode="mean", include_prompt=False)
    modules = [Transformer(str(made / "bert")), pooling, Dense(32, 16), Normalize()]
    told: Any = {"prompts": PROMPTS, "default_prompt_name": "document"}
    SentenceTransformer(modules=modules, truncate_dim=12, **told).save(str(made / "embedding"))
    return made


@pytest.fixture(scope="module")
def servers(commands: Commands, folder: Path) -> dict[str, Command]:
    return {name: commands.serve(folder / name) for name in ("embedding", "decoder")}


def answer(server: Command, path: str, body: Any) -> Any:
    got = server.ask(path, body)
    assert got.status == 200, got.text
    return got.json


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    """The served folder, loaded by sentence-transformers itself."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder / "embedding"))


def near(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)


@pytest.mark.parametrize("name", [None, "query", "none"])
def test_embeddings_are_those_of_encode(servers: dict[str, Command], plain: Any, name: str | None) -> None:
    """/embed answers as sentence-transformers' `encode` with the same prompt, computed or served."""
    named = {} if name is None else {"prompt_name": name}
    expected = plain.encode(TEXTS, prompt_name=name)
    for _ in range(2):
        near(answer(servers["embedding"], "/embed", {"inputs": TEXTS, **named}), expected / _norms(expected))
    states = plain.encode(TEXTS, prompt_name=name, output_value="token_embeddings")
    for found, one in zip(answer(servers["embedding"], "/embed_all", {"inputs": TEXTS, **named}), states, strict=True):
        near(found, one.tolist())
    pieces = answer(servers["embedding"], "/tokenize", {"inputs": TEXTS, **named})
    assert list(map(len, pieces)) == list(map(len, states))


def test_the_default_prompt_goes_before_texts_on_all_routes(servers: dict[str, Command], plain: Any) -> None:
    """Without a named prompt the model's default prompt goes before texts, but not before token ids."""
    expected = plain.encode(TEXTS, normalize_embeddings=True)
    told = answer(servers["embedding"], "/v1/embeddings", {"input": TEXTS})["data"]
    near([one["embedding"] for one in told], expected)
    for name in (None, "query"):
        source, *others = plain.encode(TEXTS, prompt_name=name, normalize_embeddings=True)
        inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
        body = {"inputs": inputs} | ({} if name is None else {"parameters": {"prompt_name": name}})
        near(answer(servers["embedding"], "/similarity", body), [source @ one for one in others])
    ids = tokenizer()(TEXTS[0])["input_ids"]
    (found,) = answer(servers["embedding"], "/embed", {"inputs": ids})
    near(found, plain.encode(TEXTS[0], prompt_name="none", normalize_embeddings=True))


def test_requests_with_other_prompts_do_not_mix(servers: dict[str, Command], plain: Any) -> None:
    """Concurrent requests are answered by their own prompts, even if their tokens are the same."""
    # The first text with prompt "query" has the tokens of the third text without a prompt.
    asked = [(text, name) for text in (TEXTS[0], TEXTS[2], "w30 w31", "w33") for name in PROMPTS] * 2

    def ask(one: tuple[str, str]) -> Any:
        return answer(servers["embedding"], "/embed", {"inputs": one[0], "prompt_name": one[1]})[0]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, asked))
    near(found, [plain.encode(text, prompt_name=name, normalize_embeddings=True) for text, name in asked])


def test_an_input_on_which_the_model_fails_is_logged_and_counted(servers: dict[str, Command]) -> None:
    """A failed input gets its own error, a log line without its text, and a count; other inputs are answered."""
    server = servers["embedding"]
    n_failures, n_lines = server.figure("llmcache_model_failures_total"), server.output.count("the model failed")
    failed = server.ask("/embed", {"inputs": ["w40 w41", f"w42 {BROKEN}"]})
    assert failed.status == 424
    assert failed.json == {"error": "the model failed on this input: `inputs[1]`", "error_type": "Backend"}
    assert server.figure("llmcache_model_failures_total") == n_failures + 1
    assert server.output.count("the model failed") == n_lines + 1
    assert BROKEN not in server.output
    assert server.ask("/embed", {"inputs": "w40 w41"}).status == 200


@pytest.mark.parametrize(
    ("word", "status", "told"),
    [
        ("unsafe", 500, "SecurityError"),
        ("wrong", 500, "ZeroDivisionError"),
        ("odd", 400, "another order"),
        ("short", 400, "another order"),
    ],
)
def test_who_is_at_fault_if_a_chat_template_fails(
    servers: dict[str, Command], word: str, status: int, told: str
) -> None:
    """A template that breaks the sandbox or fails is the server's fault, and logged; one that refuses, the client's."""
    server = servers["decoder"]
    failed = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": f"{word} w50 w51"}]})
    message = failed.json["error"]["message"]
    assert failed.status == status and told in message
    assert ("order" in message) == (status == 400) and ("chat template" in message or status == 400)
    assert (f"chat template failed: {told}" in server.output) == (status == 500)
    assert "w50" not in server.output + failed.text


def _seen(answers: list[Answer]) -> list[Any]:
    """Return what a client sees of answers, without ids and times."""
    found = []
    for one in answers:
        headers = {k.lower(): v for k, v in one.headers.items() if k.lower() not in ("date", "x-request-id")}
        events = one.text.removeprefix("data: ").split("\n\ndata: ") if "event-stream" in str(headers) else [one.text]
        bodies = [Answer(200, {}, event).json if event.startswith("{") else event for event in events]
        found.append((one.status, headers, [_plain(body) for body in bodies]))
    return found


def _plain(body: Any) -> Any:
    return {k: v for k, v in body.items() if k not in ("id", "created")} if isinstance(body, dict) else body


_GREEDY = {"temperature": 0, "max_tokens": 3}
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("server", "path", "body"),
    [
        ("decoder", "/v1/chat/completions", {"messages": CHAT, **_GREEDY}),
        ("decoder", "/v1/chat/completions", {"messages": [*CHAT, *CHAT], **_GREEDY, **_USAGE}),
        ("decoder", "/v1/completions", {"prompt": "w20 w21 w22 w23 w24 w25 w26 w27", **_GREEDY, "logprobs": 1}),
        ("decoder", "/v1/completions", {"prompt": "w30 w31 w32 w33 w34 w35 w36 w37", **_GREEDY, **_USAGE}),
        ("embedding", "/embed", {"inputs": "w60 w61"}),
        ("embedding", "/v1/embeddings", {"input": "w62 w63"}),
        ("embedding", "/similarity", {"inputs": {"source_sentence": "w64", "sentences": ["w65"]}}),
        ("decoder", "/info", None),
        ("embedding", "/v1/models", None),
    ],
)
def test_hits_are_not_told(servers: dict[str, Command], server: str, path: str, body: Any) -> None:
    """Without `--reveal-hits` a hit looks like the computed answer: headers, usage, chunks."""
    first, second = _seen([servers[server].ask(path, body) for _ in range(2)])
    assert first == second and first[0] == 200
    assert "cached" not in str(first)


def test_a_wrong_answer_is_forgotten(servers: dict[str, Command]) -> None:
    """After `POST /admin/forget` the forgotten inputs are computed; others are still served."""
    server = servers["embedding"]

    def is_served(text: str) -> bool:
        before = server.figure("llmcache_prompt_tokens_cached_total")
        answer(server, "/embed", {"inputs": text})
        return server.figure("llmcache_prompt_tokens_cached_total") > before

    assert [is_served(text) for text in ("w70 w71", "w72 w73", "w70 w71")] == [False, False, True]
    assert server.ask("/admin/forget", {"inputs": "w70 w71"}).status == 200
    assert [is_served(text) for text in ("w70 w71", "w72 w73")] == [False, True]


def _norms(rows: Any) -> Any:
    return np.linalg.norm(rows, axis=1, keepdims=True)
