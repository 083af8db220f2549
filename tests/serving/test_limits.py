"""What a request may take, and what is said of one that is wrong, too large, too slow or too many."""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI
from pydantic import Field
from starlette.requests import ClientDisconnect

from llmcache.serving.connections import Connection
from llmcache.serving.failures import RequestIds
from llmcache.serving.keys import Keys, add_key
from llmcache.serving.limits import Limits
from llmcache.serving.settings import ServerSettings
from tests.serving.application import SECRET, Gate, client_of, make_app
from tests.serving.walking import unbounded_fields

pytestmark = pytest.mark.hostile("bodies, headers, sizes, and clients that are slow or go")

JSON = {"Content-Type": "application/json"}
SETTINGS = ServerSettings(model="tiny")


def ask(app: FastAPI, method: str, path: str, **given: Any) -> httpx2.Response:
    async def run() -> httpx2.Response:
        async with client_of(app) as client:
            return await client.request(method, path, **given)

    return asyncio.run(run())


def post(path: str, content: bytes | str, **settings: Any) -> httpx2.Response:
    return ask(make_app(**settings), "POST", path, content=content, headers=JSON)


def message_of(answer: httpx2.Response) -> str:
    """The text of an error, in the dialect of its route."""
    found = answer.json()
    if answer.request.url.path.startswith("/v1/"):
        error = found["error"]
        assert set(found) == {"error"} and set(error) == {"message", "type", "param", "code"}
        assert error["code"] == answer.status_code
        return error["message"]
    assert set(found) == {"error", "error_type"}
    return found["error"]


class TestErrors:
    @pytest.mark.parametrize("path", ["/embed", "/v1/chat/completions"])
    @pytest.mark.parametrize(
        ("content", "told"),
        [
            ("{", "not valid JSON"),
            ('{"inputs": "a"} x', "not valid JSON"),
            ("'a'", "not valid JSON"),
            ('{"inputs": NaN}', "not valid JSON"),
            ('{"temperature": -Infinity, "inputs": "a"}', "not valid JSON"),
            ("[" * 100_000, "not valid JSON: recursion limit exceeded"),
            ('{"inputs":' + "[" * 500 + "]" * 500 + "}", "not valid JSON: recursion limit exceeded"),
            (r'{"inputs": "\ud800"}', "not valid JSON"),
            (r'{"\udfff": "a", "inputs": "a"}', "not valid JSON"),
            (b'{"inputs": "\xff\xfe"}', "not valid JSON"),
            ('{"inputs": "a"}'.encode("utf-16"), "not valid JSON"),
            ('{"inputs": "a\x00"}', "not valid JSON"),
            ("9" * 100_000, ""),
            ("", "Field required"),
            ("null", ""),
            ("[]", "valid dictionary"),
            ('"text"', "valid dictionary"),
        ],
        ids=lambda value: str(value)[:24] if isinstance(value, str | bytes) else None,
    )
    def test_bodies_that_are_no_request(
        self, path: str, content: bytes | str, told: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        answer = post(path, content)
        assert answer.status_code == (400 if path.startswith("/v1/") else 422)
        assert told in message_of(answer) and len(answer.text) < 400
        assert caplog.text == ""

    @pytest.mark.parametrize(
        ("path", "body", "told"),
        [
            ("/embed", {}, "inputs: Field required"),
            ("/embed", {"inputs": 5}, "inputs: Input should be a valid string; inputs: Input should be a valid list"),
            ("/embed", {"inputs": {SECRET: SECRET}}, "inputs: Input should be a valid string"),
            ("/embed", {"inputs": ["a", 7]}, "inputs: Input should be a valid string; inputs[1]: Input should"),
            ("/embed", {"inputs": "a", "truncate": SECRET}, "truncate: Input should be a valid boolean"),
            ("/embed", {"inputs": SECRET}, "inputs: is not valid"),
            ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content: Field required"),
            ("/v1/chat/completions", {"messages": SECRET}, "messages: Input should be a valid list"),
            ("/v1/chat/completions", {"messages": [{}] * 9}, "messages: List should have at most 8 items"),
            ("/v1/chat/completions", {"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
            ("/v1/chat/completions", {"temperature": 1e999}, ""),
            ("/v1/chat/completions", {"logit_bias": {SECRET: SECRET}}, "logit_bias: give a number for each token"),
        ],
    )
    def test_wrong_fields_are_named_and_their_values_are_not(
        self, path: str, body: Any, told: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        answer = post(path, json.dumps(body).replace("Infinity", "1e999"))
        assert answer.status_code == (400 if path.startswith("/v1/") else 422)
        assert message_of(answer).startswith(told)
        assert SECRET not in answer.text and "Mildred" not in caplog.text
        if path.startswith("/v1/"):
            assert answer.json()["error"]["param"] == message_of(answer).partition(":")[0]
            assert answer.json()["error"]["type"] == "invalid_request_error"
        else:
            assert answer.json()["error_type"] == "Validation"

    def test_only_the_first_of_many_errors_are_told(self) -> None:
        answer = post("/v1/chat/completions", json.dumps({"messages": [{}] * 8}))
        assert answer.status_code == 400 and len(answer.text) < 400
        assert "messages[1].role: Field required; and 13 more" in message_of(answer)

    def test_a_million_items_are_refused_and_none_is_looked_at_twice(self) -> None:
        assert unbounded_fields(make_app()) == []
        answer = post("/embed", b'{"inputs":[' + b"1," * 900_000 + b"1]}")
        assert answer.status_code == 422 and message_of(answer).endswith("inputs[0]: Input should be a valid string")

    def test_fields_that_collect_errors_are_found(self) -> None:
        app = FastAPI()

        @app.post("/count")
        async def count(body: dict[str, list[Annotated[list[dict[str, Any]], Field(max_length=2)]]]) -> None: ...

        assert unbounded_fields(app) == ["/count: dict of list", "/count: list of list"]

    def test_a_body_of_another_kind_is_told_what_to_send(self) -> None:
        for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
            answer = ask(make_app(), "POST", "/embed", content=b'{"inputs": "a"}', headers=headers)
            assert answer.status_code == 422 and "Content-Type: application/json" in message_of(answer)
        answer = ask(make_app(), "POST", "/embed", content=b'{"inputs": "a"}', headers={"Content-Type": "a/b+json"})
        assert answer.status_code == 422

    @pytest.mark.parametrize(
        ("method", "path", "status", "kind"),
        [
            ("POST", "/refuse", 424, "Backend"),
            ("POST", "/v1/refuse", 400, "invalid_request_error"),
            ("GET", "/nothing", 404, "Validation"),
            ("POST", "/v1/nothing", 404, "not_found_error"),
            ("DELETE", "/embed", 405, "Validation"),
            ("GET", "/v1/chat/completions", 405, "invalid_request_error"),
            ("GET", "/../etc/passwd", 404, "Validation"),
            ("GET", "/%2e%2e/v1/refuse", 404, "Validation"),
        ],
    )
    def test_refusals_and_routes_that_are_not_there(self, method: str, path: str, status: int, kind: str) -> None:
        answer = ask(make_app(), method, path)
        assert answer.status_code == status
        found = answer.json()
        assert kind == (found["error"]["type"] if isinstance(found["error"], dict) else found["error_type"])
        assert (status == 405) == ("allow" in answer.headers)
        assert "passwd" not in answer.text and path not in answer.text
        if path == "/v1/refuse":
            assert found["error"]["param"] == "model"

    def test_other_errors_of_http_keep_their_kind_and_lose_their_text(self) -> None:
        for status, seen in ((400, 422), (401, 401), (403, 403), (418, 422), (429, 429), (500, 424), (503, 503)):
            answer = ask(make_app(), "GET", f"/status/{status}")
            assert answer.status_code == seen and message_of(answer) and SECRET not in answer.text
        answer = ask(make_app(), "POST", "/stream?n_chunks=Mildred")
        assert answer.status_code == 422 and message_of(answer).startswith("n_chunks: Input should be a valid integer")

    @pytest.mark.parametrize(
        ("path", "body", "status"),
        [("/fail", {"inputs": "Mildred"}, 424), ("/v1/chat/completions", {"model": "broken"}, 500)],
    )
    def test_a_failure_is_logged_once_by_its_type_and_told_by_its_id(
        self, path: str, body: Any, status: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        headers = {**JSON, "X-Request-Id": "req-1"}
        answer = ask(make_app(), "POST", path, content=json.dumps(body), headers=headers)
        assert answer.status_code == status
        assert message_of(answer) == "the server failed on this request; its log has more under req-1"
        (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        kind = "RuntimeError" if path == "/fail" else "ZeroDivisionError"
        assert record.getMessage().startswith(f"{kind} in request req-1, at ") and "application.py:" in caplog.text
        assert "Mildred" not in caplog.text and record.exc_info is None

    def test_a_failure_of_a_middleware_is_answered_too(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken:
            def __init__(self, app: Any) -> None:
                self.app = app

            async def __call__(self, *_: Any) -> None:
                raise KeyError(SECRET)

        async def run() -> httpx2.Response:
            transport = httpx2.ASGITransport(app=RequestIds(Broken(None)))  # type: ignore[arg-type]
            async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.get("/v1/models")

        answer = asyncio.run(run())
        assert answer.status_code == 500 and answer.headers["x-request-id"] in answer.text
        assert "KeyError" in caplog.text and "Mildred" not in caplog.text


class TestRequestIds:
    @pytest.mark.parametrize("given", ["a", "x" * 128, "0a.B_c-9"])
    def test_an_id_that_is_fit_is_echoed(self, given: str) -> None:
        for path in ("/health", "/nothing", "/embed"):
            answer = ask(make_app(), "GET", path, headers={"X-Request-Id": given})
            assert answer.headers.get_list("x-request-id") == [given]

    @pytest.mark.parametrize(
        "given",
        [b"", b"x" * 129, b"a b", b"a\tb", b"a\r\nSet-Cookie: b", b"a\n", b"\xc3\xa9", b"a,b", b"<script>", b"a\x00"],
    )
    def test_another_is_replaced(self, given: bytes) -> None:
        answer = ask(make_app(), "GET", "/health", headers=[(b"X-Request-Id", given)])
        (made,) = answer.headers.get_list("x-request-id")
        assert len(made) == 32 and made.encode() != given and "set-cookie" not in answer.headers

    def test_none_or_two_are_replaced(self) -> None:
        made = {
            ask(make_app(), "GET", "/health", headers=headers).headers["x-request-id"]
            for headers in ([], [], [("X-Request-Id", "a"), ("X-Request-Id", "b")])
        }
        assert len(made) == 3 and not made & {"a", "b"}


async def in_chunks(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


class TestBodies:
    def test_a_body_that_is_too_large_is_refused_by_its_length_or_by_its_bytes(self) -> None:
        body = json.dumps({"inputs": "a" * 986}).encode()
        assert len(body) == 1000
        for path, is_openai in (("/embed", False), ("/v1/chat/completions", True)):
            app = make_app(payload_limit=999)
            for content in (body, in_chunks(body[:500], body[500:])):
                answer = ask(app, "POST", path, content=content, headers=JSON)
                assert answer.status_code == 413 and answer.headers["connection"] == "close"
                assert message_of(answer) == "the body has more than 999 bytes: send less at once"
                assert is_openai == ("code" in str(answer.json()))
            for content in (body, in_chunks(body[:500], body[500:])):
                assert ask(make_app(payload_limit=1000), "POST", path, content=content, headers=JSON).is_success

    def test_a_string_of_10_mb_is_refused(self) -> None:
        assert post("/embed", json.dumps({"inputs": "a" * 10_000_000})).status_code == 413

    def test_bodies_on_their_way_are_bounded_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llmcache.serving.limits.N_BODIES", 1)

        async def run() -> None:
            async with client_of(make_app(payload_limit=1000)) as client:
                wait, has_begun = asyncio.Event(), asyncio.Event()

                async def slow() -> AsyncIterator[bytes]:
                    yield b'{"inputs": "' + b"a" * 900
                    has_begun.set()
                    await wait.wait()
                    yield b'"}'

                first = asyncio.create_task(client.post("/embed", content=slow(), headers=JSON))
                await has_begun.wait()
                refused = await client.post("/embed", content=in_chunks(b" " * 150, b"1"), headers=JSON)
                assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
                assert (await client.post("/embed", content=b'{"inputs": "a"}', headers=JSON)).status_code == 200
                wait.set()
                assert (await first).json() == [900]
                assert (
                    await client.post("/embed", content=in_chunks(b" " * 150, b"1"), headers=JSON)
                ).status_code == 422

        asyncio.run(run())

    def test_a_body_that_does_not_come_is_refused(self) -> None:
        async def never() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(30)

        for path, is_openai in (("/embed", False), ("/v1/chat/completions", True)):
            answer = ask(make_app(body_timeout_s=0.01), "POST", path, content=never(), headers=JSON)
            assert answer.status_code == 408 and answer.headers["connection"] == "close"
            assert message_of(answer) == "the body was not whole after 0.01 s"
            assert is_openai == ("code" in str(answer.json()))


async def all_of(gate: Gate, *requests: Awaitable[httpx2.Response]) -> list[httpx2.Response]:
    """Answers of requests that are held together, each begun when the ones before it wait or are answered."""
    tasks = []
    for request in requests:
        tasks.append(asyncio.ensure_future(request))
        done = sum(task.done() for task in tasks)
        await gate.until(lambda gate: gate.n_waiting + sum(task.done() for task in tasks) == len(tasks))
        assert done <= len(tasks)
    gate.is_open.set()
    return list(await asyncio.gather(*tasks))


class TestPlaces:
    def test_above_the_limit_of_the_server_requests_are_refused(self) -> None:
        async def run() -> None:
            gate = Gate()
            async with client_of(make_app(gate=gate, max_concurrent_requests=2)) as client:
                held = await all_of(gate, *(client.post("/hold") for _ in range(2)), client.post("/v1/refuse"))
                assert [answer.status_code for answer in held] == [200, 200, 429]
                assert held[2].headers["retry-after"] == "1"
                assert held[2].json()["error"]["type"] == "rate_limit_error"
                assert (await client.post("/hold")).status_code == 200

        asyncio.run(run())

    def test_liveness_metrics_and_the_operator_need_no_place(self) -> None:
        async def run() -> None:
            gate = Gate()
            async with client_of(make_app(gate=gate, max_concurrent_requests=1)) as client:
                others = [client.get("/health"), client.get("/metrics"), client.get("/"), client.post("/admin/purge")]
                held = await all_of(gate, client.post("/hold"), *others, client.post("/hold"))
                assert [answer.status_code for answer in held] == [200, 200, 200, 200, 200, 429]
                assert held[5].json()["error_type"] == "Overloaded"

        asyncio.run(run())

    def test_above_the_limit_of_a_tenant_only_its_own_requests_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.yaml"
        small, large = add_key(path, "small", "a", ["infer"], 1), add_key(path, "large", "b", ["infer"])

        async def run() -> None:
            gate = Gate()
            app = make_app(Keys(path), gate)
            async with (
                client_of(app, Authorization=f"Bearer {small}") as one,
                client_of(app, Authorization=f"Bearer {large}") as two,
            ):
                held = await all_of(gate, one.post("/hold"), one.post("/hold"), two.post("/hold"), two.post("/hold"))
                assert [answer.status_code for answer in held] == [200, 429, 200, 200]
                assert (await one.post("/hold")).status_code == 200

        asyncio.run(run())

    def test_a_request_that_fails_gives_its_place_back(self) -> None:
        async def run() -> None:
            async with client_of(make_app(max_concurrent_requests=1)) as client:
                for path in ("/fail", "/nothing", "/fail", "/embed"):
                    answer = await client.post(path, json={"inputs": "a"})
                    assert answer.status_code != 429

        asyncio.run(run())


class Peer:
    """One connection to an application, spoken to in ASGI messages, for what no client library does."""

    def __init__(self, app: Any, path: str, query: bytes = b"", reads: bool = True) -> None:
        self.received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[Any] = []
        self._reads = reads
        scope = {
            "type": "http",
            "http_version": "1.1",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": "POST",
            "path": path,
            "root_path": "",
            "query_string": query,
            "headers": [],
        }
        self.served = asyncio.create_task(app(scope, self.received.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if not self._reads and message["type"] == "http.response.body":
            await asyncio.Event().wait()

    def say(self, **message: Any) -> None:
        self.received.put_nowait({"type": "http.request", "body": b"", "more_body": False, **message})


class TestClientsThatGo:
    def test_the_work_for_one_who_has_gone_is_cancelled(self, caplog: pytest.LogCaptureFixture) -> None:
        async def run() -> None:
            gate = Gate()
            app = make_app(gate=gate, max_concurrent_requests=1)
            for path in ("/hold", "/stream"):
                peer = Peer(app, path)
                peer.say()
                await gate.until(lambda gate: gate.n_waiting == 1)
                peer.say(type="http.disconnect")
                await asyncio.wait_for(peer.served, 5)
                assert gate.n_waiting == 0
                assert len(peer.sent) == (0 if path == "/hold" else 4)
            assert gate.n_cancelled == 2
            gate.is_open.set()
            async with client_of(app) as client:
                assert (await client.post("/hold")).status_code == 200  # its place is free

        asyncio.run(run())
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

    def test_one_who_goes_before_the_body_is_whole_reaches_no_route(self, caplog: pytest.LogCaptureFixture) -> None:
        async def run() -> None:
            gate = Gate()
            peer = Peer(make_app(gate=gate), "/hold")
            peer.say(body=b"{", more_body=True)
            peer.say(type="http.disconnect")
            await asyncio.wait_for(peer.served, 5)
            assert peer.sent == [] and gate.n_waiting == gate.n_cancelled == 0

        asyncio.run(run())
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

    def test_one_who_does_not_read_has_gone(self, caplog: pytest.LogCaptureFixture) -> None:
        async def run() -> None:
            gate = Gate()
            app = make_app(gate=gate, send_timeout_s=0.01, max_concurrent_requests=1)
            for path in ("/stream", "/embed"):
                peer = Peer(app, path, reads=False)
                peer.say()
                await asyncio.wait_for(peer.served, 5)
                assert peer.sent[0]["type"] == "http.response.start" and len(peer.sent) == 2
            gate.is_open.set()
            async with client_of(app) as client:
                assert (await client.post("/hold")).status_code == 200

        asyncio.run(run())
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

    def test_a_server_that_stops_cancels_its_requests_and_says_so(self) -> None:
        async def run() -> None:
            gate = Gate()
            peer = Peer(make_app(gate=gate), "/hold")
            peer.say()
            await gate.until(lambda gate: gate.n_waiting == 1)
            peer.served.cancel()
            await peer.served
            assert gate.n_cancelled == 1
            start, body = peer.sent
            assert start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
            assert json.loads(body["body"])["error_type"] == "Unhealthy"

        asyncio.run(run())

    def test_a_body_that_is_on_its_way_when_the_server_stops_is_answered(self) -> None:
        async def run() -> None:
            peer = Peer(make_app(), "/embed")
            peer.say(body=b"{", more_body=True)
            await asyncio.sleep(0)
            peer.served.cancel()
            await peer.served
            assert peer.sent[0]["status"] == 503

        asyncio.run(run())

    def test_a_server_that_stops_is_not_taken_for_a_client_that_goes(self) -> None:
        async def run() -> None:
            is_cleaning = asyncio.Event()

            async def app(*_: Any) -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    is_cleaning.set()
                    await asyncio.sleep(30)

            peer = Peer(Limits(app, SETTINGS), "/hold")
            peer.say()
            peer.say(type="http.disconnect")
            await is_cleaning.wait()
            peer.served.cancel()
            with pytest.raises(asyncio.CancelledError):
                await peer.served

        asyncio.run(run())

    def test_work_after_the_answer_is_not_cancelled_and_nothing_is_sent_to_one_who_has_gone(self) -> None:
        async def run() -> None:
            gate = Gate()

            async def app(scope: Any, receive: Any, send: Any) -> None:
                await send({"type": "http.response.start", "status": 200})
                await send({"type": "http.response.body", "body": b""})
                await gate.wait()
                assert (await receive())["type"] == "http.request"
                assert (await receive())["type"] == "http.disconnect"
                with pytest.raises(ClientDisconnect):
                    await send({"type": "http.response.body", "body": b""})

            peer = Peer(Limits(app, SETTINGS), "/hold")
            peer.say()
            await gate.until(lambda gate: gate.n_waiting == 1)
            peer.say(type="http.disconnect")
            await gate.until(lambda gate: peer.received.empty())
            await asyncio.sleep(0)
            assert gate.n_cancelled == 0
            gate.is_open.set()
            await peer.served
            assert len(peer.sent) == 2

        asyncio.run(run())

    def test_an_answer_that_fails_in_its_middle_has_no_end(self, caplog: pytest.LogCaptureFixture) -> None:
        async def run() -> None:
            peer = Peer(make_app(), "/stream", b"fail_at=1")
            peer.say()
            await peer.served
            assert [message.get("more_body") for message in peer.sent] == [None, True]

        asyncio.run(run())
        assert "RuntimeError in request" in caplog.text and "Mildred" not in caplog.text


@contextmanager
def serving(app: FastAPI) -> Iterator[tuple[str, int]]:
    """A real server on a free port, in a thread."""
    config = uvicorn.Config(app, http=Connection, log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


HEAD = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


def speak(address: tuple[str, int], *parts: bytes, half_close: bool = False) -> bytes:
    """What a server answers to bytes, until it closes the connection."""
    with socket.create_connection(address, timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65_536):
            answer += chunk
    return answer


def dribble(address: tuple[str, int], head: bytes) -> bytes:
    """What is answered to a client that sends a byte now and then, until the connection is closed."""
    answer = b""
    with socket.create_connection(address, timeout=0.02) as connection, suppress(ConnectionError):
        connection.sendall(head)
        while True:
            try:
                chunk = connection.recv(65_536)
            except TimeoutError:
                connection.sendall(b" ")
            else:
                answer += chunk
                if not chunk:
                    break
    return answer


def is_alive(address: tuple[str, int]) -> bool:
    return httpx2.post(f"http://{address[0]}:{address[1]}/embed", json={"inputs": "abc"}).json() == [3]


@pytest.mark.slow
class TestSockets:
    def test_slow_clients_are_closed_and_keep_nobody_from_being_served(self) -> None:
        with serving(make_app(body_timeout_s=0.3, max_concurrent_requests=1)) as address, ThreadPoolExecutor(8) as pool:
            slow = [
                pool.submit(dribble, address, HEAD % b"/embed" + b"Content-Length: 100000\r\n\r\n") for _ in range(8)
            ]
            while not all(one.done() for one in slow):
                assert is_alive(address)  # though there is one place
                time.sleep(0.05)
            for one in slow:
                assert one.result().startswith(b"HTTP/1.1 408 ") and b"connection: close" in one.result().lower()

    def test_a_head_that_does_not_come_closes_the_connection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Connection, "head_timeout_s", 0.3)
        whole = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
        with serving(make_app()) as address:
            for given in (b"", b"POST /embed HTTP/1.1\r\nHost:"):
                assert speak(address, given) == b""
            with socket.create_connection(address, timeout=10) as connection:
                for _ in range(3):  # one that asks is kept
                    connection.sendall(whole)
                    answer = b""
                    while not answer.endswith(b"\r\n\r\n{}"):
                        answer += connection.recv(65_536)
                    time.sleep(0.2)
                connection.sendall(b"POST /emb")
                assert connection.recv(65_536) == b""

    def test_half_closed_connections_leave_nothing_behind(self, caplog: pytest.LogCaptureFixture) -> None:
        with serving(make_app(max_concurrent_requests=1)) as address:
            for _ in range(3):
                speak(address, HEAD % b"/embed" + b"Content-Length: 100\r\n\r\n{", half_close=True)
                speak(address, HEAD % b"/hold" + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", half_close=True)
                speak(address, b"POST /embed HT", half_close=True)
                assert is_alive(address)
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []

    @pytest.mark.parametrize("path", [b"/embed", b"/stream?n_chunks=3"])
    def test_whole_requests_are_answered_though_their_client_sends_no_more(self, path: bytes) -> None:
        body = b'{"inputs": "abc"}'
        asked = HEAD % path + b"Content-Length: %d\r\n\r\n" % len(body) + body
        with serving(make_app()) as address:
            assert speak(address, asked + asked, half_close=True).count(b"HTTP/1.1 200 OK") == 2
            assert is_alive(address)

    def test_what_takes_long_is_answered_to_a_client_that_sends_no_more(self) -> None:
        gate = Gate()
        with serving(make_app(gate=gate)) as address, socket.create_connection(address, timeout=10) as connection:
            connection.sendall(HEAD % b"/hold" + b"Content-Length: 0\r\n\r\n")
            wait_for(lambda: gate.n_waiting == 1)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 100 ")
            gate.open()
            while chunk := connection.recv(65_536):
                answer += chunk
            assert b"HTTP/1.1 200 OK" in answer and answer.endswith(b'"held"')

    def test_a_client_that_goes_within_an_answer_has_gone_though_nothing_is_written(self) -> None:
        gate = Gate()
        with serving(make_app(gate=gate)) as address:
            connection = socket.create_connection(address)
            connection.sendall(HEAD % b"/stream?n_chunks=1" + b"Content-Length: 0\r\n\r\n")
            wait_for(lambda: gate.n_waiting == 1)
            answer = b""
            while not answer.endswith(b"x\r\n"):
                answer += connection.recv(65_536)
            connection.close()
            wait_for(lambda: gate.n_cancelled == 1)

    def test_of_the_older_protocol_a_client_that_sends_no_more_has_gone(self) -> None:
        gate = Gate()
        with serving(make_app(gate=gate)) as address:
            assert speak(address, b"POST /hold HTTP/1.0\r\nContent-Length: 0\r\n\r\n", half_close=True) == b""
            wait_for(lambda: gate.n_cancelled == 1)

    def test_a_client_that_goes_after_it_has_closed_its_half_frees_its_place(self) -> None:
        gate = Gate()
        with serving(make_app(gate=gate, max_concurrent_requests=1)) as address:
            connection = socket.create_connection(address)
            connection.sendall(HEAD % b"/hold" + b"Content-Length: 0\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            wait_for(lambda: gate.n_waiting == 1)
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
            assert gate.n_cancelled == 0
            connection.close()
            wait_for(lambda: gate.n_cancelled == 1)
            assert is_alive(address)

    def test_who_sends_too_much_still_reads_the_answer(self) -> None:
        with serving(make_app(payload_limit=1000)) as address:
            head = HEAD % b"/embed" + b"Content-Length: 10000000\r\n\r\n"
            answer = speak(address, head, b"x" * 10_000_000)
            assert b" 413 " in answer and answer.endswith(b'"error_type": "Validation"}')
            chunked = (
                HEAD % b"/v1/refuse"
                + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
                + b"400\r\n"
                + b"x" * 1024
                + b"\r\n"
            )
            assert b" 413 " in speak(address, chunked, b"0\r\n\r\n")
            assert is_alive(address)

    def test_a_client_that_goes_frees_its_place(self) -> None:
        gate = Gate()
        with serving(make_app(gate=gate, max_concurrent_requests=1)) as address:
            connection = socket.create_connection(address)
            connection.sendall(HEAD % b"/hold" + b"Content-Length: 0\r\n\r\n")
            wait_for(lambda: gate.n_waiting == 1)
            connection.close()
            wait_for(lambda: gate.n_cancelled == 1)
            assert is_alive(address)

    def test_a_client_that_does_not_read_frees_its_place(self) -> None:
        app = make_app(send_timeout_s=1, max_concurrent_requests=1)
        with serving(app) as address, socket.create_connection(address) as connection:
            connection.sendall(HEAD % b"/stream?n_chunks=1000" + b"Content-Length: 0\r\n\r\n")
            wait_for(lambda: is_refused(address))
            wait_for(lambda: not is_refused(address))
            assert is_alive(address)

    def test_headers_cannot_be_injected(self) -> None:
        with serving(make_app()) as address:
            for value in (b"a\r\nX-Evil: 1", b"a\nX-Evil: 1", b"a\rX-Evil: 1", b"a%0d%0aX-Evil: 1"):
                head = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Request-Id: " + value + b"\r\n\r\n"
                assert b"x-evil" not in speak(address, head).lower()


def is_refused(address: tuple[str, int]) -> bool:
    return httpx2.post(f"http://{address[0]}:{address[1]}/embed", json={"inputs": "abc"}).status_code == 429


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
