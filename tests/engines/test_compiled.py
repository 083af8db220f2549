"""`cache.compile()`: calls that no graph fits run eagerly, are counted, and answer right."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig

from llmcache import ConfigError, LLMCache, WrapError
from llmcache.engines.compiled import make_buckets
from llmcache.models import causal, causal_trial
from tests.contract.models import fresh, plain
from tests.engines.support import agree, figures
from tests.tiny_models import batch, padded, tokens


@pytest.fixture(autouse=True, scope="module")
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def compiled(family: str = "bert", kind: str = "classifier", **more: Any) -> LLMCache:
    """A compiled cache that has seen the trunk's output once."""
    cache = LLMCache.wrap(fresh(family, kind))
    cache(input_ids=tokens(1, 5, seed=1000))
    cache.compile(**{"lengths": (8,), "rows": (1, 2), "backend": "eager", "max_padding": 1.0, **more})
    return cache


def mixed_call(number: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of up to 20 tokens, padded on the right; every other call repeats rows of earlier ones."""
    n_rows = int(torch.randint(1, 6, (1,), generator=generator))
    numbers = torch.randint(40 if number % 2 else 4000, (n_rows,), generator=generator).tolist()
    return batch([tokens(1, 3 + one % 18, seed=one) for one in numbers])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lengths", "rows"), [("bert", (8, 16), (1, 4)), ("llama", (16,), (4,))])
def test_mixed_calls_compile_nothing_and_answer_right(
    family: str, lengths: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    cache = compiled(family, lengths=lengths, rows=rows, max_padding=0.6)
    assert figures(cache).n_graphs == len(lengths) * len(rows)
    generator = torch.Generator().manual_seed(7)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(50):
            agree(cache, plain(family, "classifier"), **mixed_call(number, generator))
    stats, found = cache.stats(), figures(cache)
    assert set(found.eager) == {"shape"}
    assert min(found.n_requests, found.eager["shape"], stats.hits["exact"]) > 5
    assert (stats.errors, stats.bypassed, found.n_failed, found.n_dropped) == (0, {}, 0, 0)
    assert found.n_requests + sum(found.eager.values()) == stats.n_misses - 1  # one came before compile()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind", "backend", "given"),
    [
        ("bert", "classifier", "inductor", {}),
        ("bert", "classifier", "eager", {"return_dict": False}),
        ("distilbert", "bare", "eager", {}),
    ],
)
def test_families_and_outputs(family: str, kind: str, backend: str, given: dict[str, Any]) -> None:
    cache = compiled(family, kind, rows=(2,), backend=backend)
    cache(**padded([5], seed=9), **given)  # the first of its kind shows how the output is packed
    for _ in range(2):
        agree(cache, plain(family, kind), **padded([7, 4]), **given)
    assert (figures(cache).n_requests, cache.stats().hits, cache.stats().errors) == (3, {"exact": 2}, 0)


@pytest.mark.slow
def test_calls_that_keep_kv_run_eagerly_and_are_counted() -> None:
    cache, alone = compiled("llama", "causal"), plain("llama", "causal")
    ids = tokens(1, 7)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(cache.model(ids).logits, alone(ids).logits)
        agree(cache, alone, input_ids=ids, use_cache=False)
    assert (figures(cache).eager, figures(cache).n_requests) == ({"kv_cache": 1}, 1)
    assert cache.stats().hits == {"exact": 1}


def test_engines_are_kept_apart_and_edits_that_are_not_in_place_drop_graphs(caplog: pytest.LogCaptureFixture) -> None:
    cache, alone, inputs = LLMCache.wrap(fresh("bert", "classifier")), fresh("bert", "classifier"), padded([6])
    for _ in range(2):
        agree(cache, **inputs)
    cache.compile((8,), (1,), backend="eager", max_padding=1.0)
    for _ in range(2):
        agree(cache, **inputs)
    assert (cache.stats().hits, figures(cache).n_requests) == ({"exact": 2}, 1)
    weights = [model.bert.encoder.layer[0].output.dense for model in (cache.model, alone)]
    with torch.no_grad():
        for one in weights:
            one.weight.mul_(1.5)
    agree(cache, alone, **inputs)
    assert (figures(cache).n_graphs, figures(cache).n_requests, figures(cache).n_dropped) == (1, 2, 0)
    for one in weights:
        one.weight = nn.Parameter(one.weight.detach() * 1.5)
    agree(cache, alone, **inputs)
    assert (figures(cache).n_graphs, figures(cache).n_requests, figures(cache).n_dropped) == (0, 2, 1)
    assert sum("dropped" in record.message for record in caplog.records) == 1
    cache.compile((8,), (1,), backend="eager", max_padding=1.0)
    agree(cache, alone, **padded([6], seed=4))
    assert figures(cache).n_requests == 1


@pytest.mark.slow
def test_what_no_graph_fits_runs_eagerly_by_reason() -> None:
    cache = compiled()
    seen, new = padded([6, 6, 6]), padded([6, 6], seed=40)
    cache(**seen)
    agree(cache, **{name: torch.cat([seen[name], new[name][:1]]) for name in seen})  # one miss, which a graph fits
    agree(cache, **padded([6, 3], seed=3, left=True))
    agree(cache, **padded([6], seed=5), position_ids=torch.arange(6)[None] + 1)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        cache.model(**padded([6], seed=6))
    agree(cache, **padded([6], seed=7), token_type_ids=torch.ones(1, 6, dtype=torch.long))
    cache.model(**padded([6], seed=8)).logits.sum().backward()  # bypassed: not counted here
    with pytest.raises(IndexError), torch.inference_mode():
        cache.model(input_ids=tokens(1, 6), token_type_ids=torch.full((1, 6), 9))
    assert figures(cache).eager == {"shape": 3, "padding": 2, "arguments": 1, "torch_settings": 1}
    assert (figures(cache).n_requests, cache.stats().errors) == (2, 0)
    assert (figures(cache).n_graphs, figures(cache).n_failed) == (2, 0)  # wrong input costs none


@pytest.mark.slow
@pytest.mark.parametrize("when", ["making", "comparing", "service"])
def test_a_graph_that_fails_is_left_out(when: str, caplog: pytest.LogCaptureFixture) -> None:
    is_failing = when != "service"

    def backend(module: Any, inputs: list[Any]) -> Any:
        def call(*given: Any) -> Any:
            made = module.forward(*given)
            if not is_failing or not any(isinstance(one, Tensor) and one.shape == (2, 8) for one in given):
                return made
            if when == "comparing":  # it puts out something else
                return [one + 0.01 for one in made]
            raise MemoryError

        return call

    cache = compiled(backend=backend)
    is_failing = True
    for seed in range(2):
        agree(cache, **padded([6, 6], seed=10 * seed))
    agree(cache, **padded([6], seed=50))
    found, n_eager = figures(cache), {"failed": 2, "shape": 2} if when == "service" else {"shape": 4}
    assert (found.n_graphs, found.n_failed, found.eager, found.n_requests) == (1, 1, n_eager, 1)
    assert (sum("no graph for 2 rows of 8" in one.message for one in caplog.records), cache.stats().errors) == (1, 0)


@pytest.mark.slow
def test_threads_share_graphs_and_unwrap_leaves_nothing_behind() -> None:
    cache = compiled()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: agree(cache, **padded([6, 4], seed=10 * seed)), [*range(20), *range(10, 30)]))
    assert figures(cache).n_requests >= 60 and cache.stats().errors == 0
    model, own = cache.model, vars(fresh("bert", "classifier").bert).keys()
    cache.unwrap()
    assert vars(model.bert).keys() == own and figures(cache).n_graphs == 0
    with pytest.raises(WrapError):
        cache.compile((8,), (1,), backend="eager")


def test_refusals_tell_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LLMCache.wrap(fresh("bert", "bare"))
    wrong: list[tuple[dict[str, Any], str]] = [
        *(({name: value}, "got") for name, value in (("lengths", (0,)), ("rows", ()), ("rows", (True,)))),
        *(({name: value}, "got") for name, value in (("lengths", (512,)), ("max_padding", 1.5))),
        ({"mode": "fastest"}, "mode: give default, "),
        ({"mode": "default", "backend": "eager"}, "mode: give default, "),
    ]
    for given, match in wrong:
        with pytest.raises(ConfigError, match=match):
            cache.compile(**given)
    cache.model.train()
    with pytest.raises(ConfigError, match="eval"):
        cache.compile()
    cache.model.eval()
    cache.model.encoder.layer[0].attention.forward = lambda *given: given
    with pytest.raises(ConfigError, match="was replaced"):
        cache.compile()
    monkeypatch.setattr(causal_trial, "look_at", lambda trunk: causal.UNTRIED)  # padding is unknown
    with pytest.raises(ConfigError, match="register an adapter"):
        LLMCache.wrap(fresh("megatron", "bare")).compile()
    assert cache.stats().engine is None
    buckets = make_buckets((16, 8, 64), (2, 1, 2), BertConfig(max_position_embeddings=32))
    assert buckets == [(1, 8), (2, 8), (1, 16), (2, 16)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_graphs_on_a_gpu(mode: str | None) -> None:
    model, alone = fresh("bert", "classifier").cuda(), fresh("bert", "classifier").cuda()
    cache = LLMCache.wrap(model)
    cache(input_ids=tokens(1, 5, seed=1000).cuda())
    cache.compile((8,), (2,), mode=mode, max_padding=1.0)
    for seed in range(3):
        agree(cache, alone, **{name: value.cuda() for name, value in padded([6, 4], seed=seed).items()})
    assert figures(cache).n_requests == 6
