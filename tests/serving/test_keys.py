"""The file of keys, and the commands that edit it. test_front.py tests which requests need a key."""

import hashlib
import hmac
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from llmcache.errors import ConfigError
from llmcache.serving.app import repeated
from llmcache.serving.keys import KeyEntry, Keys, add_key, read_keys, remove_key
from llmcache.support.yaml_file import parse_yaml
from tests.commands import run_main
from tests.fixtures import Log, Patch, Pool, Shown
from tests.redis_server import wait_until
from tests.serving.served import Client, figure, make_server, model_held

HASH = hashlib.sha256(b"key").hexdigest()
ENTRY = {"name": "search", "hash": HASH, "namespace": "team-a", "scopes": ["infer"]}


def write(path: Path, content: Any, mode: int = 0o600) -> Path:
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_what_is_added_is_read_and_removed_by_commands(path: Path, capsys: Shown) -> None:
    def told(command: str, file: Path, *options: str) -> str:
        assert run_main("keys", command, file, *options) == 0
        return capsys.readouterr().out

    link = path.with_name("link.yaml")
    link.symlink_to(path)
    key = told("add", link, "--name", "search", "--namespace", "team-a").strip()
    assert re.fullmatch("llmcache_[A-Za-z0-9_-]{43}", key)  # 256 bits
    told("add", path, "--name", "1234", "--namespace", "public", "--admin", "--max-concurrent", "2")
    shown, entries = told("list", path), read_keys(path)
    assert "search" in shown and "team-a" in shown and "infer, admin" in shown
    assert entries[0].hash == hashlib.sha256(key.encode()).hexdigest() and entries[0].hash not in shown
    assert [(one.name, one.namespace, one.scopes, one.max_concurrent) for one in entries] == [
        ("search", "team-a", ["infer"], None),
        ("1234", "public", ["infer", "admin"], 2),
    ]
    assert key not in path.read_text() and yaml.safe_load(path.read_text())[0]["name"] == "search"
    assert link.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o600
    for args, why in (
        (("add", "--name", "a b", "--namespace", "b"), "entry 3: name is wrong"),
        (("add", "--name", "other", "--namespace", "b", "--admin", "--metrics"), "give --admin or --metrics"),
        (("remove", "--name", "other"), "no key is named 'other'; there are: search, 1234"),
    ):
        before = path.read_bytes()
        assert run_main("keys", args[0], path, *args[1:]) == 2
        captured = capsys.readouterr()
        assert why in captured.err and captured.err.count("\n") == 1 and captured.out == ""
        assert path.read_bytes() == before
    told("add", path, "--name", "meter", "--namespace", "b", "--metrics")
    assert read_keys(path)[-1].scopes == ["metrics"]
    told("remove", path, "--name", "meter"), told("remove", path, "--name", "search")
    assert [entry.name for entry in read_keys(path)] == ["1234"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "expected a list of keys, found NoneType"),
        ("- [", "not valid YAML"),
        (b"\xff", "not UTF-8"),
        ("#" * 1_000_001, "too large"),
        ([ENTRY | {"namespace": None}], "key 'search': namespace is wrong"),
        ([{name: ENTRY[name] for name in ENTRY if name != "namespace"}], "key 'search': namespace is missing"),
        ([{**ENTRY, "namespace": "public"}], "key 'search': namespace 'public' is read by all"),
        ([ENTRY, {**ENTRY, "name": "other"}], "key 'other': another key has the same hash"),
        ([ENTRY, {**ENTRY, "hash": HASH[::-1]}], "key 'search': another key has the same name"),
        *(
            ([{**ENTRY, "hash": one}], "key 'search': hash is wrong: give 64 hexadecimal digits")
            for one in ("llmcache_plain-key", HASH.upper(), HASH + "\n")
        ),
        *(([{**ENTRY, "scopes": one}], "key 'search': scopes is wrong") for one in ([], ["root"], "infer")),
        *(([{**ENTRY, "max_concurrent": one}], "give a whole number from 1") for one in (0, True)),
        ([{**ENTRY, "llmcache_plain-key": 1}], "key 'search': expected a mapping of name, hash"),
        ([{**ENTRY, "name": "llmcache_plain-key!"}], "entry 1: name is wrong"),
        ([ENTRY, {**ENTRY, "name": 5}], "entry 2: name is wrong"),
        ([ENTRY, "llmcache_plain-key"], "entry 2: expected a mapping of name, hash"),
    ],
)
def test_what_is_wrong_is_told_and_no_key_is_quoted(path: Path, content: Any, told: str) -> None:
    write(path, content)
    with pytest.raises(ConfigError) as refusal:
        read_keys(path)
    text = str(refusal.value)
    assert text.startswith(str(path)) and told in text and HASH not in text and "plain-key" not in text


@pytest.mark.skipif(os.name == "nt", reason="modes are POSIX's")
def test_files_of_others(path: Path, caplog: Log, monkeypatch: Patch) -> None:
    for mode in (0o620, 0o602):
        write(path, [ENTRY], mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            Keys(path, Mock())
    Keys(write(path, [ENTRY], 0o644), Mock())
    assert "other users may read it" in caplog.text
    if os.geteuid() != 0:  # only root may change the owner
        return
    path.chmod(0o600)
    os.chown(path, 1, 1)
    add_key(path, "second", "a", ["infer"])
    assert (path.stat().st_uid, path.stat().st_gid, len(read_keys(path))) == (1, 1, 2)
    monkeypatch.setattr(os, "geteuid", lambda: 2)
    with pytest.raises(ConfigError, match="belongs to another user"):
        read_keys(path)


def test_a_write_that_fails_leaves_the_file_whole(path: Path, monkeypatch: Patch, capsys: Shown) -> None:
    add_key(path, "search", "a", ["infer"])
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    for command in (("add", path, "--name", "other", "--namespace", "a"), ("remove", path, "--name", "search")):
        assert run_main("keys", *command) == 2
        assert capsys.readouterr().err == f"llmcache: {path}: No space left on device\n"
    assert path.read_bytes() == before
    assert {one.name for one in path.parent.iterdir()} <= {path.name, f".{path.name}.lock"}


def test_keys_come_and_go_without_a_restart(path: Path, monkeypatch: Patch) -> None:
    first = add_key(path, "first", "a", ["infer"]).encode()
    keys, threads = Keys(path, Mock()), set()

    def reads(path: Path) -> list[KeyEntry]:
        threads.add(threading.current_thread())
        return read_keys(path)

    monkeypatch.setattr("llmcache.serving.keys.read_keys", reads)
    second = add_key(path, "second", "b", ["infer", "admin"], 2).encode()
    threads.clear()
    with repeated(keys.look, 0.01):
        wait_until(lambda: keys.find(second) is not None)
        found = keys.find(second)
        assert found is not None and (found.name, found.namespace, found.max_concurrent) == ("second", "b", 2)
        assert threads and threading.current_thread() not in threads  # the server's thread parses nothing
        remove_key(path, "first")
        wait_until(lambda: keys.find(first) is None)
        assert keys.find(second) == found


SPOILS: dict[str, Callable[[Path], Any]] = {
    "syntax": lambda path: path.write_text("- {"),
    "empty": lambda path: path.write_text(""),
    "entry": lambda path: path.write_text(json.dumps([{**ENTRY, "hash": "llmcache_plain-key"}])),
    "mode": lambda path: path.chmod(0o666),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_file_that_became_broken_keeps_the_last_keys(path: Path, spoil: str, caplog: Log, monkeypatch: Patch) -> None:
    key = add_key(path, "search", "a", ["infer"]).encode()
    count_failure = Mock()
    keys, good = Keys(path, count_failure), path.read_text()
    SPOILS[spoil](path)
    parse = Mock(wraps=parse_yaml)
    monkeypatch.setattr("llmcache.serving.keys.parse_yaml", parse)
    keys.look()
    keys.look()
    assert parse.call_count <= 1
    assert keys.find(key) is not None and count_failure.call_count == 2
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and str(path) in errors[0].getMessage() and "plain-key" not in caplog.text
    write(path, good)
    remove_key(path, "search")
    keys.look()
    assert count_failure.call_count == 2 and keys.find(key) is None and "every request is refused" in caplog.text


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_removed_keys_generation_ends_at_its_next_token(
    is_stream: bool, path: Path, models: Path, monkeypatch: Patch, pool: Pool
) -> None:
    monkeypatch.setattr("llmcache.serving.app._KEYS_EVERY_S", 0.01)
    told = {"Authorization": f"Bearer {add_key(path, 'shop', 'a', ['infer'])}"}
    body = {"prompt": "where", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": is_stream}
    server = make_server(models / "decoder", keys=path)
    with Client(server) as client:
        asked = pool.submit(client.post, "/v1/completions", json=body, headers=told)
        wait_until(lambda: figure(server, "generation_tokens_total") > 0)
        with model_held(server):
            remove_key(path, "shop")
            wait_until(lambda: client.get("/v1/models", headers=told).status_code == 401)
        answer = asked.result()
        assert "no longer valid" in answer.text and "[DONE]" not in answer.text
        assert answer.status_code == (200 if is_stream else 401)
        assert figure(server, "generation_tokens_total") < 200


def test_adding_at_the_same_time_loses_no_key_and_every_key_is_compared_in_constant_time(
    path: Path, monkeypatch: Patch, pool: Pool
) -> None:
    names = [f"n{number}" for number in range(8)]
    given = [key.encode() for key in pool.map(lambda name: add_key(path, name, "a", ["infer"]), names)]
    keys, compared, compare = Keys(path, Mock()), [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *both: compared.append(both) or compare(*both))
    for key, name in zip([*given, b"", b"wrong"], [*names, None, None], strict=True):
        compared.clear()
        found = keys.find(key)
        assert (found and found.name) == name
        assert len(compared) == len(names) and {len(one) for both in compared for one in both} == {64}
