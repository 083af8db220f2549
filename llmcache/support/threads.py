"""Background threads of the library, threads of products, and how threads and locks survive a fork.

A forked process has one thread. A lock that another thread held stays locked there for ever, and connections and pipes
are shared with the parent. So before a fork the forking thread acquires the locks that guard data, which is then
consistent in the child as well. In the child locks are reset, and owners of threads, pipes or connections drop them.
"""

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_PATIENCE_S = 1.0  # longest wait for locks before a fork
_TURN_S = 1e-4
_NICE = 10  # a tenth of the time of a core that another thread wants

_guards: dict[int, weakref.ref[Any]] = {}  # locks that a fork waits for, by identity
_others: dict[int, weakref.ref[Any]] = {}  # locks, conditions and events that a fork only resets
_before: dict[tuple[int, str], weakref.WeakMethod[Any]] = {}
_in_child: dict[tuple[int, str], weakref.WeakMethod[Any]] = {}
_forking = threading.local()


def compute_alone() -> None:
    """Set torch to one thread for the calling thread only."""
    n_threads = torch.get_num_threads()
    if n_threads == 1:
        return
    torch.set_num_threads(1)  # also the default of threads that first compute later: the thread below restores that
    others = threading.Thread(target=torch.set_num_threads, args=(n_threads,), name="llmcache-threads")
    with suppress(RuntimeError):  # the interpreter is shutting down and starts no threads
        others.start()
        others.join()


def stand_back() -> None:
    """Have the calling thread give way to others, if the system knows priorities of threads (Linux)."""
    with suppress(AttributeError, OSError):
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, max(_NICE, os.getpriority(os.PRIO_PROCESS, own)))


def _find_mkl() -> Callable[[int], int]:
    with suppress(OSError, AttributeError):
        library = ctypes.PyDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        found: Callable[[int], int] = library.MKL_Set_Num_Threads_Local
        return found
    return lambda n: 0  # torch was built without MKL, or does not show it


#: `n -> before`: sets how many threads MKL's products of the calling thread take; 0: as many as of the process. Beside
#: ONNX Runtime they take one: others spin for milliseconds after each, even of one row, and hold up its threads.
limit_products = _find_mkl()


class HeadProducts(threading.local):
    """Has the products of a model's head take one thread, where a graph computed its trunk. By calling thread."""

    _is_within = False
    _before: int | None = None

    def begin(self) -> bool:
        """Begin the forward of a model; return whether it runs within that of another one."""
        is_within, self._is_within = self._is_within, True
        return is_within

    def narrow(self) -> None:
        """Take one thread until the forward of the model ends."""
        if self._is_within and self._before is None:
            self._before = limit_products(1)

    def end(self, is_within: bool) -> None:
        """End a forward; `is_within` is what `begin` returned."""
        self._is_within = is_within
        if not is_within and self._before is not None:
            limit_products(self._before)
            self._before = None


HEAD_PRODUCTS = HeadProducts()


def forkable(lock: _T, is_waited_for: bool = True) -> _T:
    """Register a new lock, condition or event to be free in forked processes, and return it.

    If it `is_waited_for`, a fork waits until it is free, for at most a second: only for locks that are held briefly.
    """
    _register(_guards if is_waited_for and hasattr(lock, "acquire") else _others, lock, weakref.ref)
    return lock


def at_fork(in_child: Callable[[], object], before: Callable[[], object] | None = None) -> None:
    """Register bound methods to be called at each fork while their objects live. They must not take a lock.

    `in_child` is called in the forked process, where no other thread runs; `before` in the forking one, while it holds
    all locks that a fork waits for, and not if one of them was held for too long.
    """
    _register(_in_child, in_child, weakref.WeakMethod)
    if before is not None:
        _register(_before, before, weakref.WeakMethod)


def _register(kept: dict[Any, Any], one: Any, refer: Callable[..., Any]) -> None:
    key = (id(one.__self__), one.__name__) if refer is weakref.WeakMethod else id(one)
    kept[key] = refer(one, lambda _: kept.pop(key, None))


def _alive(kept: dict[Any, Any]) -> list[Any]:
    return [one for refer in list(kept.values()) if (one := refer()) is not None]


def _lock_before_fork() -> None:
    guards = _alive(_guards)
    _forking.held = _acquire(guards, monotonic() + _PATIENCE_S)
    if len(_forking.held) == len(guards):
        for act in _alive(_before):
            act()


def _acquire(locks: Sequence[Any], until: float) -> list[Any]:
    """Acquire all locks, or those that are free at the deadline `until` (of `monotonic`), and return those acquired.

    It never waits for a lock while holding another, so it cannot deadlock with a thread that does.
    """
    order = list(locks)
    while order:
        left_s = until - monotonic()
        held = [order[0]] if order[0].acquire(timeout=max(0.0, left_s)) else []
        held += [one for one in order[1:] if one.acquire(blocking=False)]
        if len(held) == len(order) or left_s <= 0:
            return held
        for one in held:
            one.release()
        missing = next(one for one in order if not any(one is other for other in held))
        order.sort(key=lambda one: one is not missing)
    return []


def _unlock_in_parent() -> None:
    for one in _forking.__dict__.pop("held", ()):
        one.release()


def _reset_in_child() -> None:
    held = {id(one) for one in _forking.__dict__.pop("held", ())}
    for one in [*_alive(_guards), *_alive(_others)]:
        if id(one) in held and not isinstance(one, threading.Condition):  # reset also drops its waiters
            one.release()  # not reset: this thread may hold it more than once
        else:
            one._at_fork_reinit()
    for act in _alive(_in_child):
        act()


class ShortTurns:
    """Has Python's threads take turns of a tenth of a millisecond while a background thread learns beside calls.

    A call takes the interpreter's lock anew after each operation of torch, and waits up to a turn for it: 5 ms by
    default, some dozen times a call.
    """

    def __init__(self) -> None:
        self._lock: AbstractContextManager[Any] = forkable(threading.Lock())
        self._n_within = 0
        self._before_s = 0.0
        at_fork(self._reset)

    def __enter__(self) -> None:
        with self._lock:
            if not self._n_within:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(_TURN_S, self._before_s))
            self._n_within += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if not self._n_within:  # a forked child, see `_reset`
                return
            self._n_within -= 1
            if not self._n_within:
                sys.setswitchinterval(self._before_s)

    def _reset(self) -> None:
        """Restore in a forked child, in which no thread learns."""
        if self._n_within:
            self._n_within = 0
            sys.setswitchinterval(self._before_s)


SHORT_TURNS = ShortTurns()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock_before_fork, after_in_parent=_unlock_in_parent, after_in_child=_reset_in_child)
