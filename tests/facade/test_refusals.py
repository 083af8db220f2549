"""A user's mistakes are refused with the key, the value and the fix."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from llmcache import CacheConfig, ConfigError, LLMCache, LLMCacheError, UnsafeReuseError
from llmcache.memory.policies import POLICIES
from tests.contract.judge import check_calls, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, TOKEN_HEADS, build, tokens


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    """A model that tests wrap and leave as it was."""
    return build(BARE["bert"])


def test_heads_that_answer_token_by_token_refuse_tau() -> None:
    model = build(TOKEN_HEADS["causal"])
    with pytest.raises(UnsafeReuseError) as refusal:
        LLMCache.wrap(model, tau=0.9)
    text = str(refusal.value)
    for part in ("tau=0.9", "head", "token by token", "the other request's", "exact repeats", "allow_unsafe=True"):
        assert part in text
    assert isinstance(refusal.value, ConfigError)
    LLMCache.wrap(model).unwrap()  # nothing was left behind, and lossless rungs work


@pytest.mark.parametrize(
    ("model", "payload", "fix"),
    [
        (TOKEN_HEADS["span"], "cls", "sequence"),
        (TOKEN_HEADS["causal"], "last", "sequence"),
        (CLASSIFIERS["bert"], "last", "cls"),
        (CLASSIFIERS["bert"], "mean", "cls"),
        (CLASSIFIERS["gpt2"], "cls", "last"),
        (CLASSIFIERS["bart"], "mean", "sequence"),
    ],
)
def test_payloads_too_small_for_the_head(model: Any, payload: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"payload='{payload}'.*reads more.*'{fix}'"):
        LLMCache.wrap(build(model), payload=payload)


@pytest.mark.parametrize("payload", ["sequence", "cls", "last", "mean"])
def test_bare_models_take_any_payload(bert: nn.Module, payload: str) -> None:
    with LLMCache.wrap(bert, payload=payload) as cache:
        assert f"payload={payload!r}" in repr(cache)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"taus": 0.9}, ["taus", "unknown setting", "did you mean 'tau'", "policy", "max_bytes"]),
        ({"zzz": 1}, ["zzz", "unknown setting", "known: tau"]),
        ({"index": "annoy", "tau": 0.9}, ["index", "'annoy'", "binary, flat, hnsw", "register"]),
        ({"index": {"name": "flat", "trees": 3}, "tau": 0.9}, ["index", "flat", "trees", "its options: none"]),
        ({"fingerprint": {"name": "pca", "size": 3}, "tau": 0.9}, ["fingerprint", "pca", "size", "its options: dim"]),
        ({"payload": "max"}, ["payload", "'max'", "cls"]),
        ({"layers": "first"}, ["layers", "'first'", "last"]),
        ({"device": "tpu"}, ["device", "'tpu'", "cpu"]),
        ({"tau": -1.5}, ["tau", "-1.5", "-1 to 1"]),
        ({"tau": float("nan")}, ["tau", "nan", "-1 to 1"]),
        ({"tau": {3: 2.0}}, ["tau", "2.0", "-1 to 1"]),
        ({"tau": {9: 0.5}}, ["tau", "9", "not stored", "stored: [0, 1, 2, 3]"]),
        ({"tau": "high"}, ["tau", "'high'"]),
        ({"tau": {1: 0.9}, "layers": [0, 2]}, ["tau: names layers [1]"]),
        ({"tau": 0.9, "layers": [4]}, ["this model has layers 0 to 3"]),
        ({"tau": 0.9, "layers": []}, ["name at least one"]),
        ({"tau": 0.9, "payload": "cls"}, ["layers='last'"]),
        ({"tau": 0.9, "payload": "cls", "layers": [1]}, ["layers='last'"]),
        ({"tau": 0.9, "layers": [1], "fingerprint": {"name": "mean", "per_layer": True}}, ["per layer"]),
        ({"tau": 0.9, "fingerprint": {"name": "pca", "per_layer": True}}, ["per_layer"]),
        ({"max_bytes": 0}, ["max_bytes", "0", "greater than or equal to 1"]),
        ({"max_entries": 0}, ["max_entries", "0", "greater than or equal to 1"]),
        ({"policy": "ttl"}, ["policy", "ttl", "ttl_s"]),
        ({"policy": {"name": "ttl", "ttl_s": 0}}, ["policy", "ttl_s", "0"]),
        ({"policy": {"name": "lru", "size": 3}}, ["policy", "lru", "size"]),
        ({"policy": "staleness"}, ["policy", "staleness", "half_life_s"]),
        ({"policy": {"name": "staleness", "half_life_s": 0}}, ["policy", "half_life_s", "0.001", "got 0"]),
        ({"policy": {"name": "divergence", "check_rate": 1.5}}, ["policy", "check_rate=1.5", "0 to 1"]),
        ({"policy": {"ttl_s": 3}}, ["policy", "name"]),
        ({"store": "disk"}, ["store: disk needs folder: {name: disk, folder: ...}", "its options: folder"]),
        (
            {"store": {"name": "redis", "urll": "redis://h"}},
            ["store: redis: unknown option 'urll'", "did you mean 'url'"],
        ),
        ({"store": {"name": "memory", "folder": "x"}}, ["store: 'memory'", "name another, or leave out folder"]),
        ({"layers": "all", "index": "flat"}, ["layers, index without tau", "leave layers, index out"]),
        ({"recalibrate": 9, "audit": 0}, ["recalibrate=9", "raise audit, or leave recalibrate out"]),
        ({"max_bytes": "1,000MB"}, ["max_bytes", "'500MB'", "'1,000MB'"]),
        ({"max_bytes": "1 elephant"}, ["max_bytes", "'500MB'", "'1 elephant'"]),
        ({"policy": 7}, ["policy", "7"]),
        ({"fingerprint": "minhash", "index": "flat", "tau": 0.5}, ["minhash", "'lsh'", "'flat'", "'auto'"]),
        ({"fingerprint": "mean", "index": "lsh", "tau": 0.5}, ["minhash", "'lsh'", "'mean'", "'auto'"]),
        ({"fingerprint": "minhash", "tau": {0: 0.5, 1: 0.0}}, ["tau=", "0.0", "minhash", "Jaccard"]),
        ({"fingerprint": {"name": "minhash", "width": 0}, "tau": 0.5}, ["fingerprint", "minhash", "width=0"]),
        ({"tau": 1.5, "fingerprint": "minhash"}, ["cosine from -1 to 1 ", "'minhash'", " Jaccard over 0 ", "got 1.5"]),
        # Types are checked at once, not at the first request that needs the part:
        ({"tau": 0.9, "compression": {"name": "autoencoder", "epochs": 1.5}}, ["autoencoder: epochs=1.5: ", "integer"]),
        ({"tau": 0.9, "compression": {"name": "pca", "dim": "64"}}, ["compression: pca: dim='64': ", "integer"]),
        ({"tau": 0.9, "index": {"name": "hnsw", "M": True}}, ["index: hnsw: M=True: ", "integer"]),
        ({"policy": {"name": "ttl", "ttl_s": "1h"}}, ["policy: ttl: ttl_s='1h': ", "number"]),
        ({"policy": {"name": "divergence", "seed": 0.5}}, ["policy: divergence: seed=0.5: ", "integer"]),
    ],
)
def test_wrong_settings(bert: nn.Module, settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        LLMCache.wrap(bert, **settings)
    for part in parts:
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert isinstance(refusal.value, LLMCacheError)
    assert isinstance(refusal.value, ValueError)
    assert all("forward" not in module.__dict__ for module in bert.modules())


def test_wrong_settings_made_by_hand_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'tau'.*known: tau"):
        CacheConfig(taus=0.9)
    with pytest.raises(ConfigError, match=r"(?=.*tau)(?=.*polcy.*'policy')(?=.*max_bytes)"):
        CacheConfig.make({"tau": 3, "polcy": "lru"}, max_bytes=0)


def write(folder: Path, data: bytes) -> Path:
    """Write a file of settings."""
    (folder / "cache.yaml").write_bytes(data)
    return folder / "cache.yaml"


def test_settings_come_from_files_and_those_beside_them_first(tmp_path: Path) -> None:
    path = write(tmp_path, b"tau: 0.5\npolicy: {name: ttl, ttl_s: 60}\nmax_entries: 3\n")
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]), config=path, max_entries=7)
    assert (cache.config.tau, cache.config.max_entries, cache.config.policy.options) == (0.5, 7, {"ttl_s": 60})
    assert CacheConfig.from_yaml(str(path)).max_entries == 3
    assert CacheConfig.make(CacheConfig(tau=0.5), max_entries=2) == CacheConfig(tau=0.5, max_entries=2)
    assert CacheConfig.from_yaml(write(tmp_path, b"# nothing\n")) == CacheConfig()
    text = b"\xef\xbb\xbftau: 0.5\npolicy: &one {name: ttl, ttl_s: 60}\nindex: {<<: *one, name: flat}\n"
    marked = CacheConfig.from_yaml(write(tmp_path, text))
    assert (marked.policy.name, marked.index.options) == ("ttl", {"ttl_s": 60})


BOMB = "\n".join(["a0: &a0 [1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))])
MERGED = "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40))])
NO_SETTINGS = {
    "UTF-16": ("tau: 0.9".encode("utf-16"), "not UTF-8"),
    "Latin-1": (b"policy: \xe9", "not UTF-8"),
    "NUL": (b"tau: \x00", "not valid YAML"),
    "nested lists that end": (b"a: " + b"[" * 1000 + b"]" * 1000, "nested too deeply"),
    "nested mappings": (b"{a: " * 1000, "nested too deeply"),
    "an alias of itself": (b"a: &a [*a]", "too large for settings"),
    "aliases of aliases": (BOMB.encode(), "too large for settings"),
    "merges of merges": (MERGED.encode(), "too large for settings"),
    "long": (b"a: '" + b"x" * 1_000_000 + b"'", "more than 1,000,000 characters"),
    "two documents": (b"tau: 1\n---\ntau: 2\n", "not valid YAML"),
    "no date": (b"tau: 2024-13-45", "not valid YAML"),
    "a long number": (b"tau: " + b"1" * 5000, "not valid YAML"),
    "a program": (b"tau: !!python/object/apply:os.getcwd []", "not valid YAML"),
    "a mapping for a key": (b"? {a: b}\n: 1", "not valid YAML"),
    "a number for a key": (b"1: 2", "1:"),
    "a long text": (b"tau: " + b"x" * 10_000, "tau"),
    "a list": (b"- tau\n- 0.9\n", "found list"),
    "no end": (b"tau: [\n", "not valid YAML: line 2: "),
    "an unknown setting": (b"ta: 1\n", "ta:"),
}


@pytest.mark.parametrize(("data", "part"), NO_SETTINGS.values(), ids=NO_SETTINGS)
def test_files_of_any_bytes_are_one_line(tmp_path: Path, data: bytes, part: str) -> None:
    with pytest.raises(ConfigError, match=part) as refusal:
        CacheConfig.from_yaml(write(tmp_path, data))
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 3000


@pytest.mark.parametrize("name", ["", "x" * 256, "a\0b", "file/below", "loop"])
def test_paths_that_are_no_file_of_settings(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match="cannot be read as a file of settings"):
        CacheConfig.make(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"nothing\.yaml"):
        CacheConfig.make(tmp_path / "nothing.yaml")


def test_a_setting_that_is_nested_without_end_is_shown_in_part() -> None:
    endless: list[Any] = []
    for _ in range(5000):
        endless = [endless]
    with pytest.raises(ConfigError, match=r"tau.*\[\[\["):
        CacheConfig.make({"tau": endless})


@pytest.mark.parametrize("policy", POLICIES)
def test_budgets_hold(policy: str) -> None:
    options = {"ttl": {"ttl_s": 1000}, "staleness": {"half_life_s": 1000}}.get(policy, {})
    model = build(CLASSIFIERS["bert"])
    cache = LLMCache.wrap(model, policy={"name": policy, **options}, max_entries=3)
    for seed in range(9):
        cache(input_ids=tokens(2, 5, seed=seed))
        assert cache.stats().n_stored == cache.stats().n_entries[3] <= 3
    assert cache.stats().n_evicted == {3: 15}


def test_states_larger_than_the_budget_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with wrapped(BARE["bert"], max_bytes=3 * 32 * 4) as (cache, plain):
        assert check_calls(cache, plain, {"input_ids": tokens(1, 9)}, {"input_ids": tokens(1, 2)}) == 1
        assert (cache.stats().n_too_large, cache.stats().n_stored) == (2, 1)
    assert sum("max_bytes" in record.getMessage() for record in caplog.records) == 1


def test_entries_expire() -> None:
    now = [0.0]
    policy = {"name": "ttl", "ttl_s": 60, "now": lambda: now[0]}
    cache = LLMCache.wrap(build(CLASSIFIERS["bert"]), policy=policy)
    for now[0], seed in ((0.0, 1), (59.0, 1), (60.0, 2), (60.0, 1)):
        cache(input_ids=tokens(1, 5, seed))
    stats = cache.stats()
    assert (stats.hits, stats.n_misses, stats.n_stored, stats.n_expelled) == ({"exact": 1}, 3, 2, {3: 1})
