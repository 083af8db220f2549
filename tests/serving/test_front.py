"""The server's front: keys and namespaces, limits, hostile bodies, request ids, disconnects, shutdown."""

import base64
import gzip
import json
import re
import signal
import socket
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.routing import iter_route_contexts
from pydantic import ValidationError
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from llmcache.serving.app import create_app
from llmcache.serving.bodies import decoded
from llmcache.serving.front import OPEN
from llmcache.serving.keys import add_key
from llmcache.serving.refusals import Refusal
from llmcache.serving.server import Server
from llmcache.serving.settings import ServerSettings
from tests.redis_server import wait_until
from tests.serving.served import client_of, figure, is_computing, listening, make_server, model_held

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
#: Unknown paths, and misspelt paths of open routes.
UNKNOWN = ("/nothing", "/v1/nothing", "/health/", "//health", "/health/../info", "/%68ealth/x", "/HEALTH", "/admin/x")
SECRET = "the patient is called Mildred"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A file of keys, and Authorization headers by key name."""
    path, infer = tmp_path / "keys.yaml", ("infer",)
    made = {
        "ann": add_key(path, "ann", "a", infer, max_concurrent=1),
        "bob": add_key(path, "bob", "b", infer),
        "boss": add_key(path, "boss", "public", (*infer, "admin")),
        "meter": add_key(path, "meter", "a", ("metrics",)),
    }
    return path, {name: f"Bearer {key}" for name, key in made.items()}


LIMITS: dict[str, Any] = {"max_concurrent_requests": 2, "payload_limit": 1_000_000, "body_timeout_s": 0.5}


@pytest.fixture
def server(models: Path) -> Server:
    return make_server(models / "classifier", **LIMITS)


@pytest.fixture(scope="module")
def shared(models: Path) -> Iterator[TestClient]:
    """A client of one server, for tests that leave nothing behind in it."""
    with client_of(make_server(models / "classifier", **LIMITS)) as made:
        yield made


def routes_of(client: Any) -> set[tuple[str, str]]:
    """Method and path of each route."""
    found = set()
    for route in iter_route_contexts(client.app.routes):
        path = re.sub(r"{[^}]*}", "x", str(route.path))
        found |= {(method, path) for method in route.methods or METHODS}
    return found


@pytest.mark.hostile("keys, paths and origins")
@pytest.mark.parametrize("kind", ["classifier", "decoder"])
def test_every_route_but_liveness_needs_a_key(kind: str, models: Path, keys: tuple[Path, dict[str, str]]) -> None:
    with client_of(make_server(models / kind, keys=keys[0])) as client:
        asked = routes_of(client) | {(method, path) for method in METHODS for path in (*UNKNOWN, "/health", "/healthz")}
        assert len(asked) > 60
        for method, path in sorted(asked):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic d3Jvbmc="}):
                answer = client.request(method, path, headers=headers)
                assert (answer.status_code == 401) != ((method, path) in OPEN), f"{method} {path}: {answer.status_code}"
        assert client.get("/metrics").headers.get_list("www-authenticate")[1].startswith("Basic")
        assert isinstance(client.get("/v1/models").json()["error"], dict)
        assert client.get("/info").json()["error_type"] == "Validation"


def test_a_key_decides_the_namespace_and_public_is_read_by_all(models: Path, keys: tuple[Path, dict[str, str]]) -> None:
    path, of = keys
    server = make_server(models / "classifier", keys=path, reveal_hits=True)
    with client_of(server) as client:

        def hit(name: str, text: str, **more: Any) -> str:
            told = {"Authorization": of[name]}
            answer = client.post("/predict", json={"inputs": text, **more}, headers=told)
            assert answer.status_code == 200, answer.text
            return str(answer.headers["x-cache"])

        assert [hit("ann", "my card"), hit("ann", "my card"), hit("bob", "my card")] == ["MISS", "HIT", "MISS"]
        assert [hit("boss", "the rate"), hit("ann", "the rate"), hit("bob", "the rate")] == ["MISS", "HIT", "HIT"]
        assert hit("bob", "lost cash", namespace="a", cache_salt="a") == "MISS"
        assert hit("ann", "lost cash") == "MISS"
        as_password = base64.b64encode(f"me:{of['ann'].removeprefix('Bearer ')}".encode()).decode()
        basic = {"Authorization": f"Basic {as_password}"}
        assert client.post("/predict", json={"inputs": "my card"}, headers=basic).headers["x-cache"] == "HIT"
        purge = {"namespace": "a"}
        assert client.post("/admin/purge", json=purge, headers={"Authorization": of["ann"]}).status_code == 403
        assert client.get("/metrics", headers={"Authorization": of["bob"]}).status_code == 403
        done = client.post("/admin/purge", json=purge, headers={"Authorization": of["boss"]})
        assert done.json() == {"purged": 2} and hit("ann", "my card") == "MISS"
        two = [("Authorization", of["ann"]), ("Authorization", of["bob"])]
        assert client.post("/predict", json={"inputs": "my card"}, headers=httpx2.Headers(two)).status_code == 401
        assert figure(server, "http_requests_total", route="/predict", status="401") == 1
        with pytest.raises(WebSocketDisconnect, check=lambda error: error.code == 1008), client.websocket_connect("/"):
            pass


def test_a_key_of_the_scope_metrics_sees_figures_and_changes_nothing(
    models: Path, keys: tuple[Path, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    path, of = keys
    caplog.set_level("INFO", "llmcache")
    with client_of(make_server(models / "classifier", keys=path, access_log=True)) as client:
        headers = {"Authorization": of["meter"]}
        for name in ("/", "/metrics", "/admin/stats", "/admin/figures"):
            assert client.get(name, headers=headers).status_code == 200
        page, own = (client.get("/", headers={"Authorization": of[name]}).text for name in ("meter", "boss"))
        assert 'data-action="purge"' in own and "<button" in own and 'data-action="purge"' not in page
        posted = [name for method, name in routes_of(client) if method == "POST"]
        assert len(posted) > 20
        for name in posted:
            assert client.post(name, headers=headers, json={"namespace": "a", "inputs": SECRET}).status_code == 403
        seen = [one.getMessage() for one in caplog.records if one.name == "llmcache.serving.access"]
        assert any(re.fullmatch(r"GET /metrics 200 [0-9.]+ ms, meter, [0-9a-f]{32}", one) for one in seen)
        assert len(seen) == 6 + len(posted) and not any(SECRET in one for one in seen)


def test_pages_of_allowed_origins_may_ask(models: Path) -> None:
    ours, other = "https://shop.example", "https://evil.example"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with client_of(make_server(models / "classifier", cors_allow_origin=(ours,))) as client:
        for origin, status in ((ours, 200), (other, 400)):
            before = client.options("/predict", headers={"Origin": origin, **asked})
            assert before.status_code == status
            assert ("access-control-allow-origin" in before.headers) == (origin == ours)
        host = {"Host": "127.0.0.1:8080", "Sec-Fetch-Site": "cross-site"}
        answer = client.post("/predict", json={"inputs": "my card"}, headers={"Origin": ours, **host})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ours)
        assert client.post("/predict", json={"inputs": "my"}, headers={"Origin": other, **host}).status_code == 403
        assert client.post("/admin/clear", headers={"Origin": ours, **host}).status_code == 403
        for path in ("/", "/metrics", "/admin/stats", "/admin/figures"):  # read by no page of another origin
            assert "access-control-allow-origin" not in client.get(path, headers={"Origin": ours, **host}).headers
        for path in ("/admin/purge", "/admin/stats"):
            assert client.options(path, headers={"Origin": ours, **asked}).status_code != 200
        assert client.options("/", headers={"Origin": ours, **asked}).status_code == 200  # the main route


@pytest.mark.parametrize("origin", ["shop.example", "https://shop.example/", "https://shop.example/a", "", "null"])
def test_an_origin_that_can_never_match_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="without a path"):
        ServerSettings(model="a", cors_allow_origin=(origin,))


def test_pages_load_nothing_from_elsewhere(shared: TestClient) -> None:
    for path in ("/", "/docs", "/admin/figures"):
        page = shared.get(path)
        policy = page.headers["content-security-policy"]
        assert page.headers["x-frame-options"] == "DENY" and "default-src 'none'" in policy and "http" not in policy
        assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:)?//""", page.text)
        assert path == "/" or "<script" not in page.text


def test_the_routes_are_documented(shared: TestClient) -> None:
    page = shared.get("/docs").text
    assert "POST /v1/chat/completions" in page and "EmbedRequest" in page and 'href="openapi.json"' in page
    document = shared.get("/openapi.json").json()
    assert {"/", "/rerank", "/v1/embeddings", "/v1/chat/completions", "/admin/purge"} <= document["paths"].keys()
    bodies = document["components"]["schemas"]["AnyRequest"]["anyOf"]
    assert len(bodies) == 4 and {"$ref": "#/components/schemas/EmbedRequest"} in bodies


@pytest.mark.hostile("keys, paths and origins")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://127.0.0.1:8080"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:8080"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://evil.example:8080", "Host": "evil.example:8080"}, 403),  # DNS rebinding
        ({"Sec-Fetch-Site": "same-origin", "Host": "evil.example:8080"}, 403),
    ],
)
def test_pages_of_other_origins_change_nothing(shared: TestClient, headers: dict[str, str], status: int) -> None:
    for more in ({}, {"Authorization": "Bearer x"}):  # proves nothing where there are no keys
        told = {"Host": "127.0.0.1:8080", **headers, **more}
        for path in ("/admin/disable", "/admin/enable"):
            assert shared.post(path, headers=told).status_code == status
        assert shared.post("/predict", json={"inputs": "my"}, headers=told).status_code == status
        assert shared.get("/admin/stats", headers=told).status_code == (403 if "Host" in headers else 200)


@pytest.mark.hostile("keys, paths and origins")
def test_without_keys_every_route_checks_the_host(
    shared: TestClient, models: Path, keys: tuple[Path, dict[str, str]]
) -> None:
    for method, path in sorted(routes_of(shared)):
        for more in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Basic eDp4"}):
            told = {"Host": "evil.example:8080", "X-Forwarded-Host": "localhost", **more}
            assert shared.request(method, path, headers=told).status_code == 403, f"{method} {path}"
    with client_of(make_server(models / "classifier", keys=keys[0])) as client:
        told = {"Host": "llm.example", "Authorization": keys[1]["boss"]}
        assert client.get("/info", headers=told).status_code == client.get("/health", headers=told).status_code == 200


@pytest.mark.parametrize("host", ["localhost:8080", "LocalHost.", "127.0.0.1", "[::1]:8080", "server-1", "a.localhost"])
def test_names_that_nobody_else_can_own_are_allowed_without_keys(shared: TestClient, host: str) -> None:
    assert shared.get("/info", headers={"Host": host}).status_code == 200


@pytest.mark.hostile("keys, paths and origins")
@pytest.mark.parametrize(
    "hosts",
    [
        *(["evil.example."], ["EVIL.example:80"], ["127.0.0.1.evil.example"], ["localhost.evil.example"], ["[a.b]"]),
        *(["evil.example@127.0.0.1"], ["127.0.0.1/evil.example"], [""], ["127.0.0.1", "evil.example"]),
    ],
)
def test_other_names_are_not(shared: TestClient, hosts: list[str]) -> None:
    headers = httpx2.Headers([("Host", host) for host in hosts])
    assert shared.get("/metrics", headers=headers).status_code == 403


@pytest.mark.hostile("keys, paths and origins")
def test_hosts_over_a_socket(server: Server) -> None:
    with listening(server) as (_, url):
        evil = b"HTTP/1.1\r\nHost: evil.example\r\n"
        upgrade = (
            b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
        )
        assert b" 403 " in raw(url, b"GET http://localhost/metrics " + evil + b"\r\n")
        assert b" 403 " in raw(url, b"GET /metrics " + evil + upgrade + b"\r\n")
        assert b" 200 OK" in raw(url, b"GET /metrics HTTP/1.0\r\n\r\n")  # no browser sends no host


def test_the_name_of_an_allowed_origin_is_allowed_for_inference(models: Path) -> None:
    allowed = ("https://shop.example", "http://llm.example:8080")
    with client_of(make_server(models / "classifier", cors_allow_origin=allowed)) as client:
        for host, path, status in (
            ("shop.example", "/info", 200),
            ("llm.example:8080", "/info", 200),
            ("llm.example", "/info", 403),
            ("shop.example", "/metrics", 403),
            ("shop.example", "/admin/stats", 403),
        ):
            assert client.get(path, headers={"Host": host}).status_code == status


@pytest.mark.parametrize("given", ["abc-1.2_3", "a" * 128, "a" * 129, "a b", "", "\xe4"])
def test_ids_of_requests(shared: TestClient, given: str) -> None:
    answer = shared.get("/health", headers={"X-Request-Id": given.encode("latin-1")})
    (found,) = answer.headers.get_list("x-request-id")
    is_fit = re.fullmatch(r"[A-Za-z0-9._-]{1,128}", given) is not None
    assert (found == given) == is_fit and (is_fit or len(found) == 32)


@pytest.mark.hostile("bodies, headers, sizes, and clients that are slow or go")
@pytest.mark.parametrize("path", ["/predict", "/v1/classify"])
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "body"),
        (b'{"inputs": NaN}', "inputs"),
        (b'{"inputs": "\\ud800"}', "not valid Unicode"),
        (b'{"inputs": ' + b"[" * 19_000 + b"]" * 19_000 + b"}", "nested too deeply"),
        (b'{"inputs": [' + b'["a"],' * 100_000 + b'["a"]]}', "more than 20,000 lists"),
        (b'{"inputs": "' + b'[\\" ' * 100_000 + b'"}', "at most 32 tokens"),
        (b'{"inputs": [' + b'"a",' * 200_000 + b'"a"]}', "inputs|allowed batch size"),
        (b'{"inputs": "' + b"a " * 400_000 + b'"}', "at most 32 tokens"),
        (b'{"inputs": "' + b"a" * 3_000_000 + b'"}', "more than 1,000,000 bytes"),
        (b'{"inputs": -1}', "inputs"),
        (b'{"input_s": "Mildred"}', "inputs: Field required"),
        (b"\xff\xfe", "not valid JSON"),
        (b"", "body"),
    ],
    ids=lambda one: f"{one[:16]!r} of {len(one)}",
)
def test_hostile_bodies_are_refused_in_the_routes_dialect(
    shared: TestClient, path: str, body: bytes, told: str
) -> None:
    if path == "/v1/classify":
        body, told = body.replace(b'"inputs"', b'"input"'), told.replace("inputs", "input")
    answer = shared.post(path, content=body, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    text = error if path == "/predict" else error["message"]
    assert re.search(told, text) and "aaaa" not in text and "Mildred" not in text and len(text) < 500
    assert shared.get("/health").status_code == 200


BODY = b'{"inputs": "lost my card"}'


@pytest.mark.hostile("bodies, headers, sizes, and clients that are slow or go")
@pytest.mark.parametrize(
    ("encoding", "body", "status", "told"),
    [
        ("gzip", gzip.compress(BODY), 200, ""),
        ("GZIP", gzip.compress(BODY), 200, ""),
        ("x-gzip", gzip.compress(BODY), 200, ""),
        ("deflate", zlib.compress(BODY), 200, ""),
        ("identity", BODY, 200, ""),
        ("gzip", b"", 422, "body"),
        ("gzip", BODY, 422, "not gzip"),
        ("gzip", gzip.compress(BODY)[:-4], 422, "not whole"),
        ("gzip", gzip.compress(BODY) + b"more", 422, "not whole"),
        ("deflate", gzip.compress(BODY), 422, "not deflate"),
        ("gzip", gzip.compress(b"a" * 1_000_001), 413, "more than 1,000,000 bytes"),
        ("deflate", zlib.compress(b"a" * 1_000_001), 413, "more than 1,000,000 bytes"),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY)), 415, "gzip or deflate"),
        ("br", b"a", 415, "gzip or deflate"),
        ("zstd", b"a", 415, "gzip or deflate"),
        ("none", BODY, 415, "gzip or deflate"),
    ],
    ids=lambda one: f"{len(one)} bytes" if isinstance(one, bytes) else None,
)
def test_bodies_may_be_compressed(shared: TestClient, encoding: str, body: bytes, status: int, told: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    answer = shared.post("/predict", content=body, headers=headers)
    assert answer.status_code == status and told in answer.text, answer.text
    if status == 200:
        assert answer.json() == shared.post("/predict", json=json.loads(BODY)).json()


def test_a_bomb_is_not_inflated_beyond_the_limit() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match="once inflated"):
            decoded(bomb, [b"gzip"], 100_000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["classifier", "decoder"])
def test_the_first_wrong_item_ends_the_validation_of_a_list(kind: str, models: Path) -> None:
    """A body with a million wrong items does not make a million errors."""

    def lists(schema: Any) -> Iterator[dict[str, Any]]:
        inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ()
        if isinstance(schema, dict) and schema.get("type") == "list":
            yield schema
        for one in inner:
            yield from lists(one)

    fields = [
        route.body_field for route in create_app(make_server(models / kind)).routes if hasattr(route, "body_field")
    ]
    found = [one for field in fields if field for one in lists(field.field_info.annotation.__pydantic_core_schema__)]
    assert len(found) > 20 and all(one.get("fail_fast") for one in found if one["items_schema"]["type"] != "any")


def test_other_refusals_have_the_routes_dialect(shared: TestClient) -> None:
    for path, method, status in (
        ("/nothing", "GET", 404),
        ("/v1/nothing", "GET", 404),
        ("/predict", "GET", 405),
        ("/embed", "POST", 424),
        ("/v1/embeddings", "POST", 400),
    ):
        answer = shared.request(method, path, json={"inputs": "a", "input": "a"} if method == "POST" else None)
        assert answer.status_code == status
        assert isinstance(answer.json()["error"], dict if path.startswith("/v1") else str)
    wrong = shared.post("/predict", content=b"inputs=a")
    assert wrong.status_code == 422 and "Content-Type: application/json" in wrong.text


def test_a_failure_is_logged_once_by_its_type_and_told_by_its_id(
    client: TestClient, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr(server, "needs", fails)
    for path, status in (("/predict", 424), ("/v1/classify", 500)):
        body = {"inputs": SECRET, "input": SECRET}
        answer = client.post(path, json=body, headers={"X-Request-Id": "mine"})
        assert answer.status_code == status and "mine" in answer.text and SECRET not in answer.text
    assert caplog.text.count("ZeroDivisionError in request mine") == 2 and SECRET not in caplog.text
    assert figure(server, "http_requests_total", route="/predict", status="424") == 1


def test_above_the_limits_requests_are_refused_and_liveness_and_operators_are_not(
    models: Path, keys: tuple[Path, dict[str, str]], pool: ThreadPoolExecutor
) -> None:
    path, of = keys
    server = make_server(models / "classifier", keys=path, max_concurrent_requests=2)
    with client_of(server) as client:

        def ask(name: str, text: str) -> Any:
            return client.post("/predict", json={"inputs": text}, headers={"Authorization": of[name]})

        with model_held(server):
            first = pool.submit(ask, "ann", "my card")
            wait_until(lambda: figure(server, "concurrent_requests") == 1)
            late = ask("ann", "my cash")
            assert (late.status_code, late.headers["retry-after"]) == (429, "1") and "this key" in late.text
            second = pool.submit(ask, "bob", "my card")
            wait_until(lambda: figure(server, "concurrent_requests") == 2)
            late = ask("boss", "my cash")
            assert late.status_code == 429 and "the server" in late.text
            assert client.get("/health").status_code == 200
            assert client.get("/metrics", headers={"Authorization": of["boss"]}).status_code == 200
        assert first.result().status_code == second.result().status_code == 200
        assert figure(server, "concurrent_requests") == 0 and ask("ann", "my rate").status_code == 200


def raw(url: str, content: bytes, more: Callable[[socket.socket], None] = lambda _: None) -> bytes:
    """Send bytes; return the server's whole response."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(content)
        more(connection)
        found = b""
        while part := connection.recv(65_536):
            found += part
            if b"\r\n\r\n" in found and b"connection: close" not in found.lower():
                break
        return found


def post(body: bytes, length: int | None = None, path: str = "/predict") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


@pytest.mark.hostile("bodies, headers, sizes, and clients that are slow or go")
def test_a_body_that_came_to_its_end_but_is_too_large_is_refused_without_waiting_for_more(client: TestClient) -> None:
    answer = client.post("/predict", content=iter([b"a" * 1_000_001]))  # no length: the server must read it
    assert answer.status_code == 413 and "connection" not in answer.headers


@pytest.mark.hostile("bodies, headers, sizes, and clients that are slow or go")
def test_over_a_socket(server: Server, pool: ThreadPoolExecutor) -> None:
    body = json.dumps({"inputs": "my card"}).encode()
    with listening(server) as (_, url):
        assert b" 200 OK" in raw(url, post(body))
        assert b" 413 " in raw(url, post(b"{", 10**9))  # refused by its declared length
        assert b" 408 " in raw(url, post(b"{", 100))  # the rest never comes
        chunked = b"POST /predict HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert b" 413 " in raw(url, chunked + b"ffff0\r\n" + b"a" * 0xFFFF0 + b"\r\nffff\r\n" + b"a" * 0xFFFF)
        before = figure(server, "requests_cancelled_total")
        with model_held(server):
            first = pool.submit(raw, url, post(body.replace(b"card", b"cash")))
            wait_until(lambda: is_computing(server))
            host, port = url.removeprefix("http://").split(":")
            gone = socket.create_connection((host, int(port)))
            gone.sendall(post(body.replace(b"card", b"rate")))
            wait_until(lambda: server.n_waiting == 1)
            gone.close()
            wait_until(lambda: server.n_waiting == 0 and figure(server, "concurrent_requests") == 1)
        assert b" 200 OK" in first.result()
        assert figure(server, "requests_cancelled_total") == before + 1
        assert figure(server, "http_requests_total", status="499") == 1


@pytest.mark.hostile("bodies, headers, sizes, and clients that are slow or go")
def test_bodies_of_strangers_and_of_others_take_nothing_of_a_tenants_budget(
    models: Path, keys: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    path, of = keys
    monkeypatch.setattr("llmcache.serving.front.N_BODIES", 1)

    def half(method: str, route: str, name: str | None = None) -> bytes:
        told = "" if name is None else f"Authorization: {of[name]}\r\n"
        return f"{method} {route} HTTP/1.1\r\nHost: a\r\n{told}Content-Length: 999\r\n\r\n".encode() + b"a" * 900

    with listening(make_server(models / "classifier", keys=path, payload_limit=1000)) as (_, url), ExitStack() as open_:
        port = int(url.rpartition(":")[2])

        def hold(content: bytes) -> socket.socket:
            connection = open_.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            connection.sendall(content)
            return connection

        for method in ("GET", "HEAD"):
            assert b" 200 OK" in hold(half(method, "/health")).recv(65_536)  # before the body's end
        assert b" 401 " in hold(half("POST", "/predict")).recv(65_536)
        hold(half("POST", "/predict", "bob"))
        second = hold(half("POST", "/predict", "bob"))
        assert b" 429 " in second.recv(65_536)
        answer = httpx2.post(f"{url}/predict", json={"inputs": "my"}, headers={"Authorization": of["ann"]})
        assert answer.status_code == 200


@pytest.mark.parametrize("kind", ["classifier", "decoder"])
def test_a_server_that_is_told_to_stop_finishes_what_runs_and_refuses_the_rest(
    kind: str, models: Path, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(models / kind, max_streams=1)
    path = "/predict" if kind == "classifier" else "/v1/completions"

    def ask(text: str) -> Any:
        body = {"inputs": text, "prompt": text, "max_tokens": 4, "temperature": 0}
        return httpx2.post(url + path, json=body, timeout=20)

    with listening(server) as (uvicorn, url):
        ask("the")
        with model_held(server):
            first = pool.submit(ask, "my card")
            wait_until(lambda: figure(server, "concurrent_requests") == 1)
            second = pool.submit(ask, "the card")
            wait_until(lambda: figure(server, "concurrent_requests") == 2)
            wait_until(lambda: server.n_waiting == 1 or kind == "classifier")
            uvicorn.handle_exit(signal.SIGTERM, None)
            if kind == "decoder":  # a waiting generation may be long
                assert (second.result().status_code, second.result().headers["retry-after"]) == (503, "1")
        assert first.result().status_code == 200
        assert kind == "decoder" or second.result().status_code == 200
    assert server.phase == "stopped"
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.parametrize("kind", ["classifier", "decoder"])
def test_what_outlasts_the_grace_is_told_so(kind: str, models: Path, pool: ThreadPoolExecutor) -> None:
    server = make_server(models / kind, grace_s=0.1)
    path = "/predict" if kind == "classifier" else "/v1/completions"
    with listening(server) as (uvicorn, url):
        body = {"inputs": "my card", "prompt": "the", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        release = threading.Event()
        server.thread.submit(lambda: release.wait(20))
        asked = pool.submit(httpx2.post, url + path, json=body, timeout=20)
        wait_until(lambda: figure(server, "concurrent_requests") == 1)
        uvicorn.handle_exit(signal.SIGTERM, None)
        answer = asked.result()
        release.set()
    assert answer.status_code == 503 and "stopping" in answer.text


def test_without_keys_an_address_that_others_reach_is_warned_of(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    from llmcache.serving.running import Uvicorn

    for host, is_told in (("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True)):
        caplog.clear()
        Uvicorn(server, host, 0)
        assert ("without keys" in caplog.text) == is_told
