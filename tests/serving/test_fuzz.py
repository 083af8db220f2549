"""Whatever a client sends, the server answers in the dialect of the route, and goes on."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from llmcache.serving.refusals import dialect_of
from tests.serving.served import listening, make_server

_N = 25  # requests of each route

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["classifier", "embedding"])
def test_what_the_schema_allows_and_what_it_does_not(kind: str, models: Path) -> None:
    schemathesis = pytest.importorskip("schemathesis")
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

            ask()
    assert n_asked > 10 * _N
