"""Namespaces never meet, in whatever thread or task, and in whatever order their blocks end."""

import asyncio
import contextvars
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmcache import LLMCache
from llmcache.errors import ConfigError, NotCachedError
from tests.contract.judge import ask
from tests.tiny_models import BARE, GENERATORS, build, tokens

NAMES = ("default", "a", "b", "c", "A", "a ", "\u00e4", "a\u0308")  # told apart by their characters
#: One request per namespace, stored there only.
OF = {name: {"input_ids": tokens(1, 6, seed)} for seed, name in enumerate(NAMES, 100)}


@pytest.fixture(scope="module", params=[{}, {"tau": 0.9999}, {"tau": 0.9999, "layers": "last"}], ids=str)
def cache(request: pytest.FixtureRequest) -> Iterator[LLMCache]:
    """A cache with one request in each namespace."""
    with LLMCache.wrap(build(BARE["bert"]), auto_bypass=False, **request.param) as cache:
        for name in NAMES:
            with cache.namespace(name):
                cache(**OF[name])
        yield cache


def is_known(cache: LLMCache, inputs: dict[str, Any]) -> bool:
    """Whether the cache holds a request; computes and stores nothing."""
    try:
        with cache.only_if_cached():
            cache(**inputs)
    except NotCachedError:
        return False
    return True


def current(cache: LLMCache) -> list[str]:
    """Return the namespaces that serve a call now; there must be one."""
    return [name for name in NAMES if is_known(cache, OF[name])]


def items(cache: LLMCache, name: str) -> Iterator[list[str]]:
    with cache.namespace(name):
        yield current(cache)
        yield current(cache)


@example([("a", 0), ("b", 0), ("end", 1), ("a", 0), ("a", 0), ("end", 2)])  # nested
@example([("a", 0), ("b", 0), ("end", 0)])  # interleaved, as in generators
@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", "end"]), st.integers(0, 5)), max_size=8))
def test_blocks_may_end_in_any_order(cache: LLMCache, steps: list[tuple[str, int]]) -> None:
    """A call is in the namespace of the last opened block that is still open, or in the default one."""
    opened: list[tuple[str, AbstractContextManager[object]]] = []
    for name, which in [*steps, *[("end", 0)] * len(steps)]:
        if name != "end":
            opened.append((name, cache.namespace(name)))
            opened[-1][1].__enter__()
        elif opened:
            opened.pop(which % len(opened))[1].__exit__(None, None, None)
        assert current(cache) == [opened[-1][0] if opened else "default"]


def test_a_block_ends_with_its_generator_or_with_an_exception(cache: LLMCache) -> None:
    """Leaving a loop over a generator ends the block within it; an exception that leaves a block ends it too."""
    for found in items(cache, "a"):
        assert found == ["a"]
        break
    assert current(cache) == ["default"]
    with pytest.raises(KeyError), cache.namespace("b"):
        raise KeyError
    assert current(cache) == ["default"]


def test_a_generator_may_be_closed_elsewhere(cache: LLMCache) -> None:
    """Closing a block in another thread or context raises nothing, and keeps the namespace there."""

    def close(within: str) -> list[str]:
        with cache.namespace(within):
            left.pop().close()  # type: ignore[attr-defined]
            gc.collect()
            return current(cache)

    for run in contextvars.Context().run, lambda *of: ThreadPoolExecutor(1).submit(*of).result():
        context = contextvars.copy_context()
        left = [items(cache, "a")]
        assert context.run(next, left[0]) == ["a"]
        assert run(close, "b") == ["b"]
    assert current(cache) == ["default"]


def test_a_thread_begins_in_the_default_namespace(cache: LLMCache) -> None:
    """A thread begins in the default namespace, unless it runs in a copy of the context."""
    with ThreadPoolExecutor(1) as pool, cache.namespace("a"):
        assert pool.submit(current, cache).result() == ["default"]
        assert pool.submit(contextvars.copy_context().run, current, cache).result() == ["a"]


def test_tasks_keep_what_they_began_with(cache: LLMCache) -> None:
    """An async task keeps the namespace in which it was created, even after that block ends, and may enter its own."""

    async def task(name: str | None) -> list[list[str]]:
        found = []
        for _ in range(3):
            await asyncio.sleep(0)
            found.append(current(cache))
            if name is not None:
                with cache.namespace(name):
                    await asyncio.sleep(0)
                    found.append(current(cache))
        return found

    async def main() -> list[list[list[str]]]:
        tasks = [asyncio.create_task(task(None))]
        with cache.namespace("a"):
            tasks += [asyncio.create_task(task(None)), asyncio.create_task(task("b"))]
            with cache.namespace("b"):
                tasks.append(asyncio.create_task(task("c")))
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [
        [["default"]] * 3,
        [["a"]] * 3,
        [["a"], ["b"]] * 3,
        [["b"], ["c"]] * 3,
    ]
    assert current(cache) == ["default"]


def test_a_purge_reaches_one_namespace(cache: LLMCache) -> None:
    """Purging a namespace removes its requests, and no others; what is asked there again is stored again."""
    assert cache.purge(namespace="a") == 1
    for name in NAMES:
        with cache.namespace(name):
            assert is_known(cache, OF[name]) == (name != "a")
    with cache.namespace("a"):
        cache(**OF["a"])
        assert is_known(cache, OF["a"])


@pytest.mark.parametrize("name", [1, None, b"a", "\ud800", type("Name", (str,), {})("a")])
def test_what_is_no_name(cache: LLMCache, name: Any) -> None:
    """A namespace is a plain str of Unicode text; anything else is refused, and nothing is entered."""
    with pytest.raises(ConfigError), cache.namespace(name):
        raise AssertionError
    assert current(cache) == ["default"]


def is_computing(cache: LLMCache) -> bool:
    cache(**OF["default"])
    return cache.last[0].rung is None


def is_refusing(cache: LLMCache) -> bool:
    try:
        cache(input_ids=tokens(1, 7, 999).roll(int(torch.randint(7, ()))))
    except NotCachedError:
        return True
    return False


@pytest.mark.parametrize(("block", "holds"), [("disabled", is_computing), ("only_if_cached", is_refusing)])
def test_other_blocks_may_end_in_any_order(cache: LLMCache, block: str, holds: Any) -> None:
    """`disabled()` and `only_if_cached()` hold until their last open block ends, and no longer."""
    assert not holds(cache)
    first, second = getattr(cache, block)(), getattr(cache, block)()
    for one in (first, second):
        one.__enter__()
        assert holds(cache)
    first.__exit__(None, None, None)
    assert holds(cache)
    second.__exit__(None, None, None)
    assert not holds(cache)


def test_chunks_end_with_their_block() -> None:
    """`chunked()` calls its function within its block, not after it."""
    done: list[str] = []
    with LLMCache.wrap(build(GENERATORS["gpt2"]), auto_bypass=False) as cache:
        first, second = (cache.chunked(2, lambda name=name: done.append(name)) for name in ("first", "second"))
        first.__enter__()
        second.__enter__()
        for seed, block in enumerate((first, second)):
            block.__exit__(None, None, None)
            ask(cache.model, input_ids=tokens(1, 6, seed), use_cache=True)
    assert set(done) == {"second"}
