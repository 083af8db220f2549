"""Threads of our own that compute beside calls of the model, and what a fork does to them and to their locks.

A forked process has one thread. A lock that another thread held stays locked there for ever, and connections and pipes
are shared with the parent. So before a fork the forking thread takes the locks that guard data, which is then whole in
the child as well; in the child locks are made anew, and whoever has threads, pipes or connections begins without.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_PATIENCE_S = 1.0  # for locks before a fork

_guards: dict[int, weakref.ref[Any]] = {}  # locks that a fork waits for, by identity
_others: dict[int, weakref.ref[Any]] = {}
_before: dict[tuple[int, str], weakref.WeakMethod[Any]] = {}
_in_child: dict[tuple[int, str], weakref.WeakMethod[Any]] = {}
_forking = threading.local()


def compute_alone() -> None:
    """Let this thread compute by itself, with one thread of torch's."""
    n_threads = torch.get_num_threads()
    if n_threads == 1:
        return
    torch.set_num_threads(1)  # also of threads that begin to compute later, unless another one puts it back at once
    others = threading.Thread(target=torch.set_num_threads, args=(n_threads,), name="llmcache-threads")
    with suppress(RuntimeError):  # the interpreter ends, and begins no thread any more
        others.start()
        others.join()


def forkable(lock: _T, is_waited_for: bool = True) -> _T:
    """Return a lock, condition or event, which is free in forked processes.

    Args:
        lock: Made just now.
        is_waited_for: A fork waits until it is free, for a second at most. For locks that are held for moments only.
    """
    _keep(_guards if is_waited_for and hasattr(lock, "acquire") else _others, lock, weakref.ref)
    return lock


def at_fork(in_child: Callable[[], object], before: Callable[[], object] | None = None) -> None:
    """Have bound methods called at each fork, as long as their objects live; they must not take a lock.

    Args:
        in_child: In the forked process, in which no other thread runs.
        before: In the process that forks, while no thread holds a lock that a fork waits for. It is left out where one
            was held for too long.
    """
    _keep(_in_child, in_child, weakref.WeakMethod)
    if before is not None:
        _keep(_before, before, weakref.WeakMethod)


def _keep(kept: dict[Any, Any], one: Any, refer: Callable[..., Any]) -> None:
    key = (id(one.__self__), one.__name__) if refer is weakref.WeakMethod else id(one)
    kept[key] = refer(one, lambda _: kept.pop(key, None))


def _alive(kept: dict[Any, Any]) -> list[Any]:
    return [one for refer in list(kept.values()) if (one := refer()) is not None]


def _prepare() -> None:
    guards = _alive(_guards)
    _forking.held = _take(guards, monotonic() + _PATIENCE_S)
    if len(_forking.held) == len(guards):
        for act in _alive(_before):
            act()


def _take(locks: Sequence[Any], until: float) -> list[Any]:
    """Take all locks, or those that are free at a time (of `monotonic`).

    It waits for one while it holds none, so that nobody who holds one and waits for another waits for this thread.
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


def _go_on() -> None:
    for one in _forking.__dict__.pop("held", ()):
        one.release()


def _begin_anew() -> None:
    held = {id(one) for one in _forking.__dict__.pop("held", ())}
    for one in [*_alive(_guards), *_alive(_others)]:
        if id(one) in held and not isinstance(one, threading.Condition):  # of which other threads wait as well
            one.release()  # this thread may hold it beside
        else:
            one._at_fork_reinit()
    for act in _alive(_in_child):
        act()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_prepare, after_in_parent=_go_on, after_in_child=_begin_anew)
