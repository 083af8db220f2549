"""Stores on disk and on Redis: purges and writes hold, and trouble costs speed only."""

import json
import logging
import os
import pickle
import shutil
import signal
import stat
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from llmcache import BankFileError, ConfigError, LLMCache, StoreError, UnfitBankError
from tests.contract.conftest import PATIENT
from tests.contract.judge import check_same
from tests.forks import fork, needs_fork
from tests.redis_server import RedisServer, redis_server, wait_until
from tests.tiny_models import CLASSIFIERS, GENERATORS, VOCABULARY, build, tokens


def wide() -> nn.Module:
    """A classifier slower than a store's reads, so that reading pays."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    return tf.BertForSequenceClassification(tf.BertConfig(vocab_size=VOCABULARY, **sizes, num_labels=3))


TEXTS = [tokens(1, 60, seed) for seed in range(5)]


def on_disk(folder: Path, make: Callable[[], nn.Module] = wide, **settings: Any) -> LLMCache:
    store = {"name": "disk", "folder": str(folder)}
    return LLMCache.wrap(build(make), store=store, auto_bypass=False, **settings)


def on_redis(url: str, make: Callable[[], nn.Module] = CLASSIFIERS["bert"], **options: Any) -> LLMCache:
    store = {"name": "redis", "url": url, "timeout_ms": PATIENT, **options}
    return LLMCache.wrap(build(make), store=store, auto_bypass=False)


def n_hits(cache: LLMCache, *texts: torch.Tensor) -> int:
    """Ask requests and check their answers; return the number of hits."""
    before = cache.stats().n_hits
    for ids in texts:
        found = cache(input_ids=ids)
        with cache.disabled():
            check_same(found, cache(input_ids=ids))
    return cache.stats().n_hits - before


def n_held(cache: LLMCache) -> int:
    """Return how many values a store holds; ask again while a busy machine gives no figure."""
    found: list[int] = []

    def is_told() -> bool:
        cache.drain()
        stats = cache.stats().store
        assert stats is not None
        found.extend([] if stats.n_values is None else [stats.n_values])
        return bool(found)

    wait_until(is_told)
    return found[0]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    """A server that holds nothing."""
    shared.do("FLUSHALL")
    return shared


# -- writes and purges -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_was_purged_is_never_served(store: dict[str, Any]) -> None:
    """After `purge` no cache serves older entries: not from the store, from its memory, or after a restart."""

    def opened() -> LLMCache:
        return LLMCache.wrap(build(wide), store=store, auto_bypass=False)

    texts = TEXTS[:2]
    with opened() as one, opened() as other:
        assert n_hits(one, *texts) == 0
        one.drain()
        assert n_hits(other, *texts) > 0, "a store that is shared serves what another cache computed"
        other.purge(namespace="default")
        assert n_hits(one, *texts) == 0
        one.drain()
        one.purge(namespace="default")
    with opened() as again:
        assert n_hits(again, *texts) == 0


@pytest.mark.slow
@needs_fork
def test_a_process_that_is_killed_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """Values written before `drain` returns survive `kill -9` whole, and a restart serves them."""
    if (child := fork()) == 0:
        try:
            signal.alarm(60)
            cache = on_disk(tmp_path / "store")
            n_hits(cache, *TEXTS)
            cache.drain()
            cache(input_ids=tokens(1, 50, 99))  # its write waits or is under way
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with on_disk(tmp_path / "store") as cache:
        assert n_held(cache) >= len(TEXTS)
        assert n_hits(cache, *TEXTS) > 0


# -- a damaged index ---------------------------------------------------------------------------------------------------


def overwrite(path: Path, begin: int, end: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    end = len(data) if end is None else end
    data[begin:end] = b"\xa5" * (end - begin)
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no database": lambda path: overwrite(path, 0),
    "a damaged header": lambda path: overwrite(path, 0, 100),
    "damaged tables": lambda path: overwrite(path, 4096),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store that holds three requests."""
    folder = tmp_path_factory.mktemp("written")
    with on_disk(folder, CLASSIFIERS["bert"]) as cache:
        n_hits(cache, *TEXTS[:3])
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_a_miss_and_a_message(
    damage: str, written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store with a damaged index begins empty: `wrap` works, logs one line, and keeps the damaged file aside."""
    folder = shutil.copytree(written, tmp_path / "store", symlinks=True)
    DAMAGES[damage](folder / "index.sqlite")
    damaged = (folder / "index.sqlite").read_bytes()
    with caplog.at_level(logging.WARNING), on_disk(folder, CLASSIFIERS["bert"]) as cache:
        told = [one for one in caplog.records if "index" in one.getMessage()]
        assert len(told) == 1 and not told[0].exc_info
        assert n_held(cache) == 0 and n_hits(cache, *TEXTS[:3]) == 0
        assert n_held(cache) == 3
    assert damaged in [path.read_bytes() for path in folder.iterdir() if path.is_file()]


def test_a_store_that_was_removed_while_it_was_open_begins_anew(tmp_path: Path) -> None:
    """After a folder is removed and made again, old and new caches share its values and purges."""
    folder = tmp_path / "store"
    with on_disk(folder, CLASSIFIERS["bert"]) as one:
        n_hits(one, *TEXTS[:2])
        shutil.rmtree(folder)
        with on_disk(folder, CLASSIFIERS["bert"]) as other:
            n_hits(one, *TEXTS[:2])
            assert n_held(one) == n_held(other)
            other.purge(namespace="default")
            assert n_hits(one, *TEXTS[:2]) == 0


# -- a slow or absent server -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_write_is_lost_on_a_server_that_is_too_slow_for_reads(server: RedisServer) -> None:
    """`timeout_ms` limits what a request waits for: every write behind the answers reaches a slow server."""
    texts = [tokens(1, 12, seed) for seed in range(20)]
    with on_redis(server.url, timeout_ms=5.0) as cache:
        server.do("CLIENT", "PAUSE", 600, "WRITE")
        for number, ids in enumerate(texts):
            with cache.namespace(f"{number % 3}"):
                cache(input_ids=ids)
        cache.drain()
        stats = cache.stats().store
        assert stats is not None and stats.n_dropped == 0
    with on_redis(server.url) as direct:
        assert n_held(direct) == len(texts)


@pytest.mark.slow
def test_what_could_not_be_written_is_offered_again_when_it_is_used(server: RedisServer) -> None:
    """A write dropped while the server was away is made again when its request is next used."""
    texts = [tokens(1, 40, seed) for seed in range(4)]
    with (
        on_redis(server.url, CLASSIFIERS["bert"], timeout_ms=100.0, prefix="encoder") as encoder,
        on_redis(server.url, GENERATORS["gpt2"], timeout_ms=100.0, prefix="decoder") as decoder,
    ):
        caches = encoder, decoder
        for cache in caches:
            n_hits(cache, texts[0])
        n_each = [n_held(cache) for cache in caches]
        assert all(n_each)
        with server.paused():
            for cache in caches:
                for ids in texts[1:]:
                    cache(input_ids=ids)
            for cache in caches:
                cache.drain()
                stats = cache.stats().store
                assert stats is not None and stats.n_dropped > 0

        def are_written() -> bool:
            for cache in caches:
                for ids in texts:
                    cache(input_ids=ids)
            return [n_held(cache) for cache in caches] == [n * len(texts) for n in n_each]

        wait_until(are_written)
        assert [n_hits(cache, *texts) for cache in caches] == [len(texts)] * 2


@pytest.mark.slow
def test_a_server_that_is_silent_is_told_of_in_one_line_a_minute(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """While the server is silent, the model answers, and the log has one line a minute without a traceback."""
    with on_redis(server.url, timeout_ms=5.0) as cache, server.paused(), caplog.at_level(logging.WARNING):
        for seed in range(12):
            with cache.namespace(f"{seed % 3}"):
                assert n_hits(cache, tokens(1, 12, seed)) == 0
        told = [one for one in caplog.records if one.name.startswith("llmcache") and "signed" not in one.msg]
        assert 1 <= len(told) <= 2  # reads fail; the server is away
        assert not any(one.exc_info for one in caplog.records)
        assert all(one.getMessage().count("\n") == 0 for one in caplog.records)


# -- other users of the machine ----------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="needs modes of files")
@pytest.mark.parametrize("kept", [None, 0o755, 0o775])
def test_files_of_a_save_are_their_owners_alone(tmp_path: Path, kept: int | None) -> None:
    """Files of a save are closed to others; a folder that exists keeps its mode, and a new one is closed."""
    folder = tmp_path / "save"
    if kept is not None:
        folder.mkdir()
        folder.chmod(kept)
    with LLMCache.wrap(build(CLASSIFIERS["bert"])) as cache:
        cache(input_ids=TEXTS[0])
        cache.save(folder)
        cache.save(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == (kept or 0o700)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert "manifest.json" in modes and {*modes.values()} == {0o600}
    with LLMCache.load(build(CLASSIFIERS["bert"]), folder) as cache:
        assert n_hits(cache, TEXTS[0]) == 1


@pytest.mark.skipif(os.name == "nt", reason="needs modes of files")
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_save_that_anyone_may_replace_is_refused(tmp_path: Path, mode: int) -> None:
    """Nothing is saved to a folder to which anyone may write, or loaded from it; the error says what to do."""
    with LLMCache.wrap(build(CLASSIFIERS["bert"])) as cache:
        cache.save(tmp_path)
        tmp_path.chmod(mode)
        with pytest.raises(StoreError, match=r"anyone may write to it.*chmod o-w"):
            cache.save(tmp_path)
    with pytest.raises(BankFileError, match=r"anyone may write to it.*chmod o-w"):
        LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path)
    tmp_path.chmod(0o755)
    LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path).unwrap()


# -- passwords ---------------------------------------------------------------------------------------------------------

WORDS = ("zebra", "quokka", "lemur", "walrus")
PASSWORD, QUOTED = "zebra#quokka/lemur@walrus", "zebra%23quokka%2Flemur%40walrus"
ADDRESSES = [
    f"redis://:{QUOTED}@127.0.0.1:{{}}",
    f"redis://default:{QUOTED}@127.0.0.1:{{}}/0",
    f"redis://default:{PASSWORD}@127.0.0.1:{{}}/0",
    f"redis://127.0.0.1:{{}}?password={QUOTED}&db=0",
    f"redis://127.0.0.1:{{}}/0?password={PASSWORD}",
]


def check_hidden(*shown: object) -> None:
    """Check that no part of the password is in what was printed; of an error, with all that Python prints of it."""
    for one in shown:
        text = "".join(traceback.format_exception(one)) if isinstance(one, BaseException) else f"{one}"
        assert not [word for word in WORDS if word in text], text


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server whose password has characters that mean something in a URL."""
    with redis_server(tmp_path_factory.mktemp("locked"), "--requirepass", PASSWORD) as server:
        yield server


@pytest.mark.parametrize(
    ("address", "cure"),
    [
        ("redis://127.0.0.1:{}", "LLMCACHE_REDIS_PASSWORD"),
        ("redis://:wrong@127.0.0.1:{}", "LLMCACHE_REDIS_PASSWORD"),
        (f"redis://:{QUOTED}@127.0.0.1:{{}}/99", "database"),
        (f"redis://:{QUOTED}@127.0.0.1:{{}}/cache", "database"),
        (f"redis://:{QUOTED}@127.0.0.1:{{}}?db=99", "database"),
    ],
)
def test_an_address_that_cannot_work_is_refused_with_its_cure(address: str, cure: str, locked: RedisServer) -> None:
    """`wrap` refuses a wrong password or database; the error names what to set, and no useless fix."""
    with pytest.raises(ConfigError, match=cure) as refused:
        on_redis(address.format(locked.port))
    assert "another prefix" not in str(refused.value)
    check_hidden(refused.value)


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_password_is_neither_shown_nor_saved(
    address: str, locked: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A password in a URL is used, and in no repr, dump, error, log or save; a load takes it from where it is told."""
    store = {"name": "redis", "url": address.format(locked.port), "timeout_ms": PATIENT}
    with on_redis(store["url"]) as cache:
        n_hits(cache, TEXTS[0])
        cache.save(tmp_path)
        config = cache.config
    check_hidden(repr(config), config, config.store.options, f"{config.store.options['url']}", config.model_dump())
    check_hidden(config.model_dump(mode="json"), config.model_dump_json(), json.dumps(config.store.options))
    check_hidden((tmp_path / "manifest.json").read_text())
    assert "127.0.0.1" in repr(config) and ("default" in repr(config)) == ("default" in address)
    with pytest.raises(ConfigError, match="other settings") as refused:
        LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path, store={**store, "prefix": "other"})
    with pytest.raises(UnfitBankError, match="LLMCACHE_REDIS_PASSWORD") as lacking:
        LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path)
    check_hidden(refused.value, lacking.value)
    given: list[dict[str, Any]] = [{"store": store}, {"config": pickle.loads(pickle.dumps(config))}, {}]
    try:
        for settings in given:
            if not settings:
                os.environ["LLMCACHE_REDIS_PASSWORD"] = PASSWORD
            with LLMCache.load(build(CLASSIFIERS["bert"]), tmp_path, **settings) as cache:
                assert n_hits(cache, TEXTS[0]) == 1 and n_held(cache) > 0
    finally:
        os.environ.pop("LLMCACHE_REDIS_PASSWORD", None)
    check_hidden(caplog.text)


URL = ADDRESSES[2].format(1)
MISTAKES: list[dict[str, Any] | str] = [
    {"store": URL},
    {"store": {"url": URL}},
    {"store": [URL]},
    {"stores": {"name": "redis", "url": URL}},
    {"store": {"name": "redis", "urls": [URL]}},
    {"store": {"name": "redis", "url": [URL]}},
    {"store": {"name": "redis", "url": URL, "least_tokens": -1}},
    {"store": {"name": "redis", "url": URL, "ttl_s": 0}},
    {"store": {"name": "redis", "url": f"{URL}cache"}},
    {"store": {"name": "redis", "url": "redis://:zebra"}},
    {"store": {"name": "redis", "url": "redis://zebra:lemur/0"}},
    {"store": {"name": "redis", "url": "http://:zebra@127.0.0.1:1"}},
    {"store": {"name": "disk", "folder": URL, "url": URL}},
    f"store: {{name: redis, url: {URL!r}",
    f"store: {{name: redis, url: {URL!r}, ttl_s: 2024-13-45}}",
]


@pytest.mark.parametrize("settings", MISTAKES, ids=range(len(MISTAKES)))
def test_an_error_about_settings_shows_no_password(settings: Any, tmp_path: Path) -> None:
    """Whatever is wrong with a store's settings, the error and its causes do not show the password in its URL."""
    if isinstance(settings, str):  # of a file
        (tmp_path / "cache.yaml").write_text(settings)
        settings = {"config": tmp_path / "cache.yaml"}
    with pytest.raises(ConfigError) as refused:
        LLMCache.wrap(build(CLASSIFIERS["bert"]), **settings)
    if "zebra:" in f"{settings}":  # in a user's place
        assert "lemur" not in "".join(traceback.format_exception(refused.value))
    else:
        check_hidden(refused.value)


def test_a_prefix_under_which_something_else_is_kept_is_refused(server: RedisServer) -> None:
    """Two applications never share a prefix: the error names the key found and the fix."""
    for command, name in (("SET", "llmcache:session:1"), ("SADD", "llmcache:users"), ("SET", "llmcache:")):
        server.do(command, name, "x")
        with pytest.raises(ConfigError, match="another prefix") as raised:
            on_redis(server.url)
        assert name in str(raised.value)
        if name != "llmcache:":
            server.do("DEL", name)
    with on_redis(server.url, prefix="llm"):
        pass


def test_only_what_a_cache_wrote_is_counted(server: RedisServer) -> None:
    """`stats().store` counts values under the cache's prefix: no keys of other applications or prefixes."""
    server.do("MSET", *(part for number in range(50) for part in (f"theirs:{number}", b"x" * 1_000)))
    with on_redis(server.url, prefix="others") as others:
        n_hits(others, *TEXTS[:3])
        others.drain()
    with on_redis(server.url) as cache:
        assert n_held(cache) == 0
        n_hits(cache, *TEXTS)
        assert n_held(cache) == len(TEXTS)
        stats = cache.stats().store
        assert stats is not None and 0 < (stats.nbytes or 0) < 50_000
    with on_redis(server.url) as cache:  # a cache accepts a prefix with its own keys
        assert n_held(cache) == len(TEXTS)
