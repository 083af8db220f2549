"""The file of keys, the commands that write it, and what each request needs a key for."""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from llmcache.serving.authentication import scope_of
from tests.serving.application import client_of, make_app
from tests.serving.walking import routes_of, walk_routes

from llmcache.errors import ConfigError
from llmcache.serving.keys import Keys, add_key, read_keys, remove_key
from tests.commands import run_main

HASH = hashlib.sha256(b"key").hexdigest()
ENTRY = {"name": "search", "hash": HASH, "namespace": "team-a", "scopes": ["infer"]}


def write(path: Path, content: Any, mode: int = 0o600) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


class TestFile:
    @pytest.mark.parametrize("name", ["keys.yaml", "keys.json"])
    def test_what_is_added_is_read_and_removed(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        keys = [
            add_key(path, "search", "team-a", ["infer"]),
            add_key(path, "1234", "public", ["infer", "admin"], max_concurrent=3),
        ]
        entries = read_keys(path)
        assert [entry.hash for entry in entries] == [hashlib.sha256(key.encode()).hexdigest() for key in keys]
        assert [(one.name, one.namespace, one.scopes, one.max_concurrent) for one in entries] == [
            ("search", "team-a", ["infer"], None),
            ("1234", "public", ["infer", "admin"], 3),
        ]
        text = path.read_text(encoding="utf-8")
        assert not any(key in text for key in keys)
        assert (json.loads if name.endswith("json") else yaml.safe_load)(text)[0]["name"] == "search"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        remove_key(path, "search")
        assert [entry.name for entry in read_keys(path)] == ["1234"]
        remove_key(path, "1234")
        assert read_keys(path) == []

    def test_keys_are_256_random_bits(self, path: Path) -> None:
        keys = [add_key(path, f"key-{number}", "a", ["infer"]) for number in range(4)]
        assert len(set(keys)) == 4
        for key in keys:
            mark, _, random = key.partition("_")
            assert mark == "llmcache" and len(base64.urlsafe_b64decode(random + "=")) == 32

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            ("", "expected a list of keys, found NoneType"),
            ("{}", "expected a list of keys, found dict"),
            ("- [", "not valid YAML"),
            ([ENTRY | {"namespace": None}], "key 'search': namespace is wrong"),
            ([{**ENTRY, "namespace": ""}], "key 'search': namespace is wrong"),
            ([{name: ENTRY[name] for name in ENTRY if name != "namespace"}], "key 'search': namespace is missing"),
            ([{**ENTRY, "namespace": "public"}], "key 'search': namespace 'public' is read by all"),
            ([ENTRY, {**ENTRY, "name": "other"}], "key 'other': another key has the same hash"),
            ([ENTRY, {**ENTRY, "hash": HASH[::-1]}], "key 'search': another key has the same name"),
            ([{**ENTRY, "hash": "llmcache_plain-key"}], "key 'search': hash is wrong: give 64 hexadecimal digits"),
            ([{**ENTRY, "hash": HASH.upper()}], "key 'search': hash is wrong"),
            ([{**ENTRY, "hash": HASH + "\n"}], "key 'search': hash is wrong"),
            ([{**ENTRY, "scopes": []}], "key 'search': scopes is wrong: give a list of `infer`, `admin`"),
            ([{**ENTRY, "scopes": ["root"]}], "key 'search': scopes is wrong"),
            ([{**ENTRY, "scopes": "infer"}], "key 'search': scopes is wrong"),
            ([{**ENTRY, "max_concurrent": 0}], "key 'search': max_concurrent is wrong: give a whole number from 1"),
            ([{**ENTRY, "max_concurrent": True}], "key 'search': max_concurrent is wrong"),
            ([{**ENTRY, "llmcache_plain-key": 1}], "key 'search': a field that is not known; known: name, hash"),
            ([{**ENTRY, "name": "llmcache_plain-key!"}], "entry 1: name is wrong"),
            ([ENTRY, {**ENTRY, "name": 5}], "entry 2: name is wrong"),
            ([ENTRY, "llmcache_plain-key"], "entry 2: expected a mapping of name, hash"),
        ],
    )
    def test_what_is_wrong_is_told_by_the_name_of_the_key(self, path: Path, content: Any, told: str) -> None:
        write(path, content)
        with pytest.raises(ConfigError) as refusal:
            read_keys(path)
        text = str(refusal.value)
        assert text.startswith(str(path)) and told in text
        assert HASH not in text and "plain-key" not in text  # a key that was put in the wrong place, for instance

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        for name, content, told in (
            ("keys.json", b"[", "not valid JSON (line 1)"),
            ("keys.json", b"[" * 100_000, "not valid JSON"),
            ("keys.yaml", b"\xff", "not UTF-8"),
            ("keys.yaml", b"#" * 1_000_001, "too large"),
        ):
            path = tmp_path / name
            path.write_bytes(content)
            path.chmod(0o600)
            with pytest.raises(ConfigError) as refusal:
                read_keys(path)
            assert told in str(refusal.value)
        with pytest.raises(FileNotFoundError):
            Keys(tmp_path / "none.yaml")

    @pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
    def test_a_file_that_others_may_write_is_refused_and_one_that_they_may_read_warned_of(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for mode in (0o620, 0o602):
            write(path, [ENTRY], mode)
            with pytest.raises(ConfigError, match="chmod 600"):
                Keys(path)
        write(path, [ENTRY], 0o644)
        assert len(Keys(path)) == 1
        assert "other users may read it" in caplog.text
        caplog.clear()
        path.chmod(0o600)
        Keys(path)
        assert caplog.text == ""

    @pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root gives files away")
    def test_a_file_of_another_user_is_refused_but_by_root_who_leaves_it_theirs(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        add_key(path, "first", "a", ["infer"])
        os.chown(path, 1, 1)
        add_key(path, "second", "a", ["infer"])
        assert (path.stat().st_uid, path.stat().st_gid, len(read_keys(path))) == (1, 1, 2)
        monkeypatch.setattr(os, "geteuid", lambda: 2)
        with pytest.raises(ConfigError, match="belongs to another user"):
            read_keys(path)
        os.chown(path, 0, 0)
        assert len(read_keys(path)) == 2

    def test_a_link_stays_one(self, tmp_path: Path) -> None:
        link = tmp_path / "link.yaml"
        link.symlink_to(tmp_path / "keys.yaml")
        add_key(link, "search", "a", ["infer"])
        assert link.is_symlink() and len(read_keys(tmp_path / "keys.yaml")) == 1

    def test_a_write_that_fails_leaves_the_file_whole(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        add_key(path, "search", "a", ["infer"])
        before = path.read_bytes()

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space"):
            add_key(path, "other", "a", ["infer"])
        assert path.read_bytes() == before
        assert {one.name for one in path.parent.iterdir()} <= {path.name, f".{path.name}.lock"}

    def test_adding_at_the_same_time_loses_no_key(self, path: Path) -> None:
        threads = [threading.Thread(target=add_key, args=(path, f"n{number}", "a", ["infer"])) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(entry.name for entry in read_keys(path)) == [f"n{number}" for number in range(8)]


class TestFollowing:
    def test_keys_come_and_go_without_a_restart(self, path: Path) -> None:
        first = add_key(path, "first", "a", ["infer"]).encode()
        keys = Keys(path)
        second = add_key(path, "second", "b", ["infer", "admin"], 2).encode()
        assert keys.find(second) is None
        keys.look()
        found = keys.find(second)
        assert found is not None and (found.name, found.namespace, found.max_concurrent) == ("second", "b", 2)
        assert found.scopes == {"infer", "admin"}
        remove_key(path, "first")
        keys.look()
        assert keys.find(first) is None and keys.find(second) == found
        remove_key(path, "second")
        keys.look()
        assert keys.find(second) is None and len(keys) == 0

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda path: path.write_text("- {"),
            lambda path: path.write_text(""),
            lambda path: path.write_text(json.dumps([{**ENTRY, "hash": "llmcache_plain-key"}])),
            lambda path: path.chmod(0o666),
            lambda path: path.unlink(),
        ],
        ids=["syntax", "empty", "entry", "mode", "gone"],
    )
    def test_a_file_that_became_broken_keeps_the_last_keys(
        self, path: Path, spoil: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        key = add_key(path, "search", "a", ["infer"]).encode()
        keys = Keys(path)
        good = path.read_text(encoding="utf-8")
        spoil(path)
        keys.look()
        keys.look()
        assert keys.find(key) is not None and keys.n_failures == 2
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(errors) == 1 and str(path) in errors[0].getMessage() and "plain-key" not in caplog.text
        write(path, good)
        keys.look()
        assert keys.n_failures == 2 and keys.find(key) is not None
        remove_key(path, "search")
        keys.look()
        assert keys.find(key) is None
        assert "every request is refused" in caplog.text

    def test_a_file_that_did_not_change_is_not_read_again(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        add_key(path, "search", "a", ["infer"])
        keys = Keys(path)
        monkeypatch.setattr("llmcache.serving.keys.read_keys", lambda path: pytest.fail("read"))
        keys.look()
        assert keys.n_failures == 0

    def test_a_thread_looks_until_it_is_closed(self, path: Path) -> None:
        key = add_key(path, "search", "a", ["infer"]).encode()
        keys = Keys(path)
        keys.follow(0.001)
        remove_key(path, "search")
        while keys.find(key) is not None:
            time.sleep(0.001)
        keys.close()
        keys.close()
        assert not any(thread.name == "llmcache-keys" for thread in threading.enumerate())

    def test_every_key_is_compared_in_constant_time(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        given = [add_key(path, f"n{number}", "a", ["infer"]).encode() for number in range(3)]
        keys = Keys(path)
        compared = []
        compare = hmac.compare_digest
        monkeypatch.setattr(hmac, "compare_digest", lambda *both: compared.append(both) or compare(*both))
        for key, name in zip([*given, b"", b"wrong"], ["n0", "n1", "n2", None, None], strict=True):
            compared.clear()
            found = keys.find(key)
            assert (found and found.name) == name
            assert len(compared) == 3 and {len(one) for both in compared for one in both} == {32}


class TestCommands:
    def test_add_list_remove(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_main("keys", "add", path, "--name", "search", "--namespace", "team-a") == 0
        key = capsys.readouterr().out
        assert key.endswith("\n") and hashlib.sha256(key.strip().encode()).hexdigest() == read_keys(path)[0].hash
        assert (
            run_main("keys", "add", path, "--name", "ops", "--namespace", "public", "--admin", "--max-concurrent", "2")
            == 0
        )
        capsys.readouterr()
        assert run_main("keys", "list", path) == 0
        shown = capsys.readouterr().out
        assert "search" in shown and "team-a" in shown and "infer, admin" in shown
        assert read_keys(path)[0].hash not in shown and key.strip() not in shown
        assert run_main("keys", "remove", path, "--name", "search") == 0
        assert [entry.name for entry in read_keys(path)] == ["ops"]

    @pytest.mark.parametrize(
        ("args", "told"),
        [
            (("add", "--name", "search", "--namespace", "b"), "another key has the same name"),
            (("add", "--name", "a b", "--namespace", "b"), "entry 2: name is wrong"),
            (("add", "--name", "other", "--namespace", "public"), "is written with the scope `admin` only"),
            (("remove", "--name", "other"), "no key is named 'other'; there are: search"),
        ],
    )
    def test_what_is_wrong_is_one_line_and_changes_nothing(
        self, path: Path, args: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        add_key(path, "search", "a", ["infer"])
        before = path.read_bytes()
        assert run_main("keys", args[0], path, *args[1:]) == 2
        captured = capsys.readouterr()
        assert told in captured.err and captured.err.count("\n") == 1 and captured.out == ""
        assert path.read_bytes() == before
        assert run_main("keys", "list", path.with_name("none.yaml")) == 2


@pytest.fixture
def guarded(path: Path) -> dict[str, str]:
    """Keys of a file, by name."""
    return {
        "user": add_key(path, "user", "team-a", ["infer"]),
        "operator": add_key(path, "operator", "ops", ["admin"]),
    }


@pytest.mark.hostile("keys, paths and origins")
class TestAuthentication:
    def test_every_route_but_liveness_needs_a_key(self, path: Path, guarded: dict[str, str]) -> None:
        app = make_app(Keys(path))
        assert ("POST", "/v1/chat/completions") in routes_of(app)  # of a router that was included
        assert asyncio.run(walk_routes(app)) > 70

    def test_the_walk_finds_a_route_that_is_open(self) -> None:
        with pytest.raises(AssertionError, match=r"DELETE .*: 4"):
            asyncio.run(walk_routes(make_app(keys=None)))

    def test_a_key_says_who_asks_and_what_it_may_do(self, path: Path, guarded: dict[str, str]) -> None:
        async def ask() -> None:
            async with client_of(make_app(Keys(path))) as client:
                for name, method, route, status in (
                    ("user", "GET", "/whoami", 200),
                    ("user", "POST", "/admin/purge", 403),
                    ("user", "GET", "/metrics", 403),
                    ("user", "GET", "/", 403),
                    ("user", "GET", "/nothing", 404),
                    ("user", "GET", "/admin/nothing", 403),
                    ("user", "GET", "/embed", 405),
                    ("operator", "GET", "/whoami", 403),
                    ("operator", "POST", "/admin/purge", 200),
                    ("operator", "GET", "/metrics", 200),
                    ("operator", "GET", "/", 200),
                ):
                    answer = await client.request(method, route, headers={"Authorization": f"Bearer {guarded[name]}"})
                    assert answer.status_code == status, (name, method, route)
                    assert guarded[name] not in answer.text
                answer = await client.get("/whoami", headers={"Authorization": f"bearer  {guarded['user']} "})
                assert answer.json() == {"name": "user", "namespace": "team-a"}

        asyncio.run(ask())

    def test_basic_has_the_key_as_its_password(self, path: Path, guarded: dict[str, str]) -> None:
        async def ask() -> None:
            async with client_of(make_app(Keys(path))) as client:
                answer = await client.get("/", auth=("anybody", guarded["operator"]))
                assert answer.status_code == 200 and answer.json()["name"] == "operator"
                assert (await client.get("/", auth=(guarded["operator"], "wrong"))).status_code == 401
                asked = await client.get("/")
                challenges = asked.headers.get_list("www-authenticate")
                assert [one.split()[0] for one in challenges] == ["Bearer", "Basic"]  # a browser then asks for it
                assert "Basic" not in (await client.get("/whoami")).headers["www-authenticate"]

        asyncio.run(ask())

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Authorization": ""},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer None"},
            {"Authorization": "Digest KEY"},
            {"Authorization": "KEY"},
            {"Authorization": "Basic KEY"},
            {"Authorization": "Basic !!!"},
            {"Authorization": "Basic é".encode("latin-1").decode("latin-1")},
            {"Authorization": "Bearer " + "x" * 60_000},
            {"X-API-Key": "KEY"},
            {"Cookie": "key=KEY"},
        ],
        ids=lambda headers: " ".join(f"{name} {value[:16]}" for name, value in headers.items()) or "none",
    )
    def test_everything_else_is_401_in_the_dialect_of_the_route(
        self, path: Path, guarded: dict[str, str], headers: dict[str, str], caplog: pytest.LogCaptureFixture
    ) -> None:
        key = guarded["user"]

        async def ask() -> None:
            given = [(name.encode(), value.replace("KEY", key).encode("latin-1")) for name, value in headers.items()]
            async with client_of(make_app(Keys(path))) as client:
                answer = await client.get(f"/whoami?key={key}&api_key={key}", headers=given)
                assert answer.status_code == 401 and answer.json()["error_type"] == "Validation"
                answer = await client.post("/v1/refuse", headers=given)
                assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
                assert key not in answer.text

        asyncio.run(ask())
        assert caplog.text == ""

    def test_a_body_that_was_not_read_ends_the_connection(self, path: Path, guarded: dict[str, str]) -> None:
        async def ask() -> None:
            async with client_of(make_app(Keys(path))) as client:
                for content, ends in ((b"x", "close"), (b"", None)):
                    answer = await client.post("/embed", content=content)
                    assert answer.status_code == 401 and answer.headers.get("connection") == ends

        asyncio.run(ask())

    def test_two_headers_are_refused(self, path: Path, guarded: dict[str, str]) -> None:
        async def ask() -> int:
            both = [("Authorization", f"Bearer {guarded['user']}"), ("Authorization", "Bearer other")]
            async with client_of(make_app(Keys(path))) as client:
                return (await client.get("/whoami", headers=both)).status_code

        assert asyncio.run(ask()) == 401

    def test_without_keys_everybody_is_one_tenant(self) -> None:
        async def ask() -> None:
            async with client_of(make_app()) as client:
                assert (await client.get("/whoami")).json() == {"name": "anyone", "namespace": "default"}
                assert (await client.get("/whoami", headers={"Authorization": "Bearer EMPTY"})).status_code == 200

        asyncio.run(ask())

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({}, 200),
            ({"Origin": "http://server"}, 200),
            ({"Sec-Fetch-Site": "same-origin", "Origin": "https://proxy.example"}, 200),
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Sec-Fetch-Site": "same-site", "Origin": "http://server"}, 403),
        ],
    )
    def test_pages_of_other_sites_cannot_make_a_browser_use_its_password(
        self, path: Path, guarded: dict[str, str], headers: dict[str, str], status: int
    ) -> None:
        async def ask() -> None:
            async with client_of(make_app(Keys(path)), **headers) as client:
                auth = ("", guarded["operator"])
                assert (await client.post("/admin/purge", auth=auth)).status_code == status
                assert (await client.get("/metrics", auth=auth)).status_code == 200
                bearer = {"Authorization": f"Bearer {guarded['operator']}"}
                assert (await client.post("/admin/purge", headers=bearer)).status_code == 200
            async with client_of(make_app(), **headers) as client:
                assert (await client.post("/admin/purge")).status_code == status

        asyncio.run(ask())

    def test_a_websocket_is_refused_and_the_lifespan_is_not(self, path: Path, guarded: dict[str, str]) -> None:
        async def ask(kind: str) -> list[dict[str, Any]]:
            sent: list[dict[str, Any]] = []

            async def send(message: Any) -> None:
                sent.append(message)

            async def receive() -> dict[str, Any]:
                return {"type": "lifespan.startup" if not sent else "lifespan.shutdown"}

            scope = {"type": kind, "path": "/health", "headers": [], "method": "GET"}
            await make_app(Keys(path))(scope, receive, send)
            return sent

        assert [(one["type"], one["code"]) for one in asyncio.run(ask("websocket"))] == [("websocket.close", 1008)]
        assert asyncio.run(ask("lifespan"))[0]["type"] == "lifespan.startup.complete"

    def test_a_path_behind_a_proxy_needs_the_same_scope(self, path: Path, guarded: dict[str, str]) -> None:
        import httpx2

        async def ask() -> None:
            transport = httpx2.ASGITransport(app=make_app(Keys(path)), root_path="/llm")
            user = {"Authorization": f"Bearer {guarded['user']}"}
            async with httpx2.AsyncClient(transport=transport, base_url="http://server", headers=user) as client:
                assert (await client.post("/llm/admin/purge")).status_code == 403
                assert (await client.post("/admin/purge")).status_code == 403
                assert (await client.get("/llm/")).status_code == 403
                assert (await client.get("/llm")).status_code == 403
                assert (await client.get("/llm/whoami")).status_code == 200
                assert (await client.get("/llm/health", headers={"Authorization": ""})).status_code == 200

        asyncio.run(ask())

    def test_scopes_of_paths(self) -> None:
        assert {scope_of(method, path) for method in ("GET", "HEAD") for path in ("/health", "/healthz")} == {None}
        assert {scope_of("POST", "/health"), scope_of("GET", "/health/"), scope_of("GET", "/v1/models")} == {"infer"}
        assert {scope_of("GET", path) for path in ("/", "/metrics", "/admin", "/admin/x", "/admin.js")} == {"admin"}
