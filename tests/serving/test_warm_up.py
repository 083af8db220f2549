"""What is run before a server is ready is no traffic, and what it took stays known."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from llmcache.serving.app import create_app
from tests.serving import decoders
from tests.serving.served import make_server


@pytest.mark.parametrize("kind", ["classifier", decoders.NAME])
def test_figures_begin_after_the_warm_up_and_its_times_stay(kind: str, models: Path) -> None:
    server = make_server(models / kind)
    with TestClient(create_app(server)) as client:
        stats = server.cache.stats()
        assert (stats.n_requests, stats.hits, stats.n_misses, stats.n_prompt_tokens) == (0, {}, 0, 0)
        assert stats.lookup_ms == stats.storing_ms == stats.n_layers_skipped == 0 and not stats.bypassed
        assert {(one.saved_ms or 0, one.hit_rate, one.repeats) for one in stats.cost} == {(0, None, None)}
        assert any(one.miss_ms and one.hit_ms for one in stats.cost)
        assert 'rung="exact"' not in client.get("/metrics").text and "of 0 requests" in client.get("/").text
        body = {"prompt": [5, 6], "max_tokens": 1} if kind == decoders.NAME else {"input": "my card"}
        for _ in range(2):
            client.post("/v1/completions" if kind == decoders.NAME else "/v1/classify", json=body).raise_for_status()
        assert (server.cache.stats().n_requests, server.cache.stats().hits) == (2, {"exact": 1})
