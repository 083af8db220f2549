"""`LLMCache.advise`: ways of each kind of model, what is recommended, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.models.onnx import export
from llmcache import Advice, ConfigError, LLMCache, Way
from llmcache.advice import encoder
from llmcache.advice.trial import LEAST
from tests.contract.streams import batched, classifier, requests
from tests.fixtures import Patch
from tests.tiny_models import BARE, GENERATORS, build, tokenizer

N = 800
SMALL: dict[str, Any] = {"max_drops": (0.001,), "max_drop": 0.05, "seconds": 0.5}


def log(n: int = N) -> list[dict[str, torch.Tensor]]:
    """Requests of which every tenth is the one before it."""
    ids, _ = requests(n)
    ids[9::10] = ids[8::10]
    return batched(ids, 1)


def named(advice: Advice) -> dict[str, Way]:
    return {way.name: way for way in advice.ways}


@pytest.fixture
def no_onnx(monkeypatch: Patch) -> None:
    monkeypatch.setattr(encoder, "find_missing", lambda: "onnx")


def test_an_encoder_without_onnx_runtime(no_onnx: None) -> None:
    heard: list[Advice] = []
    model = classifier()
    with LLMCache.wrap(model) as cache:
        advice = cache.advise(log(), on_way=heard.append, **SMALL)
        assert cache.stats().n_requests == 0 and cache.calibration is None
        cache(**log(1)[0])
        assert cache.stats().n_misses == 1  # still wrapped, and nothing was stored meanwhile
    ways = named(advice)
    assert list(ways) == [
        *("the model alone", "ONNX Runtime", "ONNX Runtime, int8", "llmcache, exact repeats"),
        *("llmcache, reuse, 0.1 %", "llmcache, reuse, 5 %"),
    ]
    assert [len(one.ways) for one in heard] == [1, 2, 3, 4, 5, 6] and all(one.is_partial for one in heard)
    assert not advice.is_partial and advice.n_learned + advice.n_served <= N
    assert ways["ONNX Runtime"].problem == "it needs onnx: pip install 'llmcache-torch[onnx]'"
    exact, reuse = ways["llmcache, exact repeats"], ways["llmcache, reuse, 5 %"]
    assert exact.changed == 0 and 0.05 < exact.hit_rate < 0.15
    assert reuse.bound is not None and reuse.bound <= 0.05 and reuse.hit_rate > exact.hit_rate
    assert reuse.learning_s > 0 and exact.p50_ms and exact.p99_ms and exact.p50_ms <= exact.p99_ms
    assert "needs 5,9" in ways["llmcache, reuse, 0.1 %"].problem
    assert "llmcache, reuse, 5 %" in str(advice) and advice.recommendation in str(advice)
    assert advice.to_dict()["ways"][0]["speedup"] == 1


@pytest.mark.slow
def test_an_encoder_with_onnx_runtime_and_a_draft(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMCACHE_HOME", str(tmp_path))
    with LLMCache.wrap(classifier()) as cache:
        ways = named(cache.advise(log(), **SMALL))
    assert ways["ONNX Runtime"].changed == 0 and not ways["ONNX Runtime"].problem
    int8, draft = ways["ONNX Runtime, int8"], ways["llmcache, reuse and draft, 5 %"]
    assert int8.bound is not None and int8.changed < int8.bound < 0.2
    assert draft.bound is not None and draft.changed <= 0.1 and "draft='int8'" in draft.code
    assert draft.nbytes > ways["ONNX Runtime"].nbytes > 0


@pytest.mark.slow
def test_a_session(tmp_path: Path) -> None:
    import onnxruntime

    path = export(classifier(), {"input_ids": requests(1)[0]}, tmp_path / "model.onnx")
    with LLMCache.wrap(onnxruntime.InferenceSession(path), tokenizer=tokenizer()) as cache:
        ways = named(cache.advise(log(), **SMALL))
    assert list(ways)[:3] == ["the session alone", "ONNX Runtime, int8", "llmcache, exact repeats"]
    assert not ways["ONNX Runtime, int8"].problem and ways["llmcache, exact repeats"].changed == 0
    assert ways["llmcache, exact repeats"].code == "cache = LLMCache.wrap(session, tokenizer=tokenizer)"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_decoder(family: str) -> None:
    """Prompts of several lengths: the positions of padded rows are those that `generate` counts."""
    model = build(GENERATORS[family])
    rng = torch.Generator().manual_seed(0)
    beginning = torch.randint(5, 60, (40,), generator=rng).tolist()
    prompts = [beginning + torch.randint(5, 60, (2 + i % 5,), generator=rng).tolist() for i in range(LEAST)]
    with LLMCache.wrap(model, prefix={"block": 8}) as cache:
        ways = named(cache.advise(prompts, seconds=0.5))
        assert cache.stats().n_requests == 0
    assert list(ways) == [
        *("the model alone", "llmcache, prefixes", "the model alone, batches of 8", "llmcache, batches of 8")
    ]
    assert {way.changed for way in ways.values()} == {0.0}
    assert ways["llmcache, prefixes"].hit_rate == 1 and ways["llmcache, batches of 8"].hit_rate > 0.8
    assert [way.n_rows for way in ways.values()] == [1, 1, 8, 8]


def test_an_interrupted_replay_leaves_the_model_wrapped(no_onnx: None) -> None:
    def stop(advice: Advice) -> None:
        raise KeyboardInterrupt

    with LLMCache.wrap(classifier()) as cache:
        with pytest.raises(KeyboardInterrupt):
            cache.advise(log(), on_way=stop, **SMALL)
        for _ in range(2):
            cache(**log(1)[0])
        assert cache.stats().hits == {"exact": 1}


@pytest.mark.parametrize(
    ("ways", "told"),
    [
        ([("llmcache, exact repeats", 9.8, 0.0)], "Do not use llmcache here: nothing that was tried is 5% faster"),
        (
            [("ONNX Runtime, int8", 2.0, 0.004), ("llmcache, reuse, 0.5 %", 1.95, 0.004)],
            "int8 without llmcache: 5.0 times",
        ),
        (
            [("ONNX Runtime, int8", 2.0, 0.02), ("llmcache, reuse, 0.5 %", 4.0, 0.004)],
            "Use llmcache, reuse, 0.5 %: 2.5",
        ),
        (
            [("ONNX Runtime, int8", 2.0, 0.02), ("llmcache, reuse, 0.5 %", 4.0, 0.004)],
            "With a larger max_drop, ONNX Runtime, int8: 5.0 times as fast as the model alone, at most 2.00% of",
        ),
        ([("llmcache, reuse, 1 %", 1.0, 0.009), ("llmcache, reuse, 2 %", 0.5, None)], "Do not use llmcache here"),
    ],
)
def test_the_simplest_way_within_the_bound_that_none_beats_is_recommended(
    ways: list[tuple[str, float, float | None]], told: str
) -> None:
    alone = Way("the model alone", "model(**inputs)", 10.0, 10.0, 10.0, bound=0.0)
    others = [Way(name, f"code of {name}", ms, ms, ms, bound=bound) for name, ms, bound in ways]
    advice = Advice((alone, *others), 0.005, 100, 100)
    assert told in advice.recommendation
    assert replace(advice, is_partial=True).recommendation == ""
    noisy = replace(advice, margin=3.0).recommendation
    assert "No recommendation: two passes of the model alone differ by 200%" in noisy
    assert advice.best is alone or advice.best.code in advice.recommendation


def test_noise_decides_nothing_but_large_differences() -> None:
    alone, half, tenth = (Way(name, name, ms, ms, ms, bound=0.0) for name, ms in (("a", 10.0), ("b", 5.0), ("c", 1.0)))
    assert Advice((alone, half), 0.005, 100, 100, margin=1.5).recommendation.startswith("No recommendation")
    assert Advice((alone, half, tenth), 0.005, 100, 100, margin=1.5).recommendation.startswith("Use c")


def test_a_way_that_changed_more_than_its_bound_is_not_recommended() -> None:
    alone = Way("the model alone", "model(**inputs)", 10.0, 10.0, 10.0, bound=0.0)
    drifted = Way("llmcache, reuse, 0.5 %", "code", 1.0, 1.0, 1.0, changed=0.012, bound=0.005)
    advice = Advice((alone, drifted), 0.005, 100, 100)
    assert advice.best is alone and "larger max_drop" not in advice.recommendation


def test_batches_are_recommended_beside_single_calls() -> None:
    ways = [("the model alone", 10.0, 1), ("llmcache, prefixes", 9.9, 1), ("the model alone, batches of 8", 5.0, 8)]
    made = [
        Way(name, "", ms, ms, ms, bound=0.0, n_rows=n) for name, ms, n in [*ways, ("llmcache, batches of 8", 1.0, 8)]
    ]
    told = Advice(tuple(made), 0.005, 100, 100).recommendation
    assert told.startswith("Do not use") and told.endswith(
        "llmcache, batches of 8: 5.0 times as fast as the model alone, batches of 8."
    )


def test_what_is_refused() -> None:
    with LLMCache.wrap(build(GENERATORS["gpt2"]), tokenizer=tokenizer()) as cache:
        with pytest.raises(ConfigError, match="request 0 is a int: for a decoder give"):
            cache.advise([5] * LEAST)
        with pytest.raises(ConfigError, match="request 0 has 500 tokens, and the model takes 64"):
            cache.advise([[5] * 500] * LEAST)
    with LLMCache.wrap(classifier(), tokenizer=tokenizer()) as cache:
        with pytest.raises(ConfigError, match="50 requests: advice needs at least 200"):
            cache.advise(log(50))
        with pytest.raises(ConfigError, match="does not know 71% of the tokens"):
            cache.advise(["unheard of words everywhere here"] * LEAST)
    with LLMCache.wrap(build(BARE["bert"])) as cache, pytest.raises(ConfigError, match="returns none of them"):
        cache.advise(log())
    with LLMCache.wrap(classifier(), tau=0.9) as cache, pytest.raises(ConfigError, match="tau"):
        cache.advise(log())
