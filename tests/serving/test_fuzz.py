"""Whatever a client sends, the server answers in the dialect of the route and as its document says, and goes on."""

from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings

from llmcache.serving.openai_answers import ChatChunk, CompletionChunk
from llmcache.serving.refusals import dialect_of
from tests.serving.decoders import NAME, chunks_of
from tests.serving.served import listening, make_server

_N = 25  # requests of each route
_CHUNKS = {"/v1/completions": CompletionChunk, "/v1/chat/completions": ChatChunk}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["classifier", "embedding", "reranker", NAME])
def test_what_the_schema_allows_and_what_it_does_not(kind: str, models: Path) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.specs.openapi import checks

    conforms = [checks.response_schema_conformance, checks.content_type_conformance, checks.status_code_conformance]
    n_asked = 0
    with listening(make_server(models / kind, max_client_batch_size=4)) as url:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path.startswith("/admin"):  # which disables the cache, or drains it
                continue

            @settings(max_examples=_N, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def ask(case: Any) -> None:
                nonlocal n_asked
                n_asked += 1
                answer = case.call(timeout=30)
                assert answer.status_code < 500, (case.path, answer.status_code, answer.text[:200])
                if answer.status_code >= 400:
                    error = answer.json()["error"]
                    assert isinstance(error, str if dialect_of(case.path) == "tei" else dict)
                case.validate_response(answer, checks=conforms)
                if answer.status_code == 200 and case.path in _CHUNKS:  # no check looks at the data of events
                    told = httpx2.post(url + case.path, json={**case.body, "stream": True}, timeout=30)
                    chunks_of(told.text, _CHUNKS[case.path])

            ask()
    assert n_asked > 10 * _N
