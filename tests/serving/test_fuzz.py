"""Fuzzed requests: the server answers each in the route's dialect, and keeps serving.

schemathesis generates requests from two documents: the server's own, and that of text-embeddings-inference (TEI),
which is not in the repository: `make test-hostile OPENAPI=FILE`. It is slow; others are valid requests with something
wrong.
"""

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from llmcache.serving.refusals import dialect_of
from tests.fixtures import Log
from tests.serving.served import ask, listening, make_server, unharmed

#: Routes by kind of model; `/` is that of the model, and all models serve the other routes.
SERVED = {
    "embedding": ("/embed", "/embed_all", "/similarity", "/v1/embeddings"),
    "classifier": ("/predict", "/v1/classify"),
    "reranker": ("/rerank", "/v1/rerank", "/v2/rerank", "/v1/score"),
    "decoder": ("/v1/completions", "/v1/chat/completions"),
}
ABSENT = "/embed_sparse"  # TEI's; needs a kind of model that we do not support

pytestmark = pytest.mark.slow


@pytest.fixture
def n_requests(request: pytest.FixtureRequest) -> int:
    """Number of valid requests per route, and of requests that break its schema."""
    return int(request.config.getoption("fuzz_requests", default=3))


@pytest.fixture
def url(kind: str, models: Path) -> Iterator[str]:
    with listening(make_server(models / kind, max_client_batch_size=4)) as (_, found):
        yield found


def operations(schema: Any, kind: str) -> Iterator[Any]:
    """Yield a document's operations for a model of this kind; of a classifier, also those of all kinds."""
    own = {"/", *SERVED[kind]}
    others = {ABSENT, *(path for paths in SERVED.values() for path in paths)} - own
    for found in schema.get_all_operations():
        operation = found.ok()
        is_asked = operation.path not in others and not operation.path.startswith("/admin")  # would drain the cache
        if operation.path in own or (is_asked and kind == "classifier"):
            yield operation


def fuzz(operation: Any, n: int, check: Callable[[Any], None], *, breaks_schema: bool = False) -> None:
    """Run a check on `n` generated requests that follow the schema, or break it."""
    from schemathesis import GenerationMode

    mode = GenerationMode.NEGATIVE if breaks_schema else GenerationMode.POSITIVE
    checked = given(case=operation.as_strategy(generation_mode=mode))(lambda case: check(case))
    settings(max_examples=n, deadline=None, database=None, suppress_health_check=list(HealthCheck))(checked)()


@pytest.mark.hostile("made up from our document")
@pytest.mark.parametrize("kind", SERVED)
def test_what_our_document_allows_and_what_it_does_not(kind: str, url: str, n_requests: int) -> None:
    openapi = pytest.importorskip("schemathesis").openapi

    def check(case: Any) -> None:
        answer = case.call(timeout=30)
        assert answer.status_code < 500, (case.path, answer.status_code, answer.text[:200])
        if answer.status_code >= 400:
            assert isinstance(answer.json()["error"], str if dialect_of(case.path) == "tei" else dict)

    asked = list(operations(openapi.from_url(f"{url}/openapi.json"), kind))
    assert {operation.path for operation in asked} > set(SERVED[kind]) and (len(asked) > 9 or kind != "classifier")
    for operation in asked:
        fuzz(operation, n_requests, check)
        if operation.body:
            fuzz(operation, n_requests, check, breaks_schema=True)


@pytest.mark.hostile("made up from TEI's document")
@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind != "decoder"])
def test_what_teis_document_allows_is_answered_as_it_says(
    kind: str, url: str, n_requests: int, request: pytest.FixtureRequest
) -> None:
    if (document := request.config.getoption("tei_openapi", default=None)) is None:
        pytest.skip("TEI's document is not kept here: make test-hostile OPENAPI=FILE")
    from schemathesis import openapi
    from schemathesis.specs.openapi import checks

    conforms = [checks.response_schema_conformance, checks.content_type_conformance, checks.status_code_conformance]
    statuses: Counter[tuple[str, int]] = Counter()

    def check(case: Any) -> None:
        answer = case.call(base_url=url, timeout=30)
        statuses[case.path, answer.status_code] += 1
        if answer.status_code >= 400 and dialect_of(case.path) == "openai":  # this route answers in OpenAI's dialect
            assert answer.status_code < 500 and isinstance(answer.json()["error"], dict)
        else:
            case.validate_response(answer, checks=conforms)

    for operation in operations(openapi.from_path(document), kind):
        fuzz(operation, n_requests, check)
        assert statuses[operation.path, 200], (operation.path, statuses)


TEXT = {"type": "text", "text": "my"}
#: Valid requests by kind of model.
VALID: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "embedding": [
        ("/embed", {"inputs": ["my card"], "normalize": False, "dimensions": 8, "truncation_direction": "left"}),
        ("/v1/embeddings", {"model": "embedding", "input": ["my card"], "encoding_format": "base64", "dimensions": 4}),
        ("/embed_all", {"inputs": [[5, 6], [7]], "truncate": True}),
        ("/similarity", {"inputs": {"source_sentence": "my", "sentences": ["card", "cash"]}, "parameters": {}}),
        ("/decode", {"ids": [[5, 6], [7]], "skip_special_tokens": False}),
        ("/admin/forget", {"inputs": ["my card"], "namespace": "default"}),
    ],
    "classifier": [
        ("/predict", {"inputs": [["my card"], ["my", "card"]], "raw_scores": True, "truncate": False}),
        ("/", {"inputs": "my card", "parameters": {"top_k": 2, "function_to_apply": "softmax"}}),
        ("/v1/classify", {"input": ["my card", "cash"], "truncate_prompt_tokens": -1}),
        ("/tokenize", {"inputs": ["my card"], "add_special_tokens": False}),
        ("/admin/purge", {"namespace": "default"}),
    ],
    "reranker": [
        ("/rerank", {"query": "my card", "texts": ["card", "cash"], "return_text": True, "raw_scores": True}),
        ("/rerank", {"query": "my card", "documents": ["card", {"text": "cash"}], "top_n": 1}),
        ("/v1/rerank", {"model": "reranker", "query": "my", "documents": ["card"], "return_documents": False}),
        ("/v1/score", {"text_1": "my card", "text_2": ["card", "cash"], "use_activation": False}),
        ("/score", {"queries": ["my", "a"], "documents": ["card", "cash"]}),
    ],
    "decoder": [
        ("/v1/completions", {"prompt": ["my card"], "max_tokens": 2, "temperature": 0, "logprobs": 1, "stop": ["a"]}),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 2, "stream": True, "stream_options": {}, "top_p": 0.5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [TEXT]}], "max_tokens": 2, "n": 2}),
        ("/admin/forget", {"messages": [{"role": "user", "content": "my card"}]}),
    ],
}
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 10**30, float("nan"), float("inf"), -1e308),
    *("", "0", "null", "\x00", "\ud800", "\u202e🙂", "w1 " * 50, "a" * 5_000),
    *([], {}, [[]], [None], [{}], {"": {}}, ["my", 1], [[["a"]]], [0] * 100, ["my"] * 100, [[5]] * 100),
    *({"text": "my"}, {"role": "user", "content": None}, "../..", "%s{0}$(x)"),
)
KINDS = ("application/json", "application/json; charset=utf-16", "text/plain", "application/vnd.api+json", "a", "")
HEADERS = ("Authorization", "Accept", "Origin", "X-Request-Id", "Sec-Fetch-Site", "Cookie", "Range")
VALUES = ("", "a", "Bearer \xff", "*/*", "null", "bytes=0-1", "a" * 3_000)
#: Put into the text of a body.
TYPOS = (b"", b"\x00", b"\xff", b'"', b"[" * 50, b"}", b'{"inputs": "my card"}')
PATHS = ("{0}/", "/{0}", "/V1/EMBEDDINGS", "/v1/models/%ff%00", "{0}?a=%zz&a", "/%2e%2e", "/docs")


def slots(value: Any) -> list[tuple[Any, Any]]:
    """Return each list or object within a value, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [slot for key in keys for slot in slots(value[key])]


def with_junk(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Return a body with up to three values replaced, removed or added, and perhaps some bytes changed."""
    body = deepcopy(body)
    for _ in range(rng.randint(0, 3)):
        inner, key = rng.choice(slots(body) or [(body, "inputs")])
        if rng.random() < 0.8:
            inner[key] = deepcopy(rng.choice(JUNK))
        elif isinstance(inner, dict):
            inner[rng.choice(["model", "inputs", "stream", "\x00", "a" * 100])] = inner.pop(key, None)
        else:
            inner += inner[:1] * rng.randint(1, 20)
    text = json.dumps(body).encode()
    if rng.random() < 0.3:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(TYPOS) + text[at + rng.randint(0, 9) :]
    return text


def made_up(rng: random.Random, kind: str) -> tuple[str, str, bytes, dict[str, str]]:
    """Make a request up: method, path, body and headers."""
    path, body = rng.choice(VALID[kind])
    content, headers = with_junk(rng, body), {}
    if rng.random() < 0.1:
        headers["Content-Encoding"] = rng.choice(["gzip", "deflate", "br", "identity", "gzip, gzip", "\xe4"])
        content = gzip.compress(content, mtime=0)[: rng.choice([None, 30])]
    if rng.random() < 0.1:
        headers["Content-Type"] = rng.choice(KINDS)
    if rng.random() < 0.1:
        name = rng.choice(HEADERS)
        headers[name] = rng.choice(VALUES)
    if rng.random() < 0.05:
        path = rng.choice(PATHS).format(path)
    method = rng.choice(["GET", "PUT", "OPTIONS", "HEAD", "DELETE"]) if rng.random() < 0.05 else "POST"
    return method, path, content, headers


@pytest.mark.hostile("valid requests with something wrong")
@pytest.mark.parametrize("kind", VALID)
def test_requests_with_something_wrong(kind: str, models: Path, n_requests: int, caplog: Log) -> None:
    """1,000 in all, and 3,000 of `make test-hostile`: the server neither fails nor is harmed."""
    rng, statuses, n = random.Random(kind), Counter[int](), 250 if n_requests < 100 else 750
    with unharmed(models / kind, *VALID[kind][0], caplog) as place:
        for _ in range(n):
            method, path, content, headers = request = made_up(rng, kind)
            status, text = ask(place, method, path, content, **headers)
            assert status < 500 and b"the server failed" not in text, (request, status, text[:200])
            if status >= 400 and method != "HEAD":
                assert isinstance(json.loads(text)["error"], str | dict), (request, text)
            statuses[status] += 1
    assert len(statuses) > 4 and n / 15 < statuses[200] < 0.8 * n, statuses
