"""Prompts run in chunks: outputs, lookups, entries and counts equal those of one run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from llmcache import LLMCache
from llmcache.calls.tree import _STEP
from llmcache.errors import ConfigError
from tests.prefix.prompts import CACHES, branch, close, run, wrapped
from tests.tiny_models import tokens

LONG = tokens(1, 23)
LONGER = branch(LONG, 21, 30)
SIZE = 5


def asked(cache: LLMCache, ids: Tensor, between: Callable[[], Any], kv_cache: Any = None, **more: Any) -> Any:
    """Run a prompt in chunks; return its last logits and its K/V cache."""
    with cache.chunked(SIZE, between):
        output = cache(ids, past_key_values=kv_cache, logits_to_keep=1, **more)
    return output.logits, output.past_key_values


@pytest.mark.parametrize("kind", CACHES)
def test_all_is_as_in_one_run(llama: Any, kind: str) -> None:
    plain = {ids: run(llama, ids).logits[:, -1:] for ids in (LONG, LONGER)}
    with wrapped(llama, LONG, LONG, LONGER) as whole:
        expected = whole.stats()
    cache = wrapped(llama)
    turns: list[int] = []
    for number, ids in enumerate((LONG, LONG, LONGER)):
        logits, kept = asked(cache, ids, partial(turns.append, number), kv_cache=CACHES[kind](llama.config))
        close(logits, plain[ids])
        assert kept.get_seq_length() == ids.shape[1]
    assert turns == [0, 0, 0, 0, 2]  # the repeat is known, and of the last one 9 tokens were left
    stats = cache.stats()
    for name in ("hits", "n_misses", "n_prefix_tokens", "n_prompt_tokens", "n_blocks", "n_stored", "prefix_nbytes"):
        assert getattr(stats, name) == getattr(expected, name), name
    assert stats.hits == {"exact": 1, "prefix": 1} and stats.errors == 0


def test_what_rows_share_is_run_in_chunks(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_STEP, "cpu", 8)
    ids, turns = torch.cat([LONG.expand(3, -1), tokens(3, 3, seed=9)], 1), []
    plain = run(llama, ids).logits[:, -1:]
    cache = wrapped(llama)
    close(asked(cache, ids, partial(turns.append, 0))[0], plain)
    assert len(turns) == 4 and cache.stats().errors == 0

    def stop() -> None:
        raise TimeoutError

    cache.clear()
    with pytest.raises(TimeoutError):
        asked(cache, ids, stop)
    assert cache.stats().n_blocks == 0


def test_what_cannot_be_cut_is_run_at_once(llama: Any) -> None:
    cache = wrapped(llama)

    def never() -> None:
        raise AssertionError

    asked(cache, LONG, never, attention_mask=torch.ones_like(LONG).index_fill(1, torch.tensor([0]), 0))
    asked(cache, LONG[:, :SIZE], never)
    asked(cache, LONG, never, use_cache=False)
    asked(cache, LONG, never, output_hidden_states=True)
    with cache.disabled():
        asked(cache, LONG, never)
    with pytest.raises(ConfigError, match="n_tokens=0"), cache.chunked(0, never):
        pass


@pytest.mark.parametrize("known", [0, 9])
def test_what_others_fail_with_ends_the_call_and_leaves_nothing(llama: Any, known: int) -> None:
    cache = wrapped(llama, *([LONG[:, :known]] if known else []))
    before, kv_cache = cache.stats(), DynamicCache()

    def leave() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        asked(cache, LONG, leave, kv_cache=kv_cache)
    assert kv_cache.get_seq_length() == 0
    after = cache.stats()
    assert (after.n_stored, after.n_blocks, after.errors) == (before.n_stored, before.n_blocks, 0)
    close(asked(cache, LONG, lambda: None, kv_cache=kv_cache)[0], run(llama, LONG).logits[:, -1:])


def test_others_calls_between_two_chunks_are_calls_of_their_own(llama: Any) -> None:
    other = branch(LONG, 3, 12, 7)
    plain = [run(llama, ids).logits for ids in (LONG, other)]
    cache, seen = wrapped(llama), []

    def answer() -> None:
        with cache.namespace("other"):
            close(cache(other).logits, plain[1])
        seen.append(cache.last[0].rung)

    close(asked(cache, LONG, answer)[0], plain[0][:, -1:])
    assert seen == [None, "exact", "exact", "exact"] and cache.last[0].rung is None
    assert cache.stats().n_stored == 2 and cache.stats().errors == 0
