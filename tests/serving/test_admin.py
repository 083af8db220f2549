"""What an operator may have done, and that no other page has a browser do it."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from starlette.testclient import TestClient

from llmcache import LLMCache
from llmcache.errors import StoreError
from llmcache.serving.app import create_app
from llmcache.serving.keys import add_key
from llmcache.serving.server import Server
from tests.serving import decoders
from tests.serving.served import make_server
from tests.tiny_models import CLASSIFIERS, build
from tests.tiny_server import listening, make_app, serving
from tests.topics import calibrated, requests

CHANGES = ("purge", "clear", "disable", "enable", "audit", "save", "drain", "resume")
IDS = [1, 20, 21, 2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(save=tmp_path / "saved") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx2.Client]:
    with listening(make_app(server)) as address, httpx2.Client(base_url=address) as client:
        yield client


def done(answer: httpx2.Response) -> object:
    return answer.raise_for_status().json()


def test_a_namespace_is_purged_and_the_rest_cleared(
    server: Server, client: httpx2.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llmcache")
    client.post("/predict", json=IDS)
    client.post("/predict", json=[*IDS, 5])
    assert done(client.post("/admin/purge", json={"namespace": "another"})) == {"purged": 0}
    assert done(client.post("/admin/purge", json={"namespace": "default"})) == {"purged": 2}
    client.post("/predict", json=IDS)
    assert server.cache.stats().n_stored == 1
    assert done(client.post("/admin/clear")) == {"cleared": True}
    assert server.cache.stats().n_stored == 0
    told = [record.getMessage() for record in caplog.records if "anyone" in record.getMessage()]
    assert told == 2 * ["llmcache: anyone purges a namespace"] + ["llmcache: anyone clears the cache"]


@pytest.mark.parametrize(
    "body", ["", "{}", "[]", "null", '{"namespace": 1}', '{"namespace": null}', '{"namespace": "\\ud800"}', "{"]
)
def test_a_purge_that_names_no_namespace_is_refused(client: httpx2.Client, body: str) -> None:
    client.post("/predict", json=IDS)
    answer = client.post("/admin/purge", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert done(client.get("/admin/stats"))["n_stored"] == 1  # type: ignore[index]


def test_the_cache_is_disabled_and_enabled_again(server: Server, client: httpx2.Client) -> None:
    client.post("/predict", json=IDS)
    assert done(client.post("/admin/disable")) == {"enabled": False} and server.is_disabled
    client.post("/predict", json=IDS)
    assert server.cache.stats().bypassed == {"disabled": 1} and server.cache.stats().n_hits == 0
    assert done(client.get("/admin/stats"))["enabled"] is False  # type: ignore[index]
    assert done(client.post("/admin/enable")) == {"enabled": True} and not server.is_disabled
    client.post("/predict", json=IDS)
    assert server.cache.stats().hits == {"exact": 1}


@pytest.mark.slow
def test_what_waits_is_audited() -> None:
    with calibrated(audit=1.0, audit_in_background=False, audit_share=0.0) as cache, serving(cache) as server:
        for one in requests(40, seed=3)[0]:
            cache(**one)
        waiting = cache.stats().audit
        assert waiting is not None and waiting.n_waiting > 0
        with listening(make_app(server)) as address:
            assert done(httpx2.post(f"{address}/admin/audit")) == {"audited": waiting.n_waiting}
            assert done(httpx2.get(f"{address}/admin/stats"))["audit"]["n_waiting"] == 0  # type: ignore[index]


def test_the_cache_is_saved_to_the_folder_of_the_settings(server: Server, client: httpx2.Client) -> None:
    client.post("/predict", json=IDS)
    assert done(client.post("/admin/save")) == {"saved": True}
    assert server.settings.save is not None
    with LLMCache.load(build(CLASSIFIERS["bert"]), server.settings.save) as loaded:
        assert loaded.stats().n_stored == 1


def test_a_save_that_cannot_be_is_refused_in_words(
    server: Server, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path) -> None:
        raise StoreError(f"no space left at {folder}")

    monkeypatch.setattr(server.cache, "save", fail)
    answer = client.post("/admin/save")
    assert answer.status_code == 424 and "log says why" in answer.json()["error"]
    assert str(server.settings.save) not in answer.text and str(server.settings.save) in caplog.text
    with serving() as without, listening(make_app(without)) as address:
        answer = httpx2.post(f"{address}/admin/save")
    assert answer.status_code == 422 and "--save" in answer.json()["error"]


def test_stats_are_plain_values(client: httpx2.Client, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client.post("/predict", json=IDS)
    stats = server.cache.stats()
    monkeypatch.setattr(
        type(stats), "to_dict", lambda self: {"nan": float("nan"), "inf": (float("-inf"), 1.5), "n": {3: 4}}
    )
    told = json.loads(client.get("/admin/stats").text, parse_constant=pytest.fail)
    assert told == {"enabled": True, "phase": "ready", "under_way": 0, "nan": None, "inf": [None, 1.5], "n": {"3": 4}}


def test_others_are_answered_while_an_operator_waits(
    server: Server, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_under_way, may_end = threading.Event(), threading.Event()

    def drain() -> int:
        is_under_way.set()
        assert may_end.wait(30)
        return 7

    monkeypatch.setattr(server.cache, "drain", drain)
    answers: list[object] = []
    operator = threading.Thread(target=lambda: answers.append(done(httpx2.post(f"{client.base_url}/admin/audit"))))
    operator.start()
    assert is_under_way.wait(30)
    assert client.post("/predict", json=IDS).status_code == 200
    may_end.set()
    operator.join()
    assert answers == [{"audited": 7}]


def test_a_drained_server_finishes_and_refuses_until_it_is_resumed(models: Path) -> None:
    server, release = make_server(models / "classifier"), threading.Event()
    with TestClient(create_app(server)) as client:

        def ask() -> httpx2.Response:
            answer: httpx2.Response = client.post("/predict", json={"inputs": "my card"})
            return answer

        with ThreadPoolExecutor(1) as pool:
            server.thread.submit(lambda: release.wait(20))
            under_way = pool.submit(ask)
            while server.encoder is None or not len(server.encoder):
                time.sleep(0.001)
            assert client.post("/admin/drain").json() == {"phase": "draining", "under_way": 1}
            refused = ask()
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"] == "the server is draining"
            assert client.post("/v1/classify", json={"input": "my card"}).json()["error"]["code"] == 503
            assert client.get("/health").status_code == client.head("/health").status_code == 503
            assert client.get("/metrics").status_code == client.get("/").status_code == 200
            release.set()
            assert under_way.result().status_code == 200
        assert client.get("/admin/stats").json()["phase"] == "draining"
        assert client.post("/admin/resume").json() == {"phase": "ready", "under_way": 0}
        assert ask().status_code == client.head("/health").status_code == 200
        server.refuse_waiting()  # told to stop
        assert client.post("/admin/resume").json()["phase"] == client.post("/admin/drain").json()["phase"] == "stopping"
        assert ask().status_code == 503


def test_a_purge_of_what_all_may_read_says_what_is_left(models: Path, tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.yaml", "boss", "public", ("infer", "admin"))
    for kind, keys, has_note in (
        (decoders.NAME, tmp_path / "keys.yaml", True),
        (decoders.NAME, None, False),
        ("classifier", tmp_path / "keys.yaml", False),
    ):
        with TestClient(create_app(make_server(models / kind, keys=keys, warmup_tokens=0))) as client:
            client.headers["Authorization"] = f"Bearer {key}"
            for namespace in ("public", "other"):
                answer = client.post("/admin/purge", json={"namespace": namespace}).json()
                assert ("tenants keep copies" in answer.pop("note", "")) == (has_note and namespace == "public")
                assert answer == {"purged": 0}


@pytest.mark.hostile("keys, paths and origins")
def test_pages_of_other_origins_change_nothing(server: Server, client: httpx2.Client) -> None:
    client.post("/predict", json=IDS)
    strangers: list[dict[str, str]] = [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Origin": str(client.base_url).rstrip("/")},
        {"Origin": "http://evil.example:80", "Host": "evil.example:80"},
        {"Sec-Fetch-Site": "same-origin", "Host": "evil.example"},
        {"Sec-Fetch-Site": "same-origin", "Host": "["},
    ]
    for change in CHANGES:
        for headers in strangers:
            answer = client.post(f"/admin/{change}", json={"namespace": "default"}, headers=headers)
            assert answer.status_code == 403 and "evil" not in answer.text, (change, headers)
    assert server.cache.stats().n_stored == 1 and not server.is_disabled and server.phase == "ready"


def test_every_change_is_tried_above(server: Server) -> None:
    paths = make_app(server).openapi()["paths"]
    changing = {path.removeprefix("/admin/") for path in paths if path.startswith("/admin/") and "post" in paths[path]}
    assert changing == set(CHANGES)


def test_the_own_page_and_clients_that_are_no_browsers_may(client: httpx2.Client, tmp_path: Path) -> None:
    own = str(client.base_url).rstrip("/")
    for sent in ({"Origin": own}, {"Sec-Fetch-Site": "same-origin", "Origin": own}, {"Sec-Fetch-Site": "none"}, {}):
        assert done(client.post("/admin/audit", headers=sent)) == {"audited": 0}
    by_name = {"Origin": "https://cache.example", "Host": "cache.example"}
    keys = tmp_path / "keys.yaml"
    with serving(keys=keys) as server, listening(make_app(server)) as address:  # a stranger's page has no key of it
        assert done(httpx2.post(f"{address}/admin/audit", headers=by_name)) == {"audited": 0}
