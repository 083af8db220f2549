"""Generated tokens: the next turn is served up to its new text, and nothing is kept of a K/V cache that was changed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import DynamicCache

from llmcache import LLMCache
from llmcache.generation import Sampling, stream
from llmcache.generation.batch import Batch
from tests.prefix.prompts import BLOCK, close, plainly, run, wrapped
from tests.tiny_models import CACHE, DECODER, batch, tokens

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9, "pad_token_id": 0}


def generate(model: Any, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
    found: Tensor = model.generate(**inputs, **{**GREEDY, **settings})
    return found


def asked(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("n_rows", [1, 3])
def test_a_turn_computes_its_new_tokens_alone(llama: Any, n_rows: int) -> None:
    texts = [tokens(n_rows, 6), tokens(n_rows, 5, seed=1), tokens(n_rows, 7, seed=2)]
    expected, found, ids = [], [], torch.empty(n_rows, 0, dtype=torch.int64)
    for text in texts:
        ids = generate(llama, asked(torch.cat([ids, text], dim=1)))
        expected.append(ids)
    cache, ids, served = wrapped(llama), ids[:, :0], []
    for text in texts:
        ids = generate(llama, asked(torch.cat([ids, text], dim=1)))
        found.append(ids)
        served.append({outcome.n_prefix for outcome in cache.last})
    assert all(map(torch.equal, found, expected))
    assert served == [{0}, {14}, {28}]  # all but the last token, which was not run
    assert cache.stats().errors == 0


@pytest.mark.parametrize(("window", "n_known"), [(9, 14), (4, 6)])  # a window of 4 does not hold a block of the answer
def test_a_turn_is_kept_while_windows_leave_its_beginning(window: int, n_known: int) -> None:
    model: Any = tf.MistralForCausalLM(tf.MistralConfig(**DECODER, sliding_window=window)).eval()
    whole = torch.cat([generate(model, asked(tokens(1, 6))), tokens(1, 5, seed=1)], dim=1)
    expected = generate(model, asked(whole))
    with wrapped(model) as cache:
        generate(model, asked(tokens(1, 6)))
        assert torch.equal(generate(model, asked(whole)), expected)
        assert (cache.last[0].n_prefix, cache.stats().errors) == (n_known, 0)


def test_rows_with_padding_keep_their_turns(llama: Any) -> None:
    prompts = [tokens(1, 9), tokens(1, 6, seed=1)]
    inputs = batch(prompts, left=True)
    with wrapped(llama) as cache:
        answers = generate(llama, inputs)
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = torch.cat([answer[-9 - prompt.shape[1] :], tokens(1, 3, seed=5)[0]])[None]
            expected = plainly(cache, whole).logits
            close(cache(whole).logits, expected)
            assert cache.last[0].n_prefix == prompt.shape[1] + 8


def test_a_saved_cache_has_the_turn(llama: Any, tmp_path: Path) -> None:
    with wrapped(llama) as cache:
        ids = generate(llama, asked(tokens(1, 6)))
        cache.save(tmp_path)
    with LLMCache.load(llama, tmp_path) as cache:
        cache(ids)
        assert cache.last[0].n_prefix == 14


def steps(cache: LLMCache, kv_cache: Any, *ids: Tensor, **inputs: Any) -> None:
    for step in ids:
        run(cache.model, step, past_key_values=kv_cache, **inputs)


PROMPT, ANSWER = tokens(2, 6), tokens(2, 10, seed=4)


CHANGES = ("beams", "crop", "values of a layer", "keys in place", "mask", "positions", "disabled", "weights", "hook")


@pytest.mark.parametrize("what", ["nothing", *CHANGES, "attention", "autocast", "clear", "forget"])
def test_what_is_changed_is_not_kept(llama: Any, what: str) -> None:
    cache, kv_cache = wrapped(llama), DynamicCache()
    cache(PROMPT, past_key_values=kv_cache)
    steps(cache, kv_cache, ANSWER[:, :1])
    n = kv_cache.get_seq_length()
    if what == "beams":
        kv_cache.reorder_cache(torch.tensor([1, 0]))
    elif what == "crop":
        kv_cache.crop(-1)
    elif what == "values of a layer":
        kv_cache.layers[0].values = 0.3 * kv_cache.layers[0].values
    elif what == "keys in place":
        with torch.no_grad():
            cache.model(ANSWER[:, 1:2], past_key_values=kv_cache)
        kv_cache.layers[0].keys.mul_(0.5)
    elif what == "attention":
        llama.set_attn_implementation("eager")
        steps(cache, kv_cache, ANSWER[:, 1:2])
        llama.set_attn_implementation("sdpa")
    elif what == "mask":
        mask = torch.ones(2, n + 2, dtype=torch.int64)
        mask[:, 2] = 0
        steps(cache, kv_cache, ANSWER[:, 1:2])
        steps(cache, kv_cache, ANSWER[:, 2:3], attention_mask=mask)
    elif what == "positions":
        steps(cache, kv_cache, ANSWER[:, 1:2], position_ids=torch.full((2, 1), 40))
    elif what == "disabled":
        with cache.disabled():
            steps(cache, kv_cache, ANSWER[:, 1:2])
    elif what == "weights":
        with torch.no_grad():
            llama.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    elif what == "hook":
        hook = llama.model.layers[0].register_forward_hook(lambda *_: 1.5 * _[2])
        steps(cache, kv_cache, ANSWER[:, 1:2])
        hook.remove()
    elif what == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            steps(cache, kv_cache, ANSWER[:, 1:2])
    elif what == "clear":
        cache.clear()
    elif what == "forget":
        cache.forget(input_ids=PROMPT, past_key_values=DynamicCache())
    done = kv_cache.get_seq_length() - PROMPT.shape[1]
    steps(cache, kv_cache, *ANSWER[:, done:].split(1, dim=1))
    whole = torch.cat([PROMPT, ANSWER], dim=1)
    expected = plainly(cache, whole).logits
    close(cache(whole).logits, expected)
    n_served = max(outcome.n_prefix for outcome in cache.last)
    assert n_served == 15 if what == "nothing" else n_served <= PROMPT.shape[1] + BLOCK - 1
    assert cache.stats().errors == 0


@pytest.mark.parametrize("n_before", [0, 9])
def test_a_prompt_shorter_than_a_block_is_forgotten_with_its_answer(llama: Any, n_before: int) -> None:
    cache, kv_cache, (prompt, answer) = wrapped(llama), DynamicCache(), (tokens(1, BLOCK - 1), tokens(1, 9, seed=4))
    cache(prompt, past_key_values=kv_cache)
    steps(cache, kv_cache, *answer.split(1, dim=1)[:n_before])
    assert cache.forget(input_ids=prompt, past_key_values=DynamicCache()) == 1
    steps(cache, kv_cache, *answer.split(1, dim=1)[n_before:])
    cache(torch.cat([prompt, answer], dim=1))
    assert cache.last[0].n_prefix == 0


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("what", ["beams", "crop", "another prompt"])
def test_nothing_is_kept_of_a_kv_cache_that_was_changed_after_its_last_step(
    llama: Any, what: str, is_dropped: bool
) -> None:
    cache, kv_cache = wrapped(llama), DynamicCache()
    cache(PROMPT, past_key_values=kv_cache)
    steps(cache, kv_cache, ANSWER[:, :1])
    if what == "beams":
        kv_cache.reorder_cache(torch.tensor([1, 0]))
    else:
        kv_cache.crop(-1 if what == "crop" else -7)
    if what == "another prompt":
        cache(tokens(2, 12, seed=5), past_key_values=kv_cache)
    if is_dropped:
        del kv_cache
    whole = torch.cat([PROMPT, ANSWER], dim=1)
    expected = plainly(cache, whole).logits
    close(cache(whole).logits, expected)
    assert cache.stats().errors == 0
    assert all(not one.bypassed and one.n_prefix <= PROMPT.shape[1] for one in cache.last)


def test_positions_that_the_caller_advances_in_place_are_followed(llama: Any) -> None:
    cache, kv_cache, positions = wrapped(llama), DynamicCache(), torch.tensor([[6]])
    cache(PROMPT[:1], past_key_values=kv_cache)
    for step in ANSWER[:1].split(1, dim=1):
        steps(cache, kv_cache, step, position_ids=positions)
        positions += 1
    cache(torch.cat([PROMPT[:1], ANSWER[:1]], dim=1))
    assert cache.last[0].n_prefix == 15


def test_states_that_the_caller_edits_in_place_are_kept_as_they_were(llama: Any) -> None:
    cache, kv_cache = wrapped(llama), DynamicCache()
    run(llama.model, PROMPT, **{CACHE: kv_cache})
    for step in ANSWER.split(1, dim=1):
        with torch.inference_mode():
            llama.model(step, **{CACHE: kv_cache})[0].zero_()
    whole = torch.cat([PROMPT, ANSWER], dim=1)
    with cache.disabled():
        expected = run(llama.model, whole)[0]
    close(run(llama.model, whole)[0], expected)
    assert cache.last[0].n_prefix == 15


def test_tokens_that_are_run_together_are_kept(llama: Any) -> None:
    cache, kv_cache = wrapped(llama), DynamicCache()
    cache(PROMPT, past_key_values=kv_cache)
    added = torch.cat([ANSWER, tokens(2, 9, seed=6)], dim=1)
    steps(cache, kv_cache, added)
    whole = torch.cat([PROMPT, added], dim=1)
    expected = plainly(cache, whole).logits
    close(cache(whole).logits, expected)
    assert cache.last[0].n_prefix == 24 and cache.stats().errors == 0


def test_the_last_tokens_of_an_answer_under_way_are_stored_if_a_prompt_continues_it(llama: Any) -> None:
    cache, kv_cache = wrapped(llama), DynamicCache()
    cache(PROMPT[:1], past_key_values=kv_cache)
    for number, step in enumerate(ANSWER[:1, :5].split(1, dim=1), start=1):
        steps(cache, kv_cache, step)
        cache(tokens(1, BLOCK, seed=20 + number))
        cache(PROMPT[:1])
        assert cache.stats().n_blocks == (6 + number) // BLOCK + number
    cache(torch.cat([PROMPT[:1], ANSWER[:1]], dim=1))
    assert cache.last[0].n_prefix == 11


def test_streams_that_decode_together_keep_their_turns(llama: Any) -> None:
    prompts, settings = [tokens(1, n, seed=n) for n in (5, 9, 6)], Sampling(max_new_tokens=10, stop_ids=())
    with wrapped(llama) as cache:
        batch, streams, answers = Batch(llama), [stream(llama, prompt, settings) for prompt in prompts], [[], [], []]
        for step in range(14):
            running = [
                n for n in range(3) if not streams[n].stopped_by and (n < 2 or step > 3) and (n != 1 or step < 8)
            ]
            for n, token in zip(running, batch.step([streams[n] for n in running]), strict=True):
                answers[n].append(token.id)
        batch.step([])
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = torch.cat([prompt, torch.tensor([answer]), tokens(1, 3, seed=8)], dim=1)
            expected = plainly(cache, whole).logits
            close(cache(whole).logits, expected)
            assert cache.last[0].n_prefix == prompt.shape[1] + len(answer) - 1
        assert list(map(len, answers)) == [10, 8, 10] and cache.stats().errors == 0
