"""Several generations in turn: their tokens are the model's own, and none holds up or reveals another."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmcache.errors import UnsupportedModelError
from llmcache.generation import Sampling, generate
from llmcache.serving import decoder as module
from llmcache.serving.decoder import Decoder, Generating
from llmcache.serving.refusals import Refusal
from llmcache.serving.tenants import ANYONE, PUBLIC, Tenant
from llmcache.serving.watching import IN_FLIGHT
from tests.generation.test_prompt_cache import Counted
from tests.serving.decoders import CONTEXT, OTHER, Stub, row, tokenizer

GREEDY = Sampling(max_new_tokens=12, stop_ids=())
DRAWN = replace(GREEDY, do_sample=True, temperature=2.0, seed=3, n_logprobs=2)
LONG = replace(GREEDY, max_new_tokens=200)
PROMPT = tuple(range(20, 40))

Make = Callable[..., Stub]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes stubs, which are closed at the end."""
    made: list[Stub] = []

    def one(**settings: Any) -> Stub:
        made.append(Stub(**settings))
        return made[-1]

    yield one
    for stub in made:
        stub.close()


@pytest.fixture
def stub(make: Make) -> Stub:
    return make()


async def read(answer: Generating) -> list[int]:
    return [token.id async for token in answer]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.001)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(main)


def own(stub: Stub, ids: tuple[int, ...], sampling: Sampling) -> list[int]:
    """What the model generates by itself."""
    return list(generate(stub.plain, row(ids), sampling).tokens)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_are_the_models_own_computed_or_not(stub: Stub, sampling: Sampling) -> None:
    longer = (*PROMPT, 50, 51, 52)

    async def main() -> None:
        for ids, n_cached in ((PROMPT, 0), (PROMPT, len(PROMPT)), (longer, len(PROMPT))):
            answer = stub.running.start(ids, sampling, ANYONE)
            tokens = [token async for token in answer]
            plain = generate(stub.plain, row(ids), sampling)
            assert tuple(token.id for token in tokens) == plain.tokens
            assert [token.logprob for token in tokens] == pytest.approx(plain.logprobs, abs=1e-4)
            assert (answer.n_prompt, answer.n_cached, answer.stopped_by) == (len(ids), n_cached, "length")

    run(main())
    assert [rung for rung, _, _ in stub.noted.served_by] == [None, "exact", "prefix"]
    assert (stub.noted.n_generated, stub.noted.n_first, stub.noted.n_gaps) == (36, 3, 33)
    assert stub.noted.reasons == ["length"] * 3 and stub.noted.n_queued == stub.noted.n_inferred == 3


def test_without_a_cache_all_is_computed(make: Make) -> None:
    stub = make(is_caching=False)

    async def main() -> None:
        for _ in range(2):
            answer = stub.running.start(PROMPT, GREEDY, ANYONE)
            assert await read(answer) == own(stub, PROMPT, GREEDY)
            assert (answer.rung, answer.n_cached) == (None, 0)

    run(main())


def test_a_public_prefix_serves_all_and_nothing_else_does(make: Make) -> None:
    stub = make(keys=Path("keys.yaml"))
    public, known = Tenant("boss", PUBLIC, frozenset(("infer", "admin"))), PROMPT[:16]
    longer, mine = (*known, 50, 51, 52, 53, 54, 55, 56, 57), (*known, 60)

    async def main() -> list[int]:
        n_cached = []
        for ids, tenant in ((known, public), (longer, ANYONE), (longer, OTHER), (longer, OTHER), (mine, public)):
            answer = stub.running.start(ids, GREEDY, tenant)
            assert await read(answer) == own(stub, ids, GREEDY)
            n_cached.append(answer.n_cached)
        return n_cached

    assert run(main()) == [0, 16, 16, 23, 16]  # of its own blocks all but the last token
    assert stub.cache.purge(namespace=PUBLIC) == 1


def test_without_keys_there_is_no_public_prefix(stub: Stub) -> None:
    async def main() -> None:
        for tenant in (Tenant("boss", PUBLIC, frozenset(("infer", "admin"))), ANYONE):
            answer = stub.running.start(PROMPT, GREEDY, tenant)
            assert await read(answer) == own(stub, PROMPT, GREEDY) and answer.n_cached == 0

    run(main())


def test_many_at_once(stub: Stub) -> None:
    prompts = [(*PROMPT[:10], *range(40, 45 + i)) for i in range(12)]  # more than there are places
    ways = [GREEDY, DRAWN, replace(GREEDY, frequency_penalty=1.0)]
    asked = [(prompt, ways[i % 3]) for i, prompt in enumerate(prompts)]

    async def main() -> list[list[int]]:
        answers = [stub.running.start(ids, sampling, ANYONE) for ids, sampling in asked]
        return await asyncio.gather(*map(read, answers))

    assert run(main()) == [own(stub, *one) for one in asked]
    assert stub.running.n_running == stub.running.n_waiting == 0


def test_a_short_request_is_not_held_up_by_a_long_one(stub: Stub) -> None:
    order: list[str] = []

    async def noting(name: str, answer: Generating) -> None:
        async for _ in answer:
            order.append(name)

    async def main() -> None:
        long = stub.running.start(PROMPT, LONG, ANYONE)
        await anext(long)
        short = stub.running.start(PROMPT[::-1], replace(GREEDY, max_new_tokens=5), ANYONE)
        await asyncio.gather(noting("long", long), noting("short", short))

    run(main())
    last = len(order) - order[::-1].index("short")
    assert order.count("long") == 199
    assert order[:last].count("long") <= 2 * 5 + 10  # one each in turn; the loop itself may see some late


CHUNKED = tuple(20 + i % 200 for i in range(170))


@pytest.mark.parametrize("chunk", [7, 64])
def test_tokens_are_the_models_own_where_prompts_are_run_in_chunks(make: Make, chunk: int) -> None:
    stub, longer = make(prefill_chunk=chunk), (*CHUNKED, *range(50, 62))

    async def main() -> None:
        for ids, n_cached in ((CHUNKED, 0), (CHUNKED, len(CHUNKED)), (longer, len(CHUNKED)), (PROMPT[::-1], 0)):
            answer = stub.running.start(ids, DRAWN, ANYONE)
            assert await read(answer) == own(stub, ids, DRAWN) and answer.n_cached == n_cached
        several = [stub.running.start((seed, *CHUNKED), GREEDY, ANYONE) for seed in range(30, 40)]
        for seed, tokens in enumerate(await asyncio.gather(*map(read, several)), 30):
            assert tokens == own(stub, (seed, *CHUNKED), GREEDY)

    run(main())
    assert stub.cache.stats().errors == 0 and len(stub.thread) == 0


def after_each_chunk(stub: Stub, monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Have something done before a long prompt lets others have their turn."""
    held = stub.thread.held

    @contextmanager
    def watched() -> Iterator[Callable[[], None]]:
        with held() as turn:

            def doing() -> None:
                do()
                turn()

            yield doing

    monkeypatch.setattr(stub.thread, "held", watched)


def test_a_generation_goes_on_between_the_chunks_of_a_long_prompt(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, queued = make(prefill_chunk=16), threading.Event()
    n_before_turn: list[int] = []

    def wait_for_the_other() -> None:
        while not len(stub.thread):
            queued.wait(0.001)
        n_before_turn.append(stub.noted.n_generated)

    after_each_chunk(stub, monkeypatch, wait_for_the_other)

    async def main() -> list[int]:
        going = stub.running.start(PROMPT[:8], LONG, ANYONE)
        await anext(going)
        long = stub.running.start(CHUNKED, GREEDY, ANYONE)
        other = asyncio.ensure_future(read(going))
        tokens = await read(long)
        assert not other.done()
        await other
        return tokens

    assert run(main()) == own(stub, CHUNKED, GREEDY)
    assert len(n_before_turn) == 10 and n_before_turn == sorted(set(n_before_turn))  # 170 tokens are 11 chunks


def test_a_long_prompt_of_who_has_gone_is_not_run_further(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, is_begun, has_gone = make(prefill_chunk=16), threading.Event(), threading.Event()

    def wait() -> None:
        is_begun.set()
        has_gone.wait(20)

    after_each_chunk(stub, monkeypatch, wait)

    async def main() -> list[int]:
        gone = stub.running.start(CHUNKED, GREEDY, ANYONE)
        await asyncio.to_thread(is_begun.wait, 20)
        gone.close()
        has_gone.set()
        return await read(stub.running.start(PROMPT, GREEDY, ANYONE))

    assert run(main()) == own(stub, PROMPT, GREEDY)
    assert stub.cache.stats().n_stored == 1 and stub.noted.n_cancelled == 1


def test_the_end_of_a_server_within_a_long_prompt(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, is_begun, is_closed = make(prefill_chunk=16), threading.Event(), threading.Event()

    def wait() -> None:
        is_begun.set()
        is_closed.wait(20)

    after_each_chunk(stub, monkeypatch, wait)

    async def main() -> None:
        answers = [stub.running.start((seed, *CHUNKED), GREEDY, ANYONE) for seed in (30, 31)]
        await asyncio.to_thread(is_begun.wait, 20)
        stub.running.close()
        is_closed.set()
        for answer in answers:
            with pytest.raises(Refusal, match="stopping"):
                await read(answer)

    run(main())
    stub.thread.close()


def test_who_has_gone_is_not_computed_further(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []

    def noted(*args: Any) -> Any:
        answer = stream(*args)
        made.append(weakref.ref(answer))
        return answer

    stream = module.stream
    monkeypatch.setattr(module, "stream", noted)

    async def main() -> None:
        answer = stub.running.start(PROMPT, LONG, ANYONE)
        await anext(answer)
        answer.close()
        answer.close()
        await until(lambda: stub.running.n_running == 0)
        await stub.thread.run(lambda: None)
        assert [token async for token in answer] == []

    run(main())
    gc.collect()
    assert made[0]() is None  # and with it its K/V
    assert stub.noted.n_generated < 20
    assert (stub.noted.n_cancelled, stub.noted.reasons) == (1, [])


def test_who_waits_and_goes_takes_no_place(make: Make) -> None:
    stub = make(max_streams=1)

    async def main() -> list[int]:
        first = stub.running.start(PROMPT, LONG, ANYONE)
        await anext(first)
        gone, waiting = (stub.running.start((seed, *PROMPT), GREEDY, ANYONE) for seed in (1, 2))
        await asyncio.sleep(0)
        assert (stub.running.n_running, stub.running.n_waiting) == (1, 2)
        gone.close()
        first.close()
        return await read(waiting)

    assert run(main()) == own(stub, (2, *PROMPT), GREEDY)
    assert stub.noted.n_queued == 2


def test_who_waits_too_long_is_refused(make: Make) -> None:
    stub = make(max_streams=1, max_queue_s=0.02)

    async def main() -> None:
        first = stub.running.start(PROMPT, LONG, ANYONE)
        await anext(first)
        begun = stub.running.start(PROMPT[::-1], LONG, ANYONE)
        # The first one goes on for long after that: its steps wait until the second was refused.
        held = asyncio.Event()
        loop = asyncio.get_running_loop()
        stub.thread.submit(lambda: asyncio.run_coroutine_threadsafe(held.wait(), loop).result())
        with pytest.raises(Refusal, match="the model is answering 1 requests") as refused:
            await anext(begun)
        held.set()
        assert refused.value.kind == "overloaded" and refused.value.retry_after_s == 1
        first.close()

    run(main())
    assert stub.noted.reasons == ["error"]


def test_equal_requests_in_flight_are_computed_once(stub: Stub) -> None:
    async def main() -> None:
        first = stub.running.start(PROMPT, DRAWN, ANYONE)
        await anext(first)
        joined = stub.running.start(PROMPT, replace(DRAWN, stop_ids=[]), ANYONE)
        gone = stub.running.start(PROMPT, DRAWN, ANYONE)
        others = [
            stub.running.start(PROMPT, DRAWN, OTHER),
            stub.running.start(PROMPT, replace(DRAWN, seed=4), ANYONE),
        ]
        gone.close()
        tokens = [await read(answer) for answer in (first, joined, *others)]
        assert tokens[1] == tokens[2] == own(stub, PROMPT, DRAWN) != tokens[3]
        assert tokens[0] == tokens[1][1:]
        assert (first.rung, first.n_cached) == (None, 0)
        assert (joined.rung, joined.n_cached) == (IN_FLIGHT, len(PROMPT))
        assert others[0].rung is None  # of another namespace nothing is known

    run(main())
    assert stub.noted.n_generated == 3 * 12


def test_who_began_it_may_go_and_others_read_on(stub: Stub) -> None:
    async def main() -> list[int]:
        first = stub.running.start(PROMPT, GREEDY, ANYONE)
        joined = stub.running.start(PROMPT, GREEDY, ANYONE)
        first.close()
        return await read(joined)

    assert run(main()) == own(stub, PROMPT, GREEDY)


def test_enough_was_read(stub: Stub) -> None:
    async def main() -> None:
        answer = stub.running.start(PROMPT, LONG, ANYONE)
        await anext(answer)
        answer.stop()
        answer.stop()
        await until(lambda: stub.running.n_running == 0)
        assert answer.stopped_by == "stop"

    run(main())
    assert (stub.noted.reasons, stub.noted.n_cancelled, stub.noted.n_inferred) == (["stop"], 0, 1)


def test_a_failure_is_told_to_those_who_read_it_alone(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = (7, *PROMPT)

    def failed(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        if inputs["input_ids"][0, 0] == 7:
            raise RuntimeError("of what was asked")

    stub.cache.model.register_forward_pre_hook(failed, with_kwargs=True)

    async def main() -> None:
        answers = [stub.running.start(ids, GREEDY, ANYONE) for ids in (failing, PROMPT, failing)]
        for answer in answers[::2]:
            with pytest.raises(Refusal, match="the model failed on this request") as refused:
                await anext(answer)
            assert refused.value.kind == "backend"
        assert await read(answers[1]) == own(stub, PROMPT, GREEDY)

    run(main())
    assert "of what was asked" not in caplog.text and "a generation failed: RuntimeError at" in caplog.text
    assert stub.noted.n_failed == 1


def test_the_end_of_a_server(stub: Stub) -> None:
    async def main() -> None:
        answer = stub.running.start(PROMPT, LONG, ANYONE)
        await anext(answer)
        stub.running.close()
        with pytest.raises(Refusal, match="stopping"):
            await read(answer)

    run(main())


def test_warm_up(stub: Stub) -> None:
    for n_tokens in (8, 10**6):
        stub.running.warm_up(n_tokens, "warm-up")
    assert sum(stub.cache.stats().hits.values()) == 3  # all but the first
    assert stub.cache.purge(namespace="warm-up") > 0


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([len(tokenizer())], "token ids are from 0 to"),
        ([-1, 2], "token ids are from 0 to"),
        ("secret \ud800", "no valid Unicode"),
        ("secret \ud800" + " card" * 10_000, "no valid Unicode"),
        ([{"role": "odd", "content": "secret"}], "the model's chat template does not take these messages"),
    ],
)
def test_prompts_that_are_refused_are_not_quoted(stub: Stub, prompt: Any, told: str) -> None:
    with pytest.raises(Refusal, match=told) as refused:
        run(stub.running.encode(prompt, ANYONE))
    assert "secret" not in str(refused.value) and refused.value.param in ("prompt", "messages")


@pytest.mark.parametrize(
    "body", ["{{ messages.__class__.__mro__ }}", "{{ 1 // 0 }}", "{% if %}", "{{ messages + 'a' }}"]
)
def test_a_template_that_fails_is_no_fault_of_the_messages(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, body: str
) -> None:
    monkeypatch.setattr(tokenizer(), "chat_template", body)
    with pytest.raises(Refusal, match="the model's chat template failed") as refused:
        run(stub.running.encode([{"role": "user", "content": "secret"}], ANYONE))
    assert refused.value.kind == "backend" and "order" not in str(refused.value)
    assert "chat template failed" in caplog.text and "secret" not in str(refused.value) + caplog.text


@pytest.mark.parametrize("body", ["{{ messages[3].content }}", "{{ raise_exception(messages[0].content) }}"])
def test_a_template_that_refuses_messages_is_no_failure(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, body: str
) -> None:
    monkeypatch.setattr(tokenizer(), "chat_template", body)
    with pytest.raises(Refusal, match="another order") as refused:
        run(stub.running.encode([{"role": "user", "content": "secret"}], ANYONE))
    assert refused.value.kind == "tokenizer" and "secret" not in str(refused.value) + caplog.text


def test_prompts_become_tokens(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [{"role": "user", "content": "where is my card"}]

    async def main() -> None:
        for _ in range(2):
            assert list(await stub.running.encode("my card", ANYONE)) == tokenizer()("my card")["input_ids"]
            text = tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            assert list(await stub.running.encode(chat, ANYONE)) == tokenizer()(text)["input_ids"]
        assert stub.noted.n_tokenised == 4
        assert await stub.running.encode([5, 6], ANYONE) == (5, 6)
        assert stub.noted.n_tokenised == 4
        monkeypatch.setattr(tokenizer(), "chat_template", None)
        with pytest.raises(Refusal, match="no chat template: use /v1/completions"):
            await stub.running.encode(chat, ANYONE)

    run(main())


def test_prompts_are_known_within_a_namespace_until_it_is_purged(stub: Stub) -> None:
    counted = Counted(tokenizer())
    decoder = Decoder(stub.cache, stub.thread, stub.settings, counted)
    n_tokenised = []
    for tenant in (ANYONE, ANYONE, OTHER, ANYONE):
        run(decoder.encode("my card", tenant))
        n_tokenised.append(counted.asked["tokens"])
    decoder.forget(ANYONE.namespace)
    run(decoder.encode("my card", ANYONE))
    assert [*n_tokenised, counted.asked["tokens"]] == [1, 1, 2, 2, 3]
    decoder.close()


def test_a_generation_that_was_forgotten_is_joined_by_none(stub: Stub) -> None:
    async def main() -> None:
        first = stub.running.start(PROMPT, LONG, ANYONE)
        stub.running.start(PROMPT, LONG, OTHER)
        await anext(first)
        stub.cache.purge(namespace=ANYONE.namespace)
        stub.running.forget(ANYONE.namespace)
        second, joined = (stub.running.start(PROMPT, LONG, tenant) for tenant in (ANYONE, OTHER))
        tokens = own(stub, PROMPT, LONG)
        assert await read(second) == [tokens[0], *await read(first)] == tokens
        assert (second.rung, second.n_cached, joined.rung) == (None, 0, IN_FLIGHT)
        forgotten = stub.running.start(PROMPT[::-1], LONG, ANYONE)
        stub.running.forget()
        stub.running.close()
        with pytest.raises(Refusal, match="stopping"):
            await read(forgotten)

    run(main())


def test_room_for_an_answer(stub: Stub) -> None:
    names = ("prompt", "max_tokens")
    n_new = stub.running.n_new
    assert n_new(10, 5, None, params=names) == 5
    assert n_new(10, None, 16, params=names) == 16
    assert n_new(CONTEXT - 3, None, 16, params=names) == n_new(CONTEXT - 3, 3, 16, params=names) == 3
    assert n_new(10, None, None, params=names) == CONTEXT - 10
    for asked, param in (((CONTEXT, None), "prompt"), ((10, CONTEXT - 9), "max_tokens")):
        with pytest.raises(Refusal) as refused:
            n_new(*asked, 16, params=names)
        assert refused.value.param == param


def test_models_that_are_none_are_refused(stub: Stub) -> None:
    class Other:
        model = torch.nn.Linear(1, 1)

    with pytest.raises(UnsupportedModelError):
        Decoder(Other(), stub.thread, stub.settings, stub.tokenizer)  # type: ignore[arg-type]
