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


@pytest.mark.parametrize("family", DECODERS)
def test_kv_nbytes_is_what_a_cache_holds(family: str) -> None:
    model = build(DECODERS[family]).bfloat16()
    _, kv_cache = prefill(model, tokens(1, 13))
    assert kv_nbytes(model.config, 13, 2) == held_nbytes(kv_cache) > 0


@pytest.mark.parametrize(
    ("family", "kind", "n_held"),
    [
        ("mistral", "dynamic", 12),
        ("mistral", "static", 4),  # it preallocates the whole window
        ("mistral", "sliding", 3),  # a window of 4: 3 tokens and the current one
        ("llama", "static", 12),
    ],
)
def test_a_generation_tells_its_bytes(family: str, kind: Any, n_held: int) -> None:
    """The last token is not run."""
    model = build(DECODERS[family])
    got = generate(model, IDS, replace(GREEDY, max_new_tokens=5), cache=kind)
    assert got.kv_nbytes == kv_nbytes(model.config, n_held, 4)


def test_it_stops_at_an_end_of_text_of_its_own_or_of_the_config(gpt2: Any) -> None:
    whole = generate(gpt2, IDS, GREEDY)
    stop = whole.tokens[4]
    cut = whole.tokens[: whole.tokens.index(stop) + 1]
    assert generate(gpt2, IDS, Sampling(max_new_tokens=len(cut), stop_ids=[1, stop])).stopped_by == "stop"  # not length
    for of_config, expected in ((stop, cut), ([1, stop], cut), (None, whole.tokens)):
        gpt2.generation_config.eos_token_id = of_config
        assert generate(gpt2, IDS, Sampling(max_new_tokens=10)).tokens == expected


@pytest.mark.parametrize(
    "asked",
    [
        GREEDY,
        replace(DRAWN, top_k=2, top_p=0.5),
        replace(GREEDY, repetition_penalty=5.0, presence_penalty=2.0),
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


def test_a_prompt_is_scored_by_the_models_own_logits_also_after_its_beginning_was_served(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcache.generation.sampling._N_SCORED", 16)
    ids, asked = tokens(1, 50), Sampling(max_new_tokens=2, n_prompt_logprobs=4)
    with torch.no_grad():
        own = llama(ids).logits[0, :-1].log_softmax(-1)
    expected = generate(llama, ids, replace(asked, n_prompt_logprobs=None))
    with LLMCache.wrap(llama) as cache:
        cache(ids[:, :40])
        answer = stream(llama, ids, asked)
        assert answer.prompt == () and tuple(one.id for one in answer) == expected.tokens
        assert answer.outcome is not None and answer.outcome.n_prefix >= 32
    assert [one.id for one in answer.prompt] == ids[0, 1:].tolist()
    for row, token in zip(own, answer.prompt, strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        assert [one for _, one in token.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (-0.4, 2.0)])
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


def test_the_prompt_may_change_meanwhile_and_random_numbers_and_gradients_stay_as_they_were(gpt2: Any) -> None:
    state = torch.random.get_rng_state()
    assert generate(gpt2, IDS, replace(DRAWN, seed=1)).tokens != generate(gpt2, IDS, replace(DRAWN, seed=2)).tokens
    assert torch.equal(torch.random.get_rng_state(), state)
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
    assert answer.generation().times == Latency((1, 2, 3))


@given(st.lists(st.floats(0, 10), min_size=1, max_size=30))
def test_gaps_add_up(gaps: list[float]) -> None:
    latency = Latency(tuple(np.cumsum(gaps).tolist()))
    assert latency.ttft_s == gaps[0]
    assert latency.ttft_s + sum(latency.itl_s) == pytest.approx(latency.e2el_s)
    assert latency.tpot_s == (pytest.approx(np.mean(gaps[1:])) if gaps[1:] else None)


def test_hits_are_summarised_apart_from_misses() -> None:
    latencies = Latencies()
    for times, rung in (((3.0, 4.0, 7.0), None), ((5.0,), None), ((1.0, 2.0), "prefix")):
        latencies.add(Latency(times), rung)
    summary = latencies.summary()
    assert set(summary) == {"miss", "prefix"} and summary["prefix"].ttft.mean == 1.0
    miss = summary["miss"]
    assert (miss.n_requests, miss.ttft) == (2, Spread(2, 4.0, 4.0, None, None))
    assert miss.itl == Spread(2, 2.0, 2.0, None, None)  # gaps of all requests
    assert miss.tpot == Spread(1, 2.0, 2.0, None, None)  # a single token has none
    assert miss.e2el == Spread(2, 6.0, 6.0, None, None)
    with pytest.raises(RequestError, match="one token at least"):
        Latency(())


def test_percentiles_take_enough_values() -> None:
    few = Spread.of([float(i) for i in range(QUOTABLE - 1)])
    assert (few.p90, few.p99, few.median) == (None, None, 99.0)
    many = Spread.of([float(i) for i in range(QUOTABLE + 1)])
    assert (many.n, many.mean, many.median, many.p90, many.p99) == (201, 100.0, 100.0, 180.0, 198.0)
    assert Spread.of([]) is None
