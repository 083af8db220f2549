"""Fuzzed requests: the server answers each in the route's dialect, and keeps serving.

schemathesis generates requests from two documents: the server's own, and that of text-embeddings-inference (TEI),
which is not in the repository: `make test-hostile OPENAPI=FILE`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from llmcache.serving.refusals import dialect_of
from tests.serving.served import listening, make_server

#: Routes by kind of model; all models serve the other routes.
SERVED = {
    "embedding": ("/embed", "/embed_all", "/similarity", "/v1/embeddings"),
    "classifier": ("/predict", "/v1/classify"),
    "reranker": ("/rerank", "/v1/rerank", "/v2/rerank"),
    "decoder": ("/v1/completions", "/v1/chat/completions"),
}
ABSENT = "/embed_sparse"  # TEI's; needs a kind of model that we do not support

pytestmark = pytest.mark.slow


@pytest.fixture
def n_requests(request: pytest.FixtureRequest) -> int:
    """Number of valid requests per route, and of requests that break its schema."""
    return int(request.config.getoption("fuzz_requests", default=3))


@pytest.fixture
def teis(request: pytest.FixtureRequest) -> Path:
    """Path of TEI's document."""
    path: Path | None = request.config.getoption("tei_openapi", default=None)
    return path or pytest.skip("TEI's document is not kept here: make test-hostile OPENAPI=FILE")


@pytest.fixture
def url(kind: str, models: Path) -> Iterator[str]:
    with listening(make_server(models / kind, max_client_batch_size=4)) as (_, found):
        yield found


def operations(schema: Any, kind: str) -> Iterator[Any]:
    """Yield a document's operations that a model of this kind serves."""
    others = [path for other, paths in SERVED.items() if other != kind for path in paths]
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path not in (*others, ABSENT) and not operation.path.startswith("/admin"):  # would drain the cache
            yield operation


def fuzz(operation: Any, n: int, check: Callable[[Any], None], *, breaks_schema: bool = False) -> None:
    """Run a check on `n` generated requests that follow the schema, or break it."""
    from schemathesis import GenerationMode

    mode = GenerationMode.NEGATIVE if breaks_schema else GenerationMode.POSITIVE

    @settings(max_examples=n, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        check(case)

    ask()


def conform(case: Any, answer: Any) -> None:
    """Assert that status, content type and body of an answer follow the document."""
    from schemathesis.specs.openapi import checks

    conforms = [checks.response_schema_conformance, checks.content_type_conformance, checks.status_code_conformance]
    case.validate_response(answer, checks=conforms)


@pytest.mark.hostile("made up from our document")
@pytest.mark.parametrize("kind", SERVED)
def test_what_our_document_allows_and_what_it_does_not(kind: str, url: str, n_requests: int) -> None:
    from schemathesis import openapi

    def check(case: Any) -> None:
        answer = case.call(timeout=30)
        assert answer.status_code < 500, (case.path, answer.status_code, answer.text[:200])
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert isinstance(error, str if dialect_of(case.path) == "tei" else dict)

    asked = list(operations(openapi.from_url(f"{url}/openapi.json"), kind))
    assert {operation.path for operation in asked} > set(SERVED[kind])
    for operation in asked:
        fuzz(operation, n_requests, check)
        if operation.body:
            fuzz(operation, n_requests, check, breaks_schema=True)


@pytest.mark.hostile("made up from TEI's document")
@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind != "decoder"])
def test_what_teis_document_allows_is_answered_as_it_says(teis: Path, kind: str, url: str, n_requests: int) -> None:
    from schemathesis import openapi

    statuses: Counter[tuple[str, int]] = Counter()

    def check(case: Any) -> None:
        answer = case.call(base_url=url, timeout=30)
        statuses[case.path, answer.status_code] += 1
        if answer.status_code >= 400 and dialect_of(case.path) == "openai":  # this route answers in OpenAI's dialect
            assert answer.status_code < 500 and isinstance(answer.json()["error"], dict)
        else:
            conform(case, answer)

    for operation in operations(openapi.from_path(teis), kind):
        fuzz(operation, n_requests, check)
        assert statuses[operation.path, 200], (operation.path, statuses)
