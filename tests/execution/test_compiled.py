"""`cache.compile()`: graphs beside the cache; what they cannot run is run eagerly, counted, and right."""

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import ConfigError, LLMCache, WrapError
from llmcache.execution.compiled import CompiledTrunk
from llmcache.execution.graphs import Bucket, Graph, Maker, make_buckets
from tests.execution.calls import (
    BY_STATES,
    agree,
    assert_close,
    attributes,
    cut,
    fail_alike,
    one_layer,
    pair,
    quietly,
    run,
    shallow,
    wrapped,
)
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, STRANGERS, batch, build, padded, tokens
from tests.topics import batched, classifier, requests

Make = Callable[[], nn.Module]
Pair = tuple[LLMCache, nn.Module]


@pytest.fixture(autouse=True, scope="module")
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def compiled(make: Make = one_layer, **more: Any) -> tuple[LLMCache, nn.Module]:
    """A compiled cache that has seen how the trunk packs its output, and the same model alone."""
    cache, alone = pair(make, auto_bypass=False)
    return compile_it(cache, **more), alone


def compile_it(cache: LLMCache, **more: Any) -> LLMCache:
    cache(input_ids=tokens(1, 5, seed=1000))
    cache.compile(**{"lengths": (8,), "rows": (1, 2), "backend": "eager", "max_padding": 1.0, **more})
    return cache


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module, dict[Bucket, Graph]]:
    """Two that are alike, and the graphs that were made of the first."""
    return build(one_layer), build(one_layer), {}


@pytest.fixture
def both(models: tuple[nn.Module, nn.Module, dict[Bucket, Graph]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """As `compiled()`, of a model that is left as it was: what takes time, its graphs, is made once."""
    model, alone, graphs = models
    make = Maker.make

    def make_once(maker: Maker, bucket: Bucket) -> Graph:
        if bucket not in graphs:
            graphs[bucket] = make(maker, bucket)
        return graphs[bucket]

    monkeypatch.setattr(Maker, "make", make_once)
    with LLMCache.wrap(model, auto_bypass=False) as cache:
        yield compile_it(cache), alone


def figures(cache: LLMCache) -> Any:
    found = cache.stats().compiled
    assert found is not None
    return found


def told(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    """Messages of ours that say something."""
    return [record.message for record in caplog.records if record.name == "llmcache" and what in record.message]


def mixed_call(number: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of up to 20 tokens, padded on the right; every other call repeats rows of earlier ones."""
    n_rows = int(torch.randint(1, 6, (1,), generator=generator))
    numbers = torch.randint(40 if number % 2 else 4000, (n_rows,), generator=generator).tolist()
    return batch([tokens(1, 3 + one % 18, seed=one) for one in numbers])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lengths", "rows"), [("bert", (8, 16), (1, 4)), ("gpt2", (16,), (4,)), ("llama", (8, 16), (4,))]
)
def test_500_mixed_calls_compile_nothing_and_answer_as_the_model_does(
    family: str, lengths: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    cache, alone = compiled(cut(CLASSIFIERS[family], 2), lengths=lengths, rows=rows, max_padding=0.6)
    assert figures(cache).n_graphs == len(lengths) * len(rows)
    counters = torch._dynamo.utils.counters
    counters["graph_break"].clear()  # of other tests
    made = counters["stats"]["unique_graphs"]
    generator = torch.Generator().manual_seed(7)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(500):
            agree(cache, alone, **mixed_call(number, generator))
    stats, found = cache.stats(), figures(cache)
    assert counters["stats"]["unique_graphs"] == made
    assert not counters["graph_break"]
    assert set(found.eager) == {"shape"}
    assert min(found.n_requests, found.eager["shape"], stats.hits["exact"]) > 100
    assert (stats.errors, stats.bypassed, found.n_failed, found.n_dropped) == (0, {}, 0, 0)
    assert found.n_requests + sum(found.eager.values()) == stats.n_misses - 1  # one came before compile()


@pytest.mark.slow
def test_inductor_makes_graphs_as_well() -> None:
    cache, alone = compiled(backend="inductor", rows=(2,))
    for inputs in (padded([8, 6]), padded([5], seed=9)):
        for _ in range(2):
            agree(cache, alone, **inputs)
    assert (figures(cache).n_requests, cache.stats().hits) == (3, {"exact": 3})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roberta", "distilbert", "t5", "bart", "electra"])
def test_families_run_by_a_graph(family: str) -> None:
    cache, alone = compiled(cut(BARE[family]), rows=(2,))
    cache(**padded([5], seed=9), return_dict=False)  # the first of its kind shows how a tuple is packed
    for given in ({}, {"return_dict": False}):
        inputs = padded([7, 4], seed=3 + len(given))
        output, expected = cache(**inputs, **given), quietly(alone, **inputs, **given)
        assert type(output) is type(expected)
        found, known = (output, expected) if given else (output.values(), expected.values())
        for one, other in zip(found, known, strict=True):
            assert_close(one, other, inputs["attention_mask"])
    assert figures(cache).n_requests >= 4


@pytest.mark.slow
def test_types_are_taken_and_make_another_answer(both: Pair) -> None:
    cache, alone = both
    inputs = {**padded([7, 4]), "token_type_ids": torch.ones(2, 7, dtype=torch.long)}
    agree(cache, alone, **inputs)
    agree(cache, alone, **padded([7, 4]))
    assert (figures(cache).n_requests, cache.stats().n_hits) == (4, 0)


def test_what_graphs_stored_is_kept_apart_from_what_ran_eagerly() -> None:
    cache, alone = pair(one_layer, auto_bypass=False)
    inputs = padded([6])
    for _ in range(2):
        agree(cache, alone, **inputs)
    assert cache.stats().n_hits == 1
    cache.compile((8,), (1,), backend="eager", max_padding=1.0)
    agree(cache, alone, **inputs)
    assert (cache.stats().n_hits, figures(cache).n_requests) == (1, 1)
    agree(cache, alone, **inputs)
    assert cache.stats().n_hits == 2
    cache.model.config.num_labels_of_mine = 3  # no setting that the digest covers: the graphs stay
    cache.model.bert.config.hidden_act = "relu"  # one that it does, although nobody reads it any more
    agree(cache, alone, **inputs)
    assert (figures(cache).n_graphs, figures(cache).n_dropped) == (0, 1)


def test_rows_that_nothing_serves_are_gathered_and_padded() -> None:
    cache, alone = compiled(rows=(2,))
    seen, fresh_rows = padded([6, 6, 6]), padded([6, 6], seed=40)
    cache(**seen)  # too many rows: eagerly
    both = {name: torch.cat([seen[name], fresh_rows[name][:1]]) for name in seen}
    agree(cache, alone, **both)
    assert (cache.stats().hits, figures(cache).n_requests) == ({"exact": 3}, 1)
    assert figures(cache).eager == {"shape": 3}


@pytest.mark.slow
def test_a_left_padded_row_or_more_arguments_run_eagerly(both: Pair) -> None:
    cache, alone = both
    agree(cache, alone, **padded([6, 3], left=True))
    agree(cache, alone, **padded([6]), position_ids=torch.arange(6)[None] + 1)
    assert figures(cache).eager == {"padding": 2, "arguments": 1}
    assert cache.stats().errors == 0


@pytest.mark.slow
def test_a_bucket_that_does_not_compile_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def backend(module: Any, inputs: list[Any]) -> Any:
        if any(isinstance(one, Tensor) and one.shape == (2, 8) for one in inputs):
            raise ValueError("no such shape")
        return module.forward

    cache, alone = compiled(backend=backend)
    assert len(told(caplog, "no graph for 2 rows of 8 tokens")) == 1
    for _ in range(2):
        agree(cache, alone, **padded([6, 6]))
    agree(cache, alone, **padded([7], seed=5))
    found = figures(cache)
    assert (found.n_graphs, found.n_failed, found.n_requests, found.eager) == (1, 1, 1, {"shape": 2})
    assert cache.stats().hits == {"exact": 2}
    with pytest.raises(ConfigError, match="no graph could be made"):
        cache.compile((8,), (2,), backend=backend)
    agree(cache, alone, **padded([7], seed=6))


@pytest.mark.slow
def test_a_graph_that_fails_in_service_is_used_no_more(caplog: pytest.LogCaptureFixture) -> None:
    failing = False

    def backend(module: Any, inputs: list[Any]) -> Any:
        def call(*given: Any) -> Any:
            if failing:
                raise MemoryError
            return module.forward(*given)

        return call

    cache, alone = compiled(rows=(1,), backend=backend)
    failing = True
    for seed in range(3):
        agree(cache, alone, **padded([6], seed=seed))
        agree(cache, alone, **padded([6], seed=seed))
    found = figures(cache)
    assert (found.n_graphs, found.n_failed, found.eager) == (0, 1, {"failed": 1, "shape": 2})
    assert (cache.stats().hits, cache.stats().errors) == ({"exact": 3}, 0)
    assert len(told(caplog, "no graph for 1 rows")) == 1


@pytest.mark.slow
def test_a_wrong_input_raises_what_the_model_raises_and_costs_no_graph(both: Pair) -> None:
    cache, alone = both
    fail_alike(cache, alone)
    assert (figures(cache).n_graphs, figures(cache).n_failed) == (2, 0)


@pytest.mark.slow
def test_a_graph_that_puts_out_something_else_is_not_used() -> None:
    def backend(module: Any, inputs: list[Any]) -> Any:
        return lambda *given: [one + 0.01 for one in module.forward(*given)]

    with pytest.raises(ConfigError, match="differs from the trunk's"):
        compiled(rows=(1,), backend=backend)


@pytest.mark.slow
def test_weights_edited_in_place_are_seen_and_others_drop_the_graphs(caplog: pytest.LogCaptureFixture) -> None:
    cache, alone = compiled(rows=(1,))
    models = (cache.model, alone)
    agree(cache, alone, **padded([6]))
    for model in models:
        with torch.no_grad():
            model.bert.encoder.layer[0].output.dense.weight.mul_(1.5)
    cache(**padded([5], seed=2))  # the first of these weights shows how the output is packed
    agree(cache, alone, **padded([6]))
    assert (figures(cache).n_graphs, figures(cache).n_requests, figures(cache).n_dropped) == (1, 2, 0)
    for model in models:
        old = model.bert.encoder.layer[0].output.dense
        old.weight = nn.Parameter(old.weight.detach() * 1.5)
    for _ in range(2):
        agree(cache, alone, **padded([6]))
    assert (figures(cache).n_graphs, figures(cache).n_requests, figures(cache).n_dropped) == (0, 2, 1)
    assert len(told(caplog, "dropped")) == 1
    cache.compile((8,), (1,), backend="eager", max_padding=1.0)
    agree(cache, alone, **padded([6], seed=4))
    assert figures(cache).n_requests == 3


@pytest.mark.slow
def test_hooks_of_others_gradients_autocast_and_threads_of_torch_run_eagerly(both: Pair) -> None:
    cache, alone = both
    seen: list[Any] = []
    handle = cache.model.bert.encoder.layer[0].attention.register_forward_hook(lambda *given: seen.append(1))
    agree(cache, alone, **padded([6]))
    handle.remove()
    assert seen == [1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            cache(**padded([6], seed=2))
            cache(**padded([6], seed=3))
    n_threads = torch.get_num_threads()
    torch.set_num_threads(n_threads + 1)
    try:
        agree(cache, alone, **padded([6], seed=4))
    finally:
        torch.set_num_threads(n_threads)
    cache.model(**padded([6], seed=5)).logits.sum().backward()  # bypassed
    cache.model.zero_grad()
    assert figures(cache).eager == {"hooked": 1, "layers": 1, "torch_settings": 2}
    assert figures(cache).n_requests == 0


@pytest.mark.slow
def test_bypassed_calls_run_a_graph_unless_the_cache_is_disabled(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, alone = both
    with cache.disabled():
        assert torch.equal(run(cache.model, **padded([6, 4])), run(alone, **padded([6, 4])))
    assert (figures(cache).n_requests, figures(cache).eager) == (0, {})
    monkeypatch.setattr(cache._flow._meter, "ask", lambda call: "not_worthwhile")
    agree(cache, alone, **padded([6, 4]))
    agree(cache, alone, **padded([6, 4], left=True))
    agree(cache, alone, input_ids=tokens(2, 6))
    agree(cache, alone, **padded([6]), output_hidden_states=True)
    assert (figures(cache).n_requests, figures(cache).eager) == (4, {"padding": 2})
    assert cache.stats().bypassed == {"disabled": 2, "not_worthwhile": 6, "output_hidden_states": 1}


def test_unwrap_leaves_nothing_behind() -> None:
    model = build(one_layer)
    before = attributes(model)
    cache = LLMCache.wrap(model)
    cache.compile((8,), (1,), backend="eager")
    cache(**padded([6]))
    cache.unwrap()
    assert attributes(model) == before
    assert figures(cache).n_graphs == 0
    with pytest.raises(WrapError):
        cache.compile((8,), (1,), backend="eager")


@pytest.mark.slow
def test_two_threads_share_graphs(both: Pair) -> None:
    cache, alone = both
    failures: list[BaseException] = []

    def ask(first: int) -> None:
        try:
            for seed in range(first, first + 30):
                agree(cache, alone, **padded([6, 4], seed=10 * (seed % 20)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(first,)) for first in (0, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert figures(cache).n_requests >= 2 * 20
    assert cache.stats().errors == 0


@pytest.mark.slow
def test_calibrated_reuse_serves_beside_graphs() -> None:
    model = classifier()
    with LLMCache.wrap(model, audit=0.0, auto_bypass=False) as cache:
        cache.calibrate(batched(requests(500)[0]), max_drop=0.05)
        asked = requests(40, seed=8)[0]
        cache.compile((asked[0]["input_ids"].shape[1],), (1,), backend="eager", max_padding=1.0)
        for one in asked:
            cache(**one)
        stats, found = cache.stats(), figures(cache)
    assert stats.hits["semantic"] > 0
    others = found.eager.get("layers", 0) + found.eager.get("shape", 0)
    assert stats.n_misses <= found.n_requests + others <= stats.n_misses + 1  # the first call, hit or miss, is eager
    assert found.n_requests > 0


@pytest.mark.slow
def test_nothing_is_read_from_the_device_around_a_graph(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, alone = both
    within: list[str] = []
    plain_run = CompiledTrunk._run

    def watched_run(self: CompiledTrunk, *args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
                patch.setattr(Tensor, name, lambda *given, name=name: within.append(name))
            return plain_run(self, *args, **kwargs)

    monkeypatch.setattr(CompiledTrunk, "_run", watched_run)
    agree(cache, alone, **padded([6, 4]))
    assert (figures(cache).n_requests, within) == (2, [])


@pytest.mark.parametrize(
    ("make", "settings", "match"),
    [
        (GENERATORS["llama"], {}, "within the layers"),
        (CLASSIFIERS["bert"], BY_STATES, "within the layers"),
        (CLASSIFIERS["bert"], {"payload": "sequence", "layers": "all"}, "within the layers"),
        (STRANGERS["megatron"], {}, "register an adapter"),
    ],
)
def test_models_that_no_graph_would_serve_are_refused(make: Make, settings: dict[str, Any], match: str) -> None:
    cache = wrapped(make, **settings)
    with pytest.raises(ConfigError, match=match):
        cache.compile()
    assert cache.stats().compiled is None


def test_refusals_tell_what_to_do() -> None:
    cache = wrapped(BARE["bert"])
    for wrong in ({"lengths": (0,)}, {"rows": ()}, {"rows": (True,)}, {"lengths": (512,)}, {"max_padding": 1.5}):
        with pytest.raises(ConfigError, match="got"):
            cache.compile(**wrong)
    for wrong in ({"mode": "fastest"}, {"mode": "default", "backend": "eager"}):
        with pytest.raises(ConfigError, match="mode: give default, "):
            cache.compile(**wrong)
    cache.model.train()
    with pytest.raises(ConfigError, match="eval"):
        cache.compile()
    cache.model.eval()
    cache.model.encoder.layer[0].attention.forward = lambda *given: given
    with pytest.raises(ConfigError, match="was replaced"):
        cache.compile()


def test_buckets_come_smallest_first_and_within_the_positions() -> None:
    assert make_buckets((16, 8, 64), (2, 1, 2), 32) == [(1, 8), (2, 8), (1, 16), (2, 16)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_graph_on_a_gpu_waits_for_nothing(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, alone = build(shallow).cuda(), build(shallow).cuda()
    cache = LLMCache.wrap(model, auto_bypass=False)
    cache(input_ids=tokens(1, 5, seed=1000).cuda())
    cache.compile((8,), (2,), mode=mode, max_padding=1.0)
    plain_run = CompiledTrunk._run

    def watched_run(self: CompiledTrunk, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return plain_run(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(CompiledTrunk, "_run", watched_run)
    for seed in range(3):
        inputs = {name: value.cuda() for name, value in padded([6, 4], seed=seed).items()}
        torch.testing.assert_close(run(cache.model, **inputs), run(alone, **inputs), atol=1e-4, rtol=1e-4)
    assert figures(cache).n_requests == 6
