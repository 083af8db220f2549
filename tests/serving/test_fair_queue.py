"""Tenants are served in turn, for slots and on the model thread; and how generations share both."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from llmcache.serving.fair_queue import FairQueue, Slots
from llmcache.serving.model_thread import ModelThread
from tests.fixtures import Pool
from tests.redis_server import wait_until


def test_tenants_are_served_in_turn() -> None:
    queue = FairQueue[int]()
    for tenant, item in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5), ("c", 6)):
        queue.put(tenant, item)
    assert [queue.pop() for _ in range(4)] == [1, 4, 6, 2]
    queue.put("c", 7)
    assert [queue.pop() for _ in range(3)] == [5, 3, 7] and not queue


def test_a_slot_of_a_waiter_that_has_gone_is_given_to_the_next() -> None:
    async def run() -> list[str]:
        slots, served = Slots(1), list[str]()

        async def serve(tenant: str) -> None:
            await slots.acquire(tenant)
            served.append(tenant)

        await slots.acquire("a")
        waiting = [asyncio.create_task(serve(tenant)) for tenant in ("a", "b", "c", "d")]
        await asyncio.sleep(0)
        waiting[0].cancel()  # before it is given a slot
        slots.release()
        waiting[1].cancel()  # after it was given one
        await asyncio.sleep(0.01)
        assert slots.are_taken()
        slots.release()
        await asyncio.wait(waiting, timeout=5)
        slots.release()
        assert not slots.are_taken()
        return served

    assert asyncio.run(run()) == ["c", "d"]


@pytest.fixture
def thread() -> Any:
    made = ModelThread()
    yield made
    made.close()


@pytest.mark.parametrize(("share", "expected"), [(1.0, "a1 . b1 . a2 . b2 ."), (0.5, "a1 b1 . . a2 b2 . .")])
def test_a_step_runs_between_holds_that_add_up_to_one(
    share: float, expected: str, thread: ModelThread, pool: Pool
) -> None:
    ran, release = list[str](), threading.Event()

    def hold(tenant: str, name: str) -> None:
        with thread.held(tenant) as hold:
            ran.append(name)
            hold.share = share
            thread.submit(lambda: ran.append("."))

    thread.submit(release.wait)
    holding = list[Future[None]]()
    for name in ("a1", "a2", "b1", "b2"):
        holding.append(pool.submit(hold, name[0], name))
        wait_until(lambda: sum(map(len, thread._waiting._waiting.values())) == len(holding))
    release.set()
    for one in holding:
        one.result()
    thread.submit(lambda: None).result()
    assert " ".join(ran) == expected


def test_threads_that_wait_for_the_model_get_it_when_the_thread_is_closed(thread: ModelThread, pool: Pool) -> None:
    release = threading.Event()

    def hold() -> None:
        with thread.held("a"):
            pass

    thread.submit(release.wait)
    holding = [pool.submit(hold) for _ in range(3)]
    wait_until(lambda: sum(map(len, thread._waiting._waiting.values())) == 3)
    closing = pool.submit(thread.close)
    release.set()
    for one in (*holding, closing):
        one.result(timeout=10)
