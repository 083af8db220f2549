"""Streams that are advanced together: each has the tokens that it has alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf

from llmcache import LLMCache, RequestError
from llmcache.generation import Batch, Generation, Sampling, Stream, generate, stream
from tests.tiny_models import GENERATORS, STRANGE_GENERATORS, VOCABULARY, build, llama, tokens

GREEDY = Sampling(max_new_tokens=8, stop_ids=(), n_logprobs=2)
DRAWN = replace(GREEDY, do_sample=True, temperature=5.0, top_k=20, repetition_penalty=1.3, frequency_penalty=0.5)
#: Prompt lengths and settings of requests, some of which stop early.
REQUESTS = (
    (9, GREEDY),
    (3, replace(DRAWN, seed=1)),
    (14, replace(GREEDY, max_new_tokens=3)),
    (3, replace(DRAWN, seed=2, max_new_tokens=5)),
    (1, replace(GREEDY, presence_penalty=2)),
)


def dynamic_rope() -> tf.LlamaForCausalLM:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 8}
    return tf.LlamaForCausalLM(llama(rope_parameters=rope))


def no_position_ids() -> tf.BloomForCausalLM:
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2))


JOINT = {name: GENERATORS[name] for name in ("gpt2", "llama")} | {"qwen3": STRANGE_GENERATORS["qwen3"]}
IN_TURN = {"dynamic RoPE": dynamic_rope, "window": STRANGE_GENERATORS["mistral"], "no position_ids": no_position_ids}
MODELS = JOINT | IN_TURN


@pytest.fixture
def gpt2() -> Any:
    return build(GENERATORS["gpt2"])


def started(model: Any) -> list[Stream]:
    return [stream(model, tokens(1, n, seed), one) for seed, (n, one) in enumerate(REQUESTS)]


def run(batch: Batch, streams: Sequence[Stream], n_at_once: int = 3) -> list[Generation]:
    """Run streams to their ends; each joins when another has left."""
    waiting, running = [*streams], list[Stream]()
    while waiting or running:
        while waiting and len(running) < n_at_once:
            running.append(waiting.pop(0))
        for token in batch.step(running):
            assert not isinstance(token, Exception), token
        running = [one for one in running if one.stopped_by is None]
    return [one.generation() for one in streams]


@pytest.mark.parametrize(
    ("family", "is_wrapped"), [*((name, False) for name in MODELS), *((name, True) for name in JOINT)]
)
def test_streams_have_the_tokens_that_they_have_alone(family: str, is_wrapped: bool) -> None:
    model = build(MODELS[family])
    alone = [generate(model, tokens(1, n, seed), one) for seed, (n, one) in enumerate(REQUESTS)]
    cache = LLMCache.wrap(model) if is_wrapped else None
    together = run(Batch(model), started(model))
    for own, joint in zip(alone, together, strict=True):
        assert (joint.tokens, joint.stopped_by, joint.kv_nbytes) == (own.tokens, own.stopped_by, own.kv_nbytes)
        assert joint.logprobs == pytest.approx(own.logprobs, abs=1e-4)
        assert [[pair[0] for pair in top] for top in joint.top] == [[pair[0] for pair in top] for top in own.top]
    if cache is not None:
        assert not cache.stats().bypassed and cache.stats().errors == 0


@pytest.mark.parametrize("family", MODELS)
def test_a_step_is_one_forward_unless_rows_cannot_differ_in_length(family: str) -> None:
    model = build(MODELS[family])
    batch, streams, calls = Batch(model), started(model), list[int]()
    batch.step(streams)
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    batch.step(streams)
    assert len(calls) == (1 if family in JOINT else len(streams))


def test_padding_takes_no_more_than_the_weights(gpt2: Any) -> None:
    calls = list[int]()
    batch, streams = Batch(gpt2), [stream(gpt2, tokens(1, n), GREEDY) for n in (1, 50, 2)]
    batch._weights_nbytes = 2 * 2 * 32 * 4 * 30  # 30 tokens of two layers, 32 wide
    batch.step(streams)
    gpt2.register_forward_pre_hook(lambda *_: calls.append(1))
    tokens_of = batch.step(streams)
    assert len(calls) == 2 and not any(isinstance(one, Exception) for one in tokens_of)


def test_an_error_of_the_model_ends_the_streams_of_its_step_and_no_later_ones(gpt2: Any) -> None:
    batch, streams = Batch(gpt2), started(gpt2)
    batch.step(streams)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = gpt2.register_forward_pre_hook(fail)
    assert [str(one) for one in batch.step(streams)] == ["out of memory"] * len(streams)
    handle.remove()
    assert all(list(one) == [] for one in streams)  # they are over
    assert [one.tokens for one in run(batch, started(gpt2))] == [one.tokens for one in run(Batch(gpt2), started(gpt2))]


def test_logits_that_are_not_finite_end_their_stream_alone(gpt2: Any) -> None:
    batch, streams = Batch(gpt2), started(gpt2)[:2]
    batch.step(streams)

    def spoil(module: Any, args: Any, output: Any) -> None:
        output.logits[0] = torch.nan

    handle = gpt2.register_forward_hook(spoil)
    first, second = batch.step(streams)
    handle.remove()
    assert isinstance(first, RequestError) and not isinstance(second, Exception)
    assert not isinstance(batch.step(streams[1:])[0], Exception)


def test_a_stream_that_is_not_passed_again_frees_its_place(gpt2: Any) -> None:
    batch, streams = Batch(gpt2), started(gpt2)[:2]
    for _ in range(2):
        batch.step(streams)
    batch.step(streams[1:])
    (group,) = batch._groups
    assert group.streams == streams[1:] and all(len(layer.keys) == 1 for layer in group._kv_cache.layers)
    batch.step([])
    assert batch._groups == [] and list(streams[1]) == []
