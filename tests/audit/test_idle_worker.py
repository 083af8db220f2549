"""Jobs run in idle moments, after their patience or in `drain`; none is lost or done twice."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmcache.reuse.audit.idle_worker import IdleWorker, Job
from tests.redis_server import wait_until


class Owner:
    """Owner of the jobs; the worker's thread ends with it."""

    def __init__(self, **settings: Any) -> None:
        self.worker: IdleWorker[Owner] = IdleWorker(self, **settings)
        self.done: list[object] = []

    def add(self, what: object = None) -> None:
        self.worker.add(Job(lambda owner: owner.done.append((what, threading.current_thread().name))))


def test_a_job_is_done_by_a_thread_of_its_own_once_nobody_calls() -> None:
    owner = Owner(idle_s=0.0, patience_s=1e6)
    owner.worker.enter()
    owner.add(1)
    time.sleep(0.05)
    assert not owner.done
    owner.worker.leave()
    wait_until(lambda: owner.done)
    assert owner.done == [(1, "llmcache-audit")]


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


def busy(seconds: float, **settings: float) -> tuple[Owner, Clock]:
    """Return an owner whose calls have left no idle moment for `seconds`, and its clock."""
    clock = Clock()
    owner = Owner(idle_s=1e6, clock=clock, **settings)
    owner.worker.enter()
    clock.now += seconds
    owner.worker.leave()
    return owner, clock


def work(clock: Clock, seconds: float) -> Callable[[Owner], None]:
    """Return a job that takes `seconds` of the clock."""

    def spend(owner: Owner) -> None:
        owner.done.append(seconds)
        clock.now += seconds

    return spend


def test_calls_do_what_has_waited_for_long_for_a_share_of_their_time() -> None:
    owner, clock = busy(2.0, share=0.01, patience_s=1.0)
    for _ in range(5):
        owner.worker.add(Job(work(clock, 0.015), clock.now))
    assert owner.worker.catch_up() == 0.0 and not owner.done  # it has not waited for long
    clock.now += 1.1
    assert owner.worker.catch_up() == owner.worker.catch_up() == pytest.approx(0.015)  # of 20 ms that were earned
    assert owner.worker.catch_up() == 0.0  # 10 ms too much were spent
    for _ in range(6):
        owner.worker.enter()
        clock.now += 0.25
        owner.worker.leave()
    assert owner.worker.catch_up() == pytest.approx(0.015)
    assert len(owner.done) == 3


def test_a_quiet_time_saves_little_up_and_no_share_nothing() -> None:
    owner, clock = busy(1e6, patience_s=0.0)
    owner.worker.add(Job(work(clock, 2.0), clock.now, is_short=False))  # calls leave it to the others
    for _ in range(9):
        owner.worker.add(Job(work(clock, 0.03), clock.now))
    assert [owner.worker.catch_up() > 0 for _ in range(5)] == [True] * 4 + [False]  # a tenth of a second
    assert 2.0 not in owner.done and owner.worker.drain() == 6
    assert owner.worker.worked_s == pytest.approx(2.0 + 9 * 0.03)
    owner, clock = busy(1e6, patience_s=0.0, share=0.0)
    owner.worker.add(Job(work(clock, 0.03), clock.now))
    assert owner.worker.catch_up() == 0.0


def test_a_job_gives_way_to_a_call_and_is_done_again_later() -> None:
    owner, begun, stopped = Owner(idle_s=0.0), threading.Event(), threading.Event()

    def work(owner: Owner) -> None:
        begun.set()
        if not stopped.is_set():
            try:
                while True:
                    owner.worker.give_way()
                    time.sleep(0.001)
            finally:
                stopped.set()
        owner.done.append("done")

    owner.worker.add(Job(work))
    begun.wait()
    owner.worker.enter()
    owner.worker.give_way()  # of its own thread alone
    assert stopped.wait(30)
    time.sleep(0.05)
    assert not owner.done and len(owner.worker) == 1
    owner.worker.leave()
    wait_until(lambda: owner.done)


def test_the_thread_computes_with_one_thread_and_others_as_before() -> None:
    owner, others = Owner(idle_s=0.0), []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        owner.worker.add(Job(lambda owner: owner.done.append(torch.get_num_threads())))
        wait_until(lambda: owner.done)
        later = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert (owner.done, others, torch.get_num_threads()) == ([1], [2], 2)
    finally:
        torch.set_num_threads(before)


def test_the_more_waits_the_less_is_to_be_added() -> None:
    owner = Owner(idle_s=1e6, max_jobs=40)
    scales = []
    for _ in range(40):
        scales.append(owner.worker.scale)
        owner.add()
    assert scales[:20] == [1.0] * 20 and scales[20:26] == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    assert owner.worker.scale == 0.5**10


def test_draining_does_what_waits_here_and_in_order_and_closing_ends_the_thread() -> None:
    owner, full = Owner(idle_s=1e6, patience_s=1e6, max_jobs=4), []
    assert owner.worker._thread is None  # before the first job
    for n in range(5):
        full.append(owner.worker.is_full)
        owner.add(n)
    assert full == [False] * 4 + [True]
    assert owner.worker.drain() == 5  # jobs beyond the limit are not lost
    assert owner.done == [(n, threading.current_thread().name) for n in range(5)]
    owner.add()
    thread = owner.worker._thread
    assert thread.daemon  # the interpreter ends though jobs wait
    for _ in range(2):
        owner.worker.close()
    owner.add()
    assert not thread.is_alive() and (len(owner.worker), len(owner.done)) == (0, 5)


def test_draining_waits_for_the_job_under_way() -> None:
    owner, begun, may_end = Owner(idle_s=0.0), threading.Event(), threading.Event()
    owner.worker.add(Job(lambda owner: (begun.set(), may_end.wait(), owner.done.append("slow"))))
    begun.wait()
    threading.Timer(0.02, may_end.set).start()
    owner.worker.drain()
    assert owner.done == ["slow"]


def test_within_a_pause_and_without_a_background_only_draining_does_jobs() -> None:
    paused, foreground = Owner(idle_s=0.0), Owner(in_background=False, idle_s=0.0, patience_s=0.0, max_jobs=0)
    with paused.worker.paused():
        for owner in (paused, foreground):
            owner.add(1)
        time.sleep(0.05)
        assert not (paused.done or foreground.done or foreground.worker._thread)
        assert foreground.worker.scale == 1.0  # draining does all of them
        assert paused.worker.drain() == foreground.worker.drain() == 1
