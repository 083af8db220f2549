"""Many threads and async tasks on one wrapped model."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as tf

from tests.calls.helpers import X, assert_close, pair, run, wrapped
from tests.contract.judge import ask
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, padded, tokens

N_THREADS = 8


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """Run `work` on each thread's number, all starting at once; return the results."""
    barrier = threading.Barrier(N_THREADS)

    def begin(seed: int) -> Any:
        barrier.wait()
        return work(seed)

    with ThreadPoolExecutor(N_THREADS) as pool:
        return list(pool.map(begin, range(N_THREADS)))


@pytest.mark.slow
def test_eight_threads_get_the_plain_answers_while_entries_leave() -> None:
    cache, alone = pair(BARE["bert"], max_entries=5)
    rows = padded([3, 4, 5, 6, 7, 8, 5, 6, 3, 8, 4, 7], seed=11)
    valid, expected = rows["attention_mask"].bool(), run(alone, **rows)

    def work(seed: int) -> int:
        chance = random.Random(seed)
        n = 0
        for _ in range(12):
            picked = chance.sample(range(12), chance.choice([1, 2, 3, 5]))
            output = cache(**{name: value[picked] for name, value in rows.items()}).last_hidden_state
            found, wanted = output[valid[picked]], expected[picked][valid[picked]]
            assert_close(found, wanted)
            n += len(picked)
        return n

    n_rows = sum(in_threads(work))
    stats = cache.stats()
    assert stats.n_requests == n_rows == stats.n_hits + stats.n_misses
    assert stats.n_hits > 0
    assert (stats.errors, stats.bypassed) == (0, {})
    assert stats.n_stored <= 5 and all(n <= 5 for n in stats.n_entries.values())


def test_weights_that_change_while_threads_run_are_followed() -> None:
    cache = wrapped(CLASSIFIERS["bert"])
    for _ in range(3):
        with torch.no_grad():
            cache.model.bert.encoder.layer[0].output.dense.weight.mul_(1.1)
        with cache.disabled():
            expected = cache(**X).logits
        for answer in in_threads(lambda _: cache(**X).logits):
            assert_close(answer, expected)


@pytest.mark.parametrize(
    ("kind", "n_known"), [("dynamic", 0), ("dynamic", 4), ("dynamic", 6), ("static", 4), ("none", 6)]
)
def test_a_call_during_which_the_cache_is_taken_off_ends_right(kind: str, n_known: int) -> None:
    """The call keeps the hits found before `unwrap`, and a decode step continues its K/V."""
    cache, alone = pair(GENERATORS["llama"], prefix={"block": 2})
    ids, step = tokens(2, 6), tokens(2, 1, seed=5)
    if n_known:
        cache(ids[:, :n_known])
    make = {"dynamic": tf.DynamicCache, "static": lambda: tf.StaticCache(config=alone.config, max_cache_len=10)}

    def take_off(*_: Any) -> None:
        cache.unwrap()  # the second time it does nothing

    cache.model.lm_head.register_forward_pre_hook(take_off)
    output = ask(cache.model, input_ids=ids, past_key_values=make.get(kind, lambda: None)())
    first, kv_cache = output.logits, output.past_key_values
    assert int(kv_cache.get_seq_length()) == 6
    after = run(cache.model, input_ids=step, past_key_values=kv_cache)
    whole = run(alone, input_ids=torch.cat([ids, step], dim=1))
    assert_close(first, whole[:, :6])
    assert_close(after[:, -1], whole[:, -1])
