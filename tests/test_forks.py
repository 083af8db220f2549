"""Locks at a fork: taken without deadlock, free in the child, with a limit on the wait; threads that give way."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmcache.support import threads
from llmcache.support.threads import SHORT_TURNS, at_fork, forkable, stand_back
from tests.fixtures import Patch
from tests.forks import in_child, needs_fork

pytestmark = needs_fork


def holding(lock: threading.Lock, *others: threading.Lock) -> tuple[threading.Thread, threading.Event]:
    """Start a thread that holds a lock and takes others, until the returned event is set."""
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        with lock:
            begun.set()
            for other in others:
                time.sleep(0.05)  # until the fork has begun
                with other:
                    pass
            end.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(20)
    return thread, end


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_lock_that_another_thread_holds_is_free_in_the_child(is_waited_for: bool, monkeypatch: Patch) -> None:
    monkeypatch.setattr(threads, "_PATIENCE_S", 0.01)
    lock = forkable(threading.Lock(), is_waited_for)
    thread, end = holding(lock)
    assert in_child(lambda: lock.acquire(timeout=5))
    assert lock.locked()
    end.set()
    thread.join()
    assert not lock.locked()


def test_locks_that_are_taken_in_another_order_are_waited_for_without_a_deadlock() -> None:
    first, second = forkable(threading.Lock()), forkable(threading.Lock())
    n_acts: list[bool] = []

    class Part:
        def before(self) -> None:
            n_acts.append(first.locked() and second.locked())

        def anew(self) -> None:
            n_acts.append(first.locked() or second.locked())

    part = Part()
    at_fork(part.anew, part.before)
    thread, end = holding(second, first)
    threading.Timer(0.1, end.set).start()
    assert in_child(lambda: n_acts == [True, False])
    thread.join()
    assert n_acts == [True] and not (first.locked() or second.locked())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere priorities are those of processes")
def test_a_thread_stands_back_alone() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    with ThreadPoolExecutor(1) as pool:
        pool.submit(stand_back).result()
        assert pool.submit(priority).result() == max(10, before := priority())
    assert priority() == before


def test_turns_are_short_while_a_thread_learns_and_not_in_a_child() -> None:
    before = sys.getswitchinterval()

    def leave() -> tuple[float, float]:
        in_time = sys.getswitchinterval()
        SHORT_TURNS.__exit__()  # of a learner whose fork this is
        with SHORT_TURNS:
            return in_time, sys.getswitchinterval()

    with SHORT_TURNS:
        with SHORT_TURNS:
            assert sys.getswitchinterval() == pytest.approx(1e-4)
        assert sys.getswitchinterval() == pytest.approx(1e-4)
        assert in_child(leave) == (pytest.approx(before), pytest.approx(1e-4))
    assert sys.getswitchinterval() == pytest.approx(before)
