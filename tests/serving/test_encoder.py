"""Hits are answered without queueing, misses computed in batches, and nothing is computed for nobody."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmcache.serving.encoder import Output, _Miss
from llmcache.serving.refusals import Refusal
from llmcache.serving.server import Server
from llmcache.serving.tokenizing import Tokens
from tests.serving.served import make_server, within

TEXTS = [f"lost my card w{i}" for i in range(8)]


@pytest.fixture
def server(models: Path) -> Server:
    return make_server(models / "classifier")


def _ask(server: Server, texts: list[Any], namespace: str = "default", truncate: bool = False) -> Any:
    assert server.encoder is not None
    return server.encoder.run(texts, namespace, truncate, "right")


def _alone(server: Server, text: str) -> np.ndarray:
    """What the model makes of a text without a cache."""
    inputs = server.tokenizer(text, return_tensors="pt")
    with torch.inference_mode(), server.cache.disabled():
        return server.model(**inputs).logits[0].numpy()


def _values(outputs: list[Any]) -> list[np.ndarray]:
    assert all(isinstance(one, Output) for one in outputs), outputs
    return [one.values for one in outputs]


def test_answers_are_the_models_own_computed_or_served(server: Server) -> None:
    async def work() -> None:
        own = [_alone(server, text) for text in TEXTS]
        first, second = await _ask(server, TEXTS), await _ask(server, TEXTS)
        assert [one.rung for one in first] == [None] * len(TEXTS)
        assert [one.rung for one in second] == ["exact"] * len(TEXTS)
        for row, one, other in zip(own, _values(first), _values(second), strict=True):
            assert np.allclose(row, one, atol=1e-5)
            assert np.array_equal(one, other)

    within(server, work)


def test_of_many_inputs_only_the_new_one_is_computed(server: Server) -> None:
    async def work() -> None:
        await _ask(server, TEXTS)
        before = server.cache.stats()
        answers = await _ask(server, [*TEXTS, "where is my cash"])
        after = server.cache.stats()
        assert [one.rung for one in answers] == ["exact"] * len(TEXTS) + [None]
        assert after.n_misses - before.n_misses == 1
        assert after.n_requests - before.n_requests == len(TEXTS) + 1

    within(server, work)


def test_a_hit_does_not_wait_for_what_is_computed(server: Server) -> None:
    async def work() -> None:
        await _ask(server, TEXTS[:1])
        is_held = asyncio.Event()
        loop, release = asyncio.get_running_loop(), threading.Event()
        server.thread.submit(lambda: (loop.call_soon_threadsafe(is_held.set), release.wait(10)))
        await is_held.wait()
        miss = asyncio.ensure_future(_ask(server, ["change please"]))
        hit = await asyncio.wait_for(_ask(server, TEXTS[:1]), 5)
        assert hit[0].rung == "exact"
        assert not miss.done()
        release.set()
        assert (await miss)[0].rung is None

    within(server, work)


def test_a_hit_does_not_wait_for_a_long_text(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    long, encode = "my card " * 2000, server.tokenizing.encode
    is_held, release = threading.Event(), threading.Event()

    def blocked(items: Any, *args: Any) -> Any:
        if long in items:
            is_held.set()
            release.wait(10)
        return encode(items, *args)

    async def work() -> None:
        await _ask(server, TEXTS[:1])
        monkeypatch.setattr(server.tokenizing, "encode", blocked)
        waiting = asyncio.ensure_future(_ask(server, [long], truncate=True))
        await asyncio.to_thread(is_held.wait)
        hit = await asyncio.wait_for(_ask(server, TEXTS[:1]), 5)
        assert hit[0].rung == "exact" and not waiting.done()
        release.set()
        assert (await waiting)[0].n_tokens == 32

    within(server, work)


def test_times_of_tokenising_and_of_the_model_are_told(server: Server) -> None:
    def counts() -> list[float]:
        read = server.metrics.registry.get_sample_value
        names = [f"llmcache_request_{part}_duration_count" for part in ("tokenization", "inference")]
        return [read(name, {"model_name": server.name}) or 0 for name in names]

    async def work() -> None:
        assert counts() == [0, 0]
        await _ask(server, TEXTS)
        assert counts() == [1, len(TEXTS)]
        await _ask(server, [*TEXTS, "my card"])
        assert counts() == [2, len(TEXTS) + 1]
        await _ask(server, ["my card " * 2000], truncate=True)
        assert counts() == [3, len(TEXTS) + 2]
        assert server.encoder is not None
        await server.encoder.tokens(TEXTS, False, "right")
        assert counts() == [4, len(TEXTS) + 2]

    within(server, work)


def test_texts_that_are_short_are_looked_up_in_one_turn_of_the_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        loop, turns = asyncio.get_running_loop(), []
        run = loop.run_in_executor

        def counted(pool: Any, *args: Any) -> Any:
            turns.append(pool)
            return run(pool, *args)

        await _ask(server, TEXTS)
        monkeypatch.setattr(loop, "run_in_executor", counted)
        await _ask(server, TEXTS)
        assert len(turns) == 1
        await _ask(server, ["my card " * 2000], truncate=True)
        assert len(turns) == 3

    within(server, work)


@contextmanager
def _lookups_held(server: Server) -> Iterator[None]:
    """Within, what is asked waits for its lookup."""
    release = threading.Event()
    assert server.encoder is not None
    server.encoder._lookups._pool.submit(lambda: release.wait(10))
    try:
        yield
    finally:
        release.set()


def test_requests_that_wait_are_looked_up_together_each_in_its_namespace(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str]] = []

    async def work() -> None:
        assert server.encoder is not None
        served = server.encoder._model.served
        await _ask(server, TEXTS)
        await _ask(server, TEXTS[:1], "b")
        monkeypatch.setattr(
            server.encoder._model,
            "served",
            lambda tokens, name, **told: (asked.append((len(tokens), name)), served(tokens, name, **told))[1],
        )
        with _lookups_held(server):
            first = asyncio.ensure_future(_ask(server, TEXTS[:1]))  # takes the turn that is held
            await asyncio.sleep(0.01)
            waiting = [asyncio.ensure_future(_ask(server, [text, *more])) for text, *more in (TEXTS, ["new", TEXTS[0]])]
            other = asyncio.ensure_future(_ask(server, TEXTS[:2], "b"))
            gone = asyncio.ensure_future(_ask(server, ["gone"] * 7))
            await asyncio.sleep(0.01)
            gone.cancel()
        answers = [[one.rung for one in outputs] for outputs in await asyncio.gather(first, *waiting, other)]
        n = len(TEXTS)
        assert answers == [["exact"], ["exact"] * n, [None, "exact"], ["exact", None]]
        assert asked == [(1, "default"), (n + 2, "default"), (2, "b")]

    within(server, work)


def test_a_turn_has_so_many_inputs_and_one_request_may_have_more(server: Server) -> None:
    sizes: list[list[int]] = []

    async def work() -> None:
        assert server.encoder is not None
        lookups = server.encoder._lookups
        with _lookups_held(server):
            asked = [asyncio.ensure_future(_ask(server, ["my card"] * n)) for n in (1, 40, 30, 2, 1)]
            await asyncio.sleep(0.01)
            while turn := lookups._next_turn():
                sizes.append([request.n_inputs for request in turn])
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    within(server, work)
    assert sizes == [[40], [30, 2], [1]]  # the first one was under way


def test_a_turn_that_fails_is_no_stop_and_the_next_one_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("lost my card")

    async def work() -> None:
        await _ask(server, TEXTS[:1])
        assert server.encoder is not None
        with monkeypatch.context() as patched:
            patched.setattr(server.encoder._model, "served", fails)
            assert [one.kind for one in await _ask(server, TEXTS)] == ["backend"] * len(TEXTS)
        assert (await _ask(server, TEXTS[:1]))[0].rung == "exact"

    within(server, work)
    assert "a lookup failed: ValueError" in caplog.text
    assert "card" not in caplog.text


def test_what_is_looked_up_in_one_call_is_of_about_one_length(server: Server) -> None:
    assert server.encoder is not None
    lengths = [70, 3, 64, 140, 141, 300, 5]
    parts = list(server.encoder._lookups._parts([Tokens((1,) * length) for length in lengths]))
    assert [[lengths[i] for i in part] for part in parts] == [[3, 5, 64], [70, 140], [141], [300]]


def test_lookups_that_were_ended_refuse(server: Server) -> None:
    async def work() -> None:
        assert server.encoder is not None
        server.encoder.close()
        assert [one.kind for one in await _ask(server, TEXTS)] == ["unhealthy"] * len(TEXTS)

    within(server, work)


def test_the_same_request_in_flight_is_computed_once_in_its_namespace(server: Server) -> None:
    async def work() -> None:
        before = server.cache.stats().n_misses
        same = await asyncio.gather(*(_ask(server, ["where is cash"], "a") for _ in range(6)))
        assert server.cache.stats().n_misses - before == 1
        assert len({one[0].values.tobytes() for one in same}) == 1
        await asyncio.gather(*(_ask(server, ["where is my rate"], name) for name in ("a", "b")))
        assert server.cache.stats().n_misses - before == 3

    within(server, work)


def test_namespaces_are_apart_and_all_read_the_public_one(models: Path) -> None:
    server = make_server(models / "classifier", keys=models / "keys.yaml")

    async def work() -> None:
        await _ask(server, TEXTS[:1], "a")
        assert (await _ask(server, TEXTS[:1], "b"))[0].rung is None
        await _ask(server, TEXTS[1:2], "public")
        assert (await _ask(server, TEXTS[1:2], "b"))[0].rung == "exact"
        assert server.cache.purge(namespace="b") == 1  # nothing of the public one was stored in it

    within(server, work)


def test_what_fails_spoils_no_other(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    forward = server.served.forward

    def fails_on_cash(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        if (inputs["input_ids"] == server.tokenizer.convert_tokens_to_ids("cash")).any():
            raise RuntimeError("cannot cash")
        return forward(inputs)

    async def work() -> None:
        assert server.encoder is not None
        server.encoder._model._forward = fails_on_cash
        with pytest.raises(Refusal, match="the model failed"):
            await server.encoder.states([Tokens((5,))], fails_always)
        texts = ["my card", "my cash", "w3 w4", "\ud800", "w1 " * 40, "my change"]
        answers = await _ask(server, texts)
        kinds = [one.kind if isinstance(one, Refusal) else "" for one in answers]
        assert kinds == ["", "backend", "", "tokenizer", "invalid", ""]
        assert not any("cash" in str(one) for one in answers if isinstance(one, Refusal))
        assert len(server.encoder) == 0

    def fails_always(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        raise ValueError("of what was asked")

    within(server, work)
    failures = [one for one in caplog.messages if one.startswith("the model failed on an input: ")]
    assert ["ValueError" in one for one in failures] == [True, False] and "RuntimeError" in failures[1]
    assert "cash" not in caplog.text and "asked" not in caplog.text
    assert "llmcache_model_failures_total" in server.metrics.text().decode()


def test_an_entry_that_cannot_be_served_is_computed_and_told(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    forward = server.served.forward

    async def work() -> None:
        assert server.encoder is not None
        await _ask(server, TEXTS[:1])
        failing = iter((True,))

        def fails_once(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            if next(failing, False):
                raise RuntimeError("of what was asked")
            return forward(inputs)

        server.encoder._model._forward = fails_once
        assert np.allclose(_values(await _ask(server, TEXTS[:1]))[0], _alone(server, TEXTS[0]), atol=1e-5)

    within(server, work)
    assert "could not be served, and are computed: RuntimeError" in caplog.text and "asked" not in caplog.text


def test_a_tokenizer_that_fails_is_told(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("lost my card")

    monkeypatch.setattr(server.tokenizing, "_quickly", fails)

    async def work() -> None:
        assert [one.kind for one in await _ask(server, TEXTS[:2])] == ["tokenizer"] * 2

    within(server, work)
    assert caplog.text.count("the tokenizer failed on an input: ValueError") == 2 and "card" not in caplog.text


def test_outputs_that_are_not_finite_are_refused(server: Server) -> None:
    async def work() -> None:
        assert server.encoder is not None
        server.encoder._model._forward = lambda inputs: torch.full((len(inputs["input_ids"]), 5), torch.nan)
        assert [one.kind for one in await _ask(server, TEXTS[:2])] == ["backend"] * 2

    within(server, work)


def test_what_nobody_waits_for_is_not_computed(server: Server) -> None:
    async def work() -> None:
        assert server.encoder is not None
        before, release = server.cache.stats().n_misses, threading.Event()
        held = server.thread.submit(lambda: release.wait(10))
        running = asyncio.ensure_future(_ask(server, ["my card"]))
        await _until(lambda: len(server.encoder) == 1 and not server.encoder._queue)  # type: ignore[arg-type, union-attr]
        gone = asyncio.ensure_future(_ask(server, ["my cash"]))
        await _until(lambda: len(server.encoder) == 2)  # type: ignore[arg-type]
        gone.cancel()
        await _until(lambda: len(server.encoder) == 1)  # type: ignore[arg-type]
        release.set()
        await running
        assert held.result()
        assert server.cache.stats().n_misses - before == 1

    within(server, work)


async def _until(is_so: Any) -> None:
    for _ in range(500):
        if is_so():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be so")


def test_a_queue_that_is_too_slow_refuses(models: Path) -> None:
    server = make_server(models / "classifier", max_queue_s=0.05)

    async def work() -> None:
        release = threading.Event()
        server.thread.submit(lambda: release.wait(10))
        assert server.encoder is not None
        first = asyncio.ensure_future(_ask(server, ["my card"]))
        await _until(lambda: len(server.encoder) == 1 and not server.encoder._queue)  # type: ignore[arg-type, union-attr]
        late = asyncio.ensure_future(_ask(server, ["my cash"]))
        await asyncio.sleep(0.1)
        release.set()
        assert isinstance((await first)[0], Output)
        refusal = (await late)[0]
        assert (refusal.kind, refusal.headers) == ("overloaded", {"Retry-After": "1"})

    within(server, work)


def test_batches_are_of_about_one_length_and_within_the_tokens(models: Path) -> None:
    server = make_server(models / "classifier", max_batch_tokens=40)
    texts = [" ".join(["w1"] * n + [f"w{i}"]) for i, n in enumerate((2, 25, 3, 24, 2, 3, 2, 3))]
    shapes: list[tuple[int, ...]] = []
    forward = server.served.forward

    def noted(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        shapes.append(tuple(inputs["input_ids"].shape))
        return forward(inputs)

    async def work() -> None:
        assert server.encoder is not None
        server.encoder._model._forward = noted
        server.is_disabled = True
        await _ask(server, texts)

    within(server, work)
    assert sum(rows for rows, _ in shapes) == len(texts)
    assert all(rows * length <= 40 or rows == 1 for rows, length in shapes)
    assert max(rows for rows, _ in shapes) >= 5
    assert {length for rows, length in shapes if rows > 1} <= {5, 6}


@pytest.mark.parametrize(("padding", "expected"), [(4, [[5, 5, 6], [30]]), (100, [[5, 5, 6, 30]])])
def test_lengths_are_mixed_where_padding_costs_less_than_a_run(
    models: Path, padding: int, expected: list[list[int]]
) -> None:
    server = make_server(models / "classifier")
    encoder = server.encoder
    assert encoder is not None
    encoder._padding = padding
    for n_tokens in (5, 30, 5, 6):
        encoder._queue.append(_Miss(("", Tokens((1,) * n_tokens, ())), None))  # type: ignore[arg-type]
    batches = []
    while encoder._queue:
        batches.append([len(miss.key[1]) for miss in encoder._next_batch()])
    assert batches == expected


def test_with_the_cache_off_everything_is_computed(server: Server) -> None:
    async def work() -> None:
        await _ask(server, TEXTS)
        server.is_disabled = True
        assert [one.rung for one in await _ask(server, TEXTS)] == [None] * len(TEXTS)
        server.is_disabled = False
        assert [one.rung for one in await _ask(server, TEXTS)] == ["exact"] * len(TEXTS)

    within(server, work)


def test_a_model_that_no_process_can_run_is_computed_here(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = make_server(models / "classifier", {"fingerprint": "mean", "tau": 0.99}, model_process=True)

    async def ask() -> Any:
        assert server.encoder is not None
        return await server.encoder.run(["lost my card"], "default", False, "right")

    (output,) = within(server, ask)
    assert output.rung is None
    assert "computed in the server's own process" in caplog.text


def test_lookups_that_are_too_slow_refuse_as_well(models: Path) -> None:
    server = make_server(models / "classifier", max_queue_s=0.05)

    async def work() -> None:
        await _ask(server, ["my card"])
        with _lookups_held(server):
            late = asyncio.ensure_future(_ask(server, ["my card", "my cash"]))  # one of which is known
            await asyncio.sleep(0.1)
        assert [(one.kind, one.headers) for one in await late] == [("overloaded", {"Retry-After": "1"})] * 2
        assert isinstance((await _ask(server, ["my cash"]))[0], Output)

    within(server, work)


def test_a_batch_has_no_more_tokens_than_are_computed_in_time(server: Server) -> None:
    async def work() -> None:
        encoder = server.encoder
        assert encoder is not None
        for most, sizes in ((10, [1] * 4), (13, [2, 2]), (10**6, [4])):
            encoder._most_tokens = most
            encoder._queue = [_Miss(("default", Tokens((1,) * 6)), asyncio.Future()) for _ in range(4)]
            batches = []
            while encoder._queue:
                batches.append(len(encoder._next_batch()))
            assert batches == sizes

    within(server, work)
