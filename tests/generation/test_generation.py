"""A generation's report: tokens, log-probabilities, times, bytes of K/V, and why it ended."""

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st

from llmcache import LLMCache, RequestError
from llmcache.generation import (
    QUOTABLE,
    Latencies,
    Latency,
    Sampling,
    Spread,
    generate,
    held_nbytes,
    kv_nbytes,
    prefill,
    stream,
)
from tests.tiny_models import GENERATORS, STRANGE_GENERATORS, build, tokens

GREEDY = Sampling(max_new_tokens=10, stop_ids=())
DRAWN = replace(GREEDY, do_sample=True, temperature=5.0)
IDS = tokens(1, 8)


def wide_heads() -> tf.Qwen3ForCausalLM:
    """Heads of 24, where 32 / 4 is 8."""
    config = STRANGE_GENERATORS["qwen3"]().config.to_dict() | {"head_dim": 24}
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**config))


DECODERS = {name: GENERATORS[name] for name in ("gpt2", "llama")} | STRANGE_GENERATORS | {"wide heads": wide_heads}
for encoded in ("marian", "mbart"):
    del DECODERS[encoded]


@pytest.fixture
def gpt2() -> Any:
    return build(GENERATORS["gpt2"])


@pytest.fixture
def llama() -> Any:
    return build(GENERATORS["llama"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", DECODERS)
def test_kv_nbytes_is_what_a_cache_holds(family: str, dtype: torch.dtype) -> None:
    model = build(DECODERS[family]).to(dtype)
    _, kv_cache = prefill(model, tokens(1, 13))
    assert kv_nbytes(model.config, 13, dtype.itemsize) == held_nbytes(kv_cache) > 0


def test_kv_nbytes_in_numbers(gpt2: Any) -> None:
    """Qwen3 of 3 layers with 2 K/V heads, each 8 wide, for 4 query heads."""
    assert kv_nbytes(build(STRANGE_GENERATORS["qwen3"]).config, 10, 4) == 2 * 3 * 2 * 8 * 10 * 4
    assert kv_nbytes(gpt2.config, 10, 2) == 2 * 4 * 4 * 8 * 10 * 2


@pytest.mark.parametrize(
    ("family", "kind", "n_held"),
    [
        ("mistral", "dynamic", 12),
        ("mistral", "static", 4),  # it preallocates the whole window
        ("mistral", "sliding", 3),  # a window of 4: 3 tokens and the current one
        ("llama", "dynamic", 12),
        ("llama", "static", 12),
    ],
)
def test_a_generation_tells_its_bytes(family: str, kind: Any, n_held: int) -> None:
    """The last token is not run."""
    model = build(DECODERS[family])
    got = generate(model, IDS, replace(GREEDY, max_new_tokens=5), cache=kind)
    assert got.kv_nbytes == kv_nbytes(model.config, n_held, 4)


def test_stop_ids(gpt2: Any) -> None:
    whole = generate(gpt2, IDS, GREEDY)
    assert (len(whole.tokens), whole.stopped_by) == (10, "length")
    stop = whole.tokens[4]
    n_tokens = whole.tokens.index(stop) + 1
    cut = generate(gpt2, IDS, replace(GREEDY, stop_ids=[1, stop]))
    assert (cut.tokens, cut.stopped_by) == (whole.tokens[:n_tokens], "stop")
    for of_config, expected in ((stop, cut), ([1, stop], cut), (None, whole)):
        gpt2.generation_config.eos_token_id = of_config
        assert generate(gpt2, IDS, Sampling(max_new_tokens=10)).tokens == expected.tokens
    at_both = generate(gpt2, IDS, Sampling(max_new_tokens=n_tokens, stop_ids=[stop]))
    assert at_both.stopped_by == "stop"


@pytest.mark.parametrize(
    "asked",
    [
        GREEDY,
        replace(DRAWN, top_k=2),
        replace(DRAWN, top_p=0.1),
        replace(GREEDY, repetition_penalty=5.0),
        replace(GREEDY, presence_penalty=2.0, frequency_penalty=2.0),
    ],
)
def test_log_probabilities_are_the_models_own_however_tokens_are_chosen(llama: Any, asked: Sampling) -> None:
    got = generate(llama, IDS, replace(asked, n_logprobs=4))
    ids = torch.cat([IDS, torch.tensor([got.tokens])], dim=1)
    with torch.no_grad():
        own = llama(ids).logits[0, IDS.shape[1] - 1 : -1].log_softmax(-1)
    for row, chosen, logprob, top in zip(own, got.tokens, got.logprobs, got.top, strict=True):
        assert logprob == pytest.approx(float(row[chosen]), abs=1e-4)
        likeliest = row.topk(4)
        assert [one for one, _ in top] == likeliest.indices.tolist()
        assert [one for _, one in top] == pytest.approx(likeliest.values.tolist(), abs=1e-4)


def test_seeds(gpt2: Any) -> None:
    def draw(seed: int) -> tuple[int, ...]:
        return generate(gpt2, IDS, replace(DRAWN, seed=seed)).tokens

    state = torch.random.get_rng_state()
    assert draw(1) == draw(1) != draw(2)
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is untouched


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-0.4, 2.0), (0.0, -2.0)])
def test_presence_and_frequency_count_in_the_answer_alone(gpt2: Any, presence: float, frequency: float) -> None:
    settings = replace(GREEDY, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=1.1)
    ids, made = IDS, []
    plain = tf.LogitsProcessorList([tf.RepetitionPenaltyLogitsProcessor(1.1)])
    with torch.no_grad():
        for _ in range(settings.max_new_tokens):
            logits = plain(ids, gpt2(ids).logits[:, -1])[0]
            for one in set(made):
                logits[one] -= presence + frequency * made.count(one)
            made.append(int(logits.argmax()))
            ids = torch.cat([ids, torch.tensor([[made[-1]]])], dim=1)
    assert list(generate(gpt2, IDS, settings).tokens) == made
    assert made != list(generate(gpt2, IDS, replace(GREEDY, repetition_penalty=1.1)).tokens)


def test_the_prompt_may_change_meanwhile_and_gradients_stay_as_they_were(gpt2: Any) -> None:
    ids, settings = tokens(1, 8), replace(GREEDY, repetition_penalty=1.5)
    expected = generate(gpt2, ids, settings).tokens
    answer = stream(gpt2, ids, settings)
    first = next(answer)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    ids.fill_(7)
    assert (first.id, *(token.id for token in answer)) == expected


def test_times_of_a_stream(gpt2: Any) -> None:
    seconds = count(100)
    answer = stream(gpt2, IDS, replace(GREEDY, max_new_tokens=3), clock=lambda: next(seconds))
    assert answer.generation().times is None
    assert [token.time_s for token in answer] == [1, 2, 3]
    times = answer.generation().times
    assert times == Latency((1, 2, 3))
    assert (times.ttft_s, times.itl_s, times.e2el_s, times.tpot_s) == (1, (1, 1), 3, 1)


def test_the_latency_of_one_token() -> None:
    latency = Latency((0.25,))
    assert (latency.ttft_s, latency.itl_s, latency.e2el_s, latency.tpot_s) == (0.25, (), 0.25, None)
    with pytest.raises(RequestError, match="one token at least"):
        Latency(())


@given(st.lists(st.floats(0, 10), min_size=2, max_size=30))
def test_gaps_add_up(gaps: list[float]) -> None:
    latency = Latency(tuple(np.cumsum(gaps).tolist()))
    assert latency.ttft_s + sum(latency.itl_s) == pytest.approx(latency.e2el_s)
    assert latency.tpot_s == pytest.approx(np.mean(latency.itl_s))


def test_hits_are_summarised_apart_from_misses() -> None:
    latencies = Latencies()
    latencies.add(Latency((3.0, 4.0, 7.0)))
    latencies.add(Latency((5.0,)))
    latencies.add(Latency((1.0, 2.0)), "prefix")
    summary = latencies.summary()
    assert set(summary) == {"miss", "prefix"}
    miss = summary["miss"]
    assert miss.n_requests == 2
    assert miss.ttft == Spread(2, 4.0, 4.0, None, None)
    assert miss.itl == Spread(2, 2.0, 2.0, None, None)  # gaps of all requests
    assert miss.tpot == Spread(1, 2.0, 2.0, None, None)  # a single token has none
    assert miss.e2el == Spread(2, 6.0, 6.0, None, None)
    assert summary["prefix"].ttft.mean == 1.0


def test_percentiles_take_enough_values() -> None:
    few = Spread.of([float(i) for i in range(QUOTABLE - 1)])
    assert (few.p90, few.p99, few.median) == (None, None, 99.0)
    many = Spread.of([float(i) for i in range(QUOTABLE + 1)])
    assert (many.n, many.mean, many.median, many.p90, many.p99) == (201, 100.0, 100.0, 180.0, 198.0)
    assert Spread.of([]) is None


def test_what_served_a_request(llama: Any) -> None:
    cache = LLMCache.wrap(llama, prefix={"block": 4}, auto_bypass=False)
    latencies, ids = Latencies(), tokens(1, 20)
    longer = torch.cat([ids, tokens(1, 4, seed=1)], dim=1)
    for prompt in (ids, longer, ids):
        got = generate(llama, prompt, Sampling(max_new_tokens=3))
        latencies.add(got.times, got.rung)
    assert {rung: each.n_requests for rung, each in latencies.summary().items()} == {"miss": 1, "prefix": 1, "exact": 1}
    with cache.disabled():
        got = generate(llama, ids)
        assert (got.rung, got.outcome.bypassed) == (None, "disabled")
    cache.unwrap()
    assert generate(llama, ids).outcome is None
