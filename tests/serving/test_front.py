"""The server's front: keys and namespaces, limits, hostile bodies, request ids, disconnects, shutdown."""

import base64
import gzip
import re
import signal
import socket
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.routing import iter_route_contexts
from pydantic import ValidationError
from starlette.websockets import WebSocketDisconnect

from llmcache.serving.bodies import decoded
from llmcache.serving.front import OPEN
from llmcache.serving.keys import add_key
from llmcache.serving.refusals import Refusal
from llmcache.serving.running import Uvicorn
from llmcache.serving.settings import ServerSettings
from tests.fixtures import Log, Patch, Pool
from tests.redis_server import wait_until
from tests.serving.served import (
    Client,
    Dial,
    Serve,
    figure,
    is_computing,
    listening,
    make_server,
    model_held,
    port_of,
    received,
)

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
#: Unknown paths, and misspelt paths of open routes.
UNKNOWN = ("/nothing", "/v1/nothing", "/health/", "//health", "/health/../info", "/%68ealth/x", "/HEALTH", "/admin/x")
SECRET = "the patient is called Mildred"
LIMITS: dict[str, Any] = {"max_concurrent_requests": 2, "payload_limit": 1_000_000, "body_timeout_s": 0.5}
Headers = dict[str, dict[str, str]]

of_origins = pytest.mark.hostile("keys, paths and origins")
of_bodies = pytest.mark.hostile("bodies, headers, sizes, and clients that are slow or go")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.yaml"


@pytest.fixture(scope="module")
def of(key_file: Path) -> Headers:
    """Headers with a key, by the key's name."""
    made = {
        "ann": add_key(key_file, "ann", "a", ("infer",), max_concurrent=1),
        "bob": add_key(key_file, "bob", "b", ("infer",)),
        "boss": add_key(key_file, "boss", "public", ("infer", "admin")),
        "meter": add_key(key_file, "meter", "a", ("metrics",)),
    }
    return {name: {"Authorization": f"Bearer {key}"} for name, key in made.items()}


@pytest.fixture
def client(serve: Serve) -> Client:
    """A client of a server without keys."""
    return serve("classifier", **LIMITS)


@pytest.fixture
def keyed(serve: Serve, key_file: Path, of: Headers) -> Client:
    """A client of a server with the keys of `of`."""
    return serve("classifier", keys=key_file, reveal_hits=True, access_log=True, **LIMITS)


def routes_of(client: Any) -> set[tuple[str, str]]:
    """Method and path of each route."""
    found = set()
    for route in iter_route_contexts(client.app.routes):
        path = re.sub(r"{[^}]*}", "x", str(route.path))
        found |= {(method, path) for method in route.methods or METHODS}
    return found


@of_origins
def test_every_route_but_liveness_needs_a_key_or_a_name_of_the_machine(
    client: Client, keyed: Client, of: Headers
) -> None:
    routes = routes_of(keyed)
    asked = routes | {(method, path) for method in METHODS for path in (*UNKNOWN, "/health", "/healthz")}
    assert len(asked) > 60
    evil = {"Host": "evil.example:8080", "X-Forwarded-Host": "localhost"}
    for method, path in sorted(asked):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic d3Jvbmc="}):
            answer = keyed.request(method, path, headers=headers)
            assert (answer.status_code == 401) != ((method, path) in OPEN), f"{method} {path}: {answer.status_code}"
            if (method, path) in routes:
                assert client.request(method, path, headers={**evil, **headers}).status_code == 403, f"{method} {path}"
    told = {"Host": "llm.example", **of["boss"]}
    assert {keyed.get(path, headers=told).status_code for path in ("/info", "/health", "/healthz")} == {200}
    assert keyed.get("/metrics").headers.get_list("www-authenticate")[1].startswith("Basic")
    assert isinstance(keyed.get("/v1/models").json()["error"], dict)
    assert keyed.get("/info").json()["error_type"] == "Validation"
    with pytest.raises(WebSocketDisconnect, check=lambda error: error.code == 1008), keyed.websocket_connect("/"):
        pass


def test_a_key_decides_the_namespace_and_public_is_read_by_all(keyed: Client, of: Headers) -> None:
    def hit(name: str, text: str, **more: Any) -> str:
        answer = keyed.post("/predict", json={"inputs": text, **more}, headers=of[name])
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-cache"])

    assert [hit("ann", "my card"), hit("ann", "my card"), hit("bob", "my card")] == ["MISS", "HIT", "MISS"]
    assert [hit("boss", "the rate"), hit("ann", "the rate"), hit("bob", "the rate")] == ["MISS", "HIT", "HIT"]
    assert hit("bob", "lost cash", namespace="a", cache_salt="a") == "MISS"
    assert hit("ann", "lost cash") == "MISS"
    as_password = base64.b64encode(f"me:{of['ann']['Authorization'].removeprefix('Bearer ')}".encode()).decode()
    basic = {"Authorization": f"Basic {as_password}"}
    assert keyed.post("/predict", json={"inputs": "my card"}, headers=basic).headers["x-cache"] == "HIT"
    purge = {"namespace": "a"}
    assert keyed.post("/admin/purge", json=purge, headers=of["ann"]).status_code == 403
    assert keyed.get("/metrics", headers=of["bob"]).status_code == 403
    assert keyed.post("/admin/purge", json=purge, headers=of["boss"]).json() == {"purged": 2}
    assert hit("ann", "my card") == "MISS"
    before = figure(keyed.server, "http_requests_total", route="/predict", status="401")
    two = httpx2.Headers([*of["ann"].items(), *of["bob"].items()])
    assert keyed.post("/predict", json={"inputs": "my card"}, headers=two).status_code == 401
    assert figure(keyed.server, "http_requests_total", route="/predict", status="401") == before + 1


def test_a_key_of_the_scope_metrics_sees_figures_and_changes_nothing(keyed: Client, of: Headers, caplog: Log) -> None:
    caplog.set_level("INFO", "llmcache")
    for name in ("/", "/metrics", "/admin/stats", "/admin/figures"):
        assert keyed.get(name, headers=of["meter"]).status_code == 200
    page, own = (keyed.get("/", headers=of[name]).text for name in ("meter", "boss"))
    assert 'data-action="purge"' in own and "<button" in own and 'data-action="purge"' not in page
    posted = [name for method, name in routes_of(keyed) if method == "POST"]
    assert len(posted) > 20
    for name in posted:
        answer = keyed.post(name, headers=of["meter"], json={"namespace": "a", "inputs": SECRET})
        assert answer.status_code == 403
    seen = [one.getMessage() for one in caplog.records if one.name == "llmcache.serving.access"]
    assert any(re.fullmatch(r"GET /metrics 200 [0-9.]+ ms, meter, [0-9a-f]{32}", one) for one in seen)
    assert len(seen) == 6 + len(posted) and not any(SECRET in one for one in seen)


SHOP, EVIL = "https://shop.example", "https://evil.example"
CROSS = {"Host": "127.0.0.1:8080", "Sec-Fetch-Site": "cross-site"}
ASKED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
OURS, OTHER = {"Origin": SHOP}, {"Origin": EVIL}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "is_told"),
    [
        ("OPTIONS", "/predict", OURS | ASKED, 200, True),
        ("OPTIONS", "/predict", OTHER | ASKED, 400, False),
        ("OPTIONS", "/", OURS | ASKED, 200, True),  # `POST /` is inference
        *(("OPTIONS", path, OURS | ASKED, 405, False) for path in ("/admin/purge", "/admin/stats")),
        ("POST", "/predict", OURS | CROSS, 200, True),
        ("POST", "/predict", OTHER | CROSS, 403, False),
        ("POST", "/admin/clear", OURS | CROSS, 403, False),
        *(("GET", path, OURS | CROSS, 200, False) for path in ("/", "/metrics", "/admin/stats", "/admin/figures")),
        *(("GET", "/info", {"Host": name}, 200, False) for name in ("shop.example", "llm.example:8080")),
        ("GET", "/info", {"Host": "llm.example"}, 403, False),
        *(("GET", path, {"Host": "shop.example"}, 403, False) for path in ("/metrics", "/admin/stats")),
    ],
)
def test_pages_and_names_of_allowed_origins_may_ask_for_inference_alone(
    serve: Serve, method: str, path: str, headers: dict[str, str], status: int, is_told: bool
) -> None:
    client = serve("classifier", cors_allow_origin=(SHOP, "http://llm.example:8080"))
    answer = client.request(method, path, headers=headers, json={"inputs": "my"} if method == "POST" else None)
    assert answer.status_code == status
    assert answer.headers.get("access-control-allow-origin") == (SHOP if is_told else None)
    for wrong in ("shop.example", f"{SHOP}/", f"{SHOP}/a", "", "null"):  # an origin that can never match
        with pytest.raises(ValidationError, match="without a path"):
            ServerSettings(model="a", cors_allow_origin=(wrong,))


@of_origins
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
def test_pages_of_other_origins_change_nothing(client: Client, headers: dict[str, str], status: int) -> None:
    for more in ({}, {"Authorization": "Bearer x"}):  # proves nothing where there are no keys
        told = {"Host": "127.0.0.1:8080", **headers, **more}
        for path in ("/admin/disable", "/admin/enable"):
            assert client.post(path, headers=told).status_code == status
        assert client.post("/predict", json={"inputs": "my"}, headers=told).status_code == status
        assert client.get("/admin/stats", headers=told).status_code == (403 if "Host" in headers else 200)


@of_origins
@pytest.mark.parametrize(
    ("hosts", "is_allowed"),
    [
        *(
            ([one], True)
            for one in ("localhost:8080", "LocalHost.", "127.0.0.1", "[::1]:8080", "server-1", "a.localhost")
        ),
        *(([one], False) for one in ("evil.example.", "EVIL.example:80", "127.0.0.1.evil.example", "[a.b]", "")),
        *(([one], False) for one in ("localhost.evil.example", "evil.example@127.0.0.1", "127.0.0.1/evil.example")),
        (["127.0.0.1", "evil.example"], False),
    ],
)
def test_without_keys_names_that_somebody_else_can_own_are_refused(
    client: Client, hosts: list[str], is_allowed: bool
) -> None:
    headers = httpx2.Headers([("Host", host) for host in hosts])
    assert client.get("/info", headers=headers).status_code == (200 if is_allowed else 403)


def test_the_routes_are_documented(client: Client) -> None:
    page = client.get("/docs")
    assert "POST /v1/chat/completions" in page.text and 'href="openapi.json"' in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"] and "<script" not in page.text
    document = client.get("/openapi.json").json()
    assert {"/", "/rerank", "/v1/embeddings", "/v1/chat/completions", "/admin/purge"} <= document["paths"].keys()
    bodies = document["components"]["schemas"]["AnyRequest"]["anyOf"]
    assert len(bodies) == 4 and {"$ref": "#/components/schemas/EmbedRequest"} in bodies


@pytest.mark.parametrize("given", ["abc-1.2_3", "a" * 128, "a" * 129, "a b", "", "\xe4"])
def test_ids_of_requests(client: Client, given: str) -> None:
    answer = client.get("/health", headers={"X-Request-Id": given.encode("latin-1")})
    (found,) = answer.headers.get_list("x-request-id")
    is_fit = re.fullmatch(r"[A-Za-z0-9._-]{1,128}", given) is not None
    assert (found == given) == is_fit and (is_fit or len(found) == 32)


BODY = b'{"inputs": "lost my card"}'
ZIPPED = gzip.compress(BODY, mtime=0)


@of_bodies
@pytest.mark.parametrize(
    ("body", "encoding", "status", "told"),
    [
        (BODY, "", 200, ""),
        (b'{"inputs": "", "more": 1}', "", 200, ""),  # special tokens alone are an input
        (b"{", "", 422, "not valid JSON"),
        (b"[]", "", 422, "body"),
        (b"", "", 422, "body"),
        (b'{"inputs": NaN}', "", 422, "inputs"),
        (b'{"inputs": "\\ud800"}', "", 422, "not valid Unicode"),
        (b'{"inputs": ' + b"[" * 19_000 + b"]" * 19_000 + b"}", "", 422, "nested too deeply"),
        (b'{"inputs": [' + b'["a"],' * 100_000 + b'["a"]]}', "", 413, "more than 20,000 lists"),
        (b'{"inputs": "' + b'[\\" ' * 100_000 + b'"}', "", 422, "at most 32 tokens"),
        (b'{"inputs": "' + b"a" * 3_000_000 + b'"}', "", 413, "more than 1,000,000 bytes"),
        (b'{"input_s": "Mildred"}', "", 422, "inputs: Field required"),
        *((ZIPPED, one, 200, '"label"') for one in ("gzip", "GZIP", "x-gzip")),
        (zlib.compress(BODY), "deflate", 200, '"label"'),
        (BODY, "identity", 200, '"label"'),
        (b"", "gzip", 422, "body"),
        (BODY, "gzip", 422, "not gzip"),
        (ZIPPED[:-4], "gzip", 422, "not whole"),
        (ZIPPED + b"more", "gzip", 422, "not whole"),
        (ZIPPED, "deflate", 422, "not deflate"),
        (gzip.compress(b"a" * 1_000_001, mtime=0), "gzip", 413, "more than 1,000,000 bytes"),
        (gzip.compress(ZIPPED, mtime=0), "gzip, gzip", 415, "gzip or deflate"),
        (b"a", "br", 415, "gzip or deflate"),
    ],
    ids=lambda one: f"{one[:16]!r} of {len(one)}" if isinstance(one, bytes) else None,
)
def test_bodies_may_be_compressed_and_are_answered_alike_whatever_their_content_type_adds(
    client: Client, body: bytes, encoding: str, status: int, told: str
) -> None:
    plain, charset = (
        client.post("/predict", content=body, headers={"Content-Type": kind, "Content-Encoding": encoding})
        for kind in ("application/json", "application/json; charset=utf-8")
    )
    assert (plain.status_code, plain.json()) == (charset.status_code, charset.json())
    assert plain.status_code == status and told in plain.text, plain.text
    assert "aaaa" not in plain.text and "Mildred" not in plain.text and len(plain.text) < 500


def test_a_bomb_is_not_inflated_beyond_the_limit() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match="once inflated"):
            decoded(bomb, [b"gzip"], 100_000)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_first_wrong_item_ends_the_validation_of_a_list(client: Any) -> None:
    """A body with a million wrong items does not make a million errors."""

    def lists(schema: Any) -> Iterator[dict[str, Any]]:
        inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ()
        if isinstance(schema, dict) and schema.get("type") == "list":
            yield schema
        for one in inner:
            yield from lists(one)

    fields = [field for route in client.app.routes if (field := getattr(route, "body_field", None))]
    found = [one for field in fields for one in lists(field.field_info.annotation.__pydantic_core_schema__)]
    assert len(found) > 20 and all(one.get("fail_fast") for one in found if one["items_schema"]["type"] != "any")


def test_what_is_no_json_is_told_to_be_sent_as_json(client: Client) -> None:
    wrong = client.post("/predict", content=b"inputs=a")
    assert wrong.status_code == 422 and "Content-Type: application/json" in wrong.text


def test_a_failure_is_logged_once_by_its_type_and_told_by_its_id(
    client: Client, monkeypatch: Patch, caplog: Log
) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr(client.server, "needs", fails)
    for path, status in (("/predict", 424), ("/v1/classify", 500)):
        body = {"inputs": SECRET, "input": SECRET}
        answer = client.post(path, json=body, headers={"X-Request-Id": "mine"})
        assert answer.status_code == status and "mine" in answer.text and SECRET not in answer.text
    assert caplog.text.count("ZeroDivisionError in request mine") == 2 and SECRET not in caplog.text


def test_above_the_limits_requests_are_refused_and_liveness_and_operators_are_not(
    keyed: Client, of: Headers, pool: Pool
) -> None:
    server = keyed.server

    def ask(name: str, text: str) -> Any:
        return keyed.post("/predict", json={"inputs": text}, headers=of[name])

    with model_held(server):
        first = pool.submit(ask, "ann", "is my card")
        wait_until(lambda: figure(server, "concurrent_requests") == 1)
        late = ask("ann", "is my cash")
        assert (late.status_code, late.headers["retry-after"]) == (429, "1") and "this key" in late.text
        second = pool.submit(ask, "bob", "is my card")
        wait_until(lambda: figure(server, "concurrent_requests") == 2)
        late = ask("boss", "is my cash")
        assert late.status_code == 429 and "the server" in late.text
        assert keyed.get("/health").status_code == keyed.get("/metrics", headers=of["boss"]).status_code == 200
    assert first.result().status_code == second.result().status_code == 200
    assert figure(server, "concurrent_requests") == 0 and ask("ann", "is my rate").status_code == 200


def post(body: bytes, length: int | None = None) -> bytes:
    head = "POST /predict HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


@of_bodies
def test_over_a_socket(models: Path, client: Client, dial: Dial, pool: Pool, monkeypatch: Patch) -> None:
    monkeypatch.setattr("llmcache.serving.front._LINGER_S", 0.1)
    answer = client.post("/predict", content=iter([b"a" * 1_000_001]))  # no length: the server must read it
    assert answer.status_code == 413 and "connection" not in answer.headers  # nothing more comes
    server = make_server(models / "classifier", **LIMITS)
    evil = b"HTTP/1.1\r\nHost: evil.example\r\n"
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    chunked = b"POST /predict HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    with listening(server) as (_, url):

        def told(content: bytes) -> bytes:
            return received(dial(port_of(url), content))

        assert b" 200 OK" in told(post(BODY))
        assert b" 413 " in told(post(b"{", 10**9))  # refused by its declared length
        assert b" 408 " in told(post(b"{", 100))  # the rest never comes
        assert b" 413 " in told(chunked + b"ffff0\r\n" + b"a" * 0xFFFF0 + b"\r\nffff\r\n" + b"a" * 0xFFFF)
        assert b" 403 " in told(b"GET http://localhost/metrics " + evil + b"\r\n")
        assert b" 403 " in told(b"GET /metrics " + evil + upgrade + b"\r\n")
        assert b" 200 OK" in told(b"GET /metrics HTTP/1.0\r\n\r\n")  # no browser sends no host
        before = figure(server, "requests_cancelled_total")
        with model_held(server):
            first = pool.submit(told, post(BODY.replace(b"card", b"cash")))
            wait_until(lambda: is_computing(server))
            gone = dial(port_of(url), post(BODY.replace(b"card", b"rate")))
            wait_until(lambda: server.n_waiting == 1)
            gone.close()
            wait_until(lambda: server.n_waiting == 0 and figure(server, "concurrent_requests") == 1)
        assert b" 200 OK" in first.result()
        assert figure(server, "requests_cancelled_total") == before + 1
        assert figure(server, "http_requests_total", status="499") == 1


@of_bodies
def test_bodies_of_strangers_and_of_others_take_nothing_of_a_tenants_budget(
    models: Path, key_file: Path, of: Headers, monkeypatch: Patch, dial: Dial
) -> None:
    monkeypatch.setattr("llmcache.serving.front.N_BODIES", 1)
    server = make_server(models / "classifier", keys=key_file, payload_limit=1000)
    with listening(server) as (_, url), ExitStack() as ends:  # a server that stops waits for what is half sent

        def send_half(method: str, route: str, headers: dict[str, str]) -> socket.socket:
            told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head = f"{method} {route} HTTP/1.1\r\nHost: a\r\n{told}Content-Length: 999\r\n\r\n"
            return ends.enter_context(dial(port_of(url), head.encode() + b"a" * 900))

        for method in ("GET", "HEAD"):
            assert b" 200 OK" in send_half(method, "/health", {}).recv(65_536)  # before the body's end
        assert b" 401 " in send_half("POST", "/predict", {}).recv(65_536)
        send_half("POST", "/predict", of["bob"])
        assert b" 429 " in send_half("POST", "/predict", of["bob"]).recv(65_536)
        assert httpx2.post(f"{url}/predict", json={"inputs": "my"}, headers=of["ann"]).status_code == 200


ROUTES = {"classifier": "/predict", "decoder": "/v1/completions"}


def infer(url: str, text: str) -> Any:
    body = {"inputs": text, "prompt": text, "max_tokens": 4, "temperature": 0}
    return httpx2.post(url, json=body, timeout=20)


@pytest.mark.parametrize("outlasts", [False, True])
@pytest.mark.parametrize("kind", ROUTES)
def test_a_server_that_is_told_to_stop_finishes_what_runs_within_the_grace_and_refuses_the_rest(
    kind: str, outlasts: bool, models: Path, pool: Pool, caplog: Log, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("llmcache.serving.running._REFUSAL_S", 0)
    server = make_server(models / kind, max_streams=1, warmup_tokens=0, **({"grace_s": 0.1} if outlasts else {}))
    with listening(server) as (uvicorn, url), ExitStack() as holding:
        holding.enter_context(model_held(server))
        first = pool.submit(infer, url + ROUTES[kind], "my card")
        wait_until(lambda: figure(server, "concurrent_requests") == 1)
        second = pool.submit(infer, url + ROUTES[kind], "the card")
        wait_until(lambda: figure(server, "concurrent_requests") == 2)
        wait_until(lambda: server.n_waiting == 1 or kind == "classifier")
        uvicorn.handle_exit(signal.SIGTERM, None)
        for asked, is_refused in ((second, outlasts or kind == "decoder"), (first, outlasts)):
            if not is_refused:  # a waiting generation may be long
                holding.close()
            answer = asked.result()
            assert answer.status_code == (503 if is_refused else 200)
            assert not is_refused or ("stopping" in answer.text and answer.headers["retry-after"] == "1")
        holding.close()
    assert server.phase == "stopped" and not [one for one in caplog.records if one.levelname == "ERROR"]


def test_without_keys_an_address_that_others_reach_is_warned_of(client: Client, caplog: Log) -> None:
    for host, is_told in (("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True)):
        caplog.clear()
        Uvicorn(client.server, host, 0)
        assert ("without keys" in caplog.text) == is_told
