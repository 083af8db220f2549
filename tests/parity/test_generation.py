"""Generation, token by token, against recomputing the whole sequence at each step and against transformers' own."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import LLMCache
from llmcache.generation import Sampling, decode_step, generate, prefill, stream
from tests.tiny_models import GENERATORS, PAD, STRANGE_GENERATORS, build, tokens

WINDOW = 4  # of the Mistral
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": GENERATORS["gpt2"],
    "llama": GENERATORS["llama"],  # 4 query heads, 2 K/V heads
    "qwen3": STRANGE_GENERATORS["qwen3"],
    "mistral": STRANGE_GENERATORS["mistral"],  # a sliding window in each layer
}
WAYS: dict[str, Sampling] = {
    "greedy": Sampling(max_new_tokens=12, stop_ids=()),
    "penalised": Sampling(max_new_tokens=12, stop_ids=(), repetition_penalty=1.7),
    "sampled": Sampling(
        do_sample=True,
        temperature=3.0,
        top_k=40,
        top_p=0.95,
        repetition_penalty=1.2,
        seed=5,
        max_new_tokens=12,
        stop_ids=(),
        n_logprobs=4,
    ),
}
# Which kinds of K/V cache a family can use, and in which of them stored prefixes are served.
KINDS = [(family, kind) for family in FAMILIES for kind in ("dynamic", "static")] + [("mistral", "sliding")]
SERVED = [pair for pair in KINDS if pair not in (("mistral", "static"), ("mistral", "sliding"))]
# Padding on the right is refused where there is a window.
PADDED = [(*pair, left) for pair in KINDS for left in (True, False) if left or pair[0] != "mistral"]


def recompute(model: Any, ids: Tensor, sampling: Sampling) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, from the whole sequence at each step, without K/V."""
    processors = tf.LogitsProcessorList([tf.RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))])
    if sampling.do_sample:
        processors += [
            tf.TemperatureLogitsWarper(sampling.temperature),
            tf.TopKLogitsWarper(sampling.top_k),
            tf.TopPLogitsWarper(sampling.top_p),
        ]
    rng, logprobs, n_prompt = torch.Generator().manual_seed(sampling.seed), [], ids.shape[1]
    for _ in range(sampling.max_new_tokens):
        with torch.no_grad():
            scores = processors(ids, model(input_ids=ids, use_cache=False).logits[:, -1].float())
        probabilities = scores.softmax(-1)
        drawn = torch.multinomial(probabilities, 1, generator=rng) if sampling.do_sample else scores.argmax(-1)[:, None]
        logprobs.append(float(probabilities[0, drawn[0, 0]].log()))
        ids = torch.cat([ids, drawn], dim=1)
    return ids[0, n_prompt:].tolist(), logprobs


def branch(ids: Tensor, n_shared: int, length: int, seed: int) -> Tensor:
    """A prompt (1, length) that begins like another one."""
    return torch.cat([ids[:, :n_shared], tokens(1, length - n_shared, seed)], dim=1)


def wrapped(model: nn.Module) -> LLMCache:
    return LLMCache.wrap(model, prefix_block=4, auto_bypass=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_tokens_are_those_of_recomputing(family: str, kind: Any, way: str) -> None:
    model = build(FAMILIES[family])
    for length in (1, WINDOW, 23):
        ids = tokens(1, length, seed=length)
        expected, logprobs = recompute(model, ids, WAYS[way])
        got = generate(model, ids, WAYS[way], cache=kind)
        assert list(got.tokens) == expected
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(logprobs), atol=1e-4, rtol=1e-4)
        assert (got.stopped_by, got.n_prompt, got.n_prefix, got.rung) == ("length", length, 0, None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "kind"), SERVED)
def test_tokens_on_a_wrapped_model(family: str, kind: Any, way: str) -> None:
    """A miss, a prefix hit, and both prompts once more."""
    model = build(FAMILIES[family])
    first = tokens(1, 23)
    second = branch(first, 18, 25, seed=1)
    expected = [recompute(model, ids, WAYS[way])[0] for ids in (first, second)]
    cache = wrapped(model)
    seen = []
    for number, ids in ((0, first), (1, second), (0, first), (1, second)):
        got = generate(model, ids, WAYS[way], cache=kind)
        assert list(got.tokens) == expected[number]
        seen.append((got.rung, got.n_prefix))
    assert seen == [(None, 0), ("prefix", 18), ("exact", 0), ("prefix", 24)]
    stats = cache.stats()
    assert (stats.hits, stats.errors) == ({"prefix": 2, "exact": 1}, 0)
    assert stats.bypassed == {"decode": 4 * (WAYS[way].max_new_tokens - 1)}


@pytest.mark.parametrize("kind", ["static", "sliding"])
def test_a_cache_that_holds_a_window_goes_by_the_prefixes(kind: Any) -> None:
    model = build(FAMILIES["mistral"])
    ids = tokens(1, 23)
    expected = recompute(model, ids, WAYS["greedy"])[0]
    cache = wrapped(model)
    generate(model, ids, WAYS["greedy"])  # stores prefix and entry
    for prompt in (ids, ids):
        got = generate(model, prompt, WAYS["greedy"], cache=kind)
        assert list(got.tokens) == expected
        assert got.rung is None
        assert got.outcome.bypassed == "kv_cache_kind"
    assert cache.stats().n_hits == cache.stats().errors == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers(family: str, way: str) -> None:
    model, ids, sampling = build(FAMILIES[family]), tokens(1, 17), WAYS[way]
    model.generation_config.eos_token_id = None
    drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    torch.manual_seed(sampling.seed)
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=sampling.do_sample,
        repetition_penalty=float(sampling.repetition_penalty),
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=PAD,
        **(drawn if sampling.do_sample else {}),
    )
    assert list(generate(model, ids, sampling).tokens) == expected[0, 17:].tolist()


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize(("family", "kind", "left"), PADDED)
def test_rows_of_a_padded_batch_are_as_alone(family: str, kind: Any, left: bool, is_wrapped: bool) -> None:
    model = build(FAMILIES[family])
    stem = tokens(1, 20)
    prompts = [branch(stem, 12, 14, seed=1), branch(stem, 10, 17, seed=2), tokens(1, 3, seed=3)]
    news = tokens(3, 5, seed=4)
    alone = []
    for prompt, new in zip(prompts, news, strict=True):
        logits, kv_cache = prefill(model, prompt, cache=kind)
        alone.append(torch.cat([logits, *(decode_step(model, one[None], kv_cache) for one in new)]))
    if is_wrapped:
        cache = wrapped(model)
        prefill(model, stem)
    ids, mask = torch.full((3, 17), PAD), torch.zeros(3, 17, dtype=torch.int64)
    for number, prompt in enumerate(prompts):
        n = prompt.shape[1]
        where = slice(17 - n, 17) if left else slice(0, n)
        ids[number, where], mask[number, where] = prompt[0], 1
    logits, kv_cache = prefill(model, ids, attention_mask=mask, cache=kind)
    steps = [logits]
    for new in news.T:
        mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
        steps.append(decode_step(model, new, kv_cache, mask))
    torch.testing.assert_close(torch.stack(steps, dim=1), torch.stack(alone), atol=1e-4, rtol=1e-4)
    if is_wrapped:
        assert cache.stats().errors == 0
        assert (cache.stats().n_prefix_tokens > 0) == ((family, kind) in SERVED and left)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_interrupted_leaves_nothing_behind(family: str) -> None:
    """At each of its tokens, by its reader or in the middle of the model."""
    model = build(FAMILIES[family])
    first = tokens(1, 23)
    second = branch(first, 18, 25, seed=1)
    expected = [recompute(model, ids, WAYS["sampled"])[0] for ids in (first, second)]
    layers = model.transformer.h if family == "gpt2" else model.model.layers
    cache = wrapped(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for n_tokens in range(4):
        for number, ids in enumerate((first, second)):
            answer = stream(model, ids, WAYS["sampled"])
            for _ in range(n_tokens):
                next(answer)
            answer.close()
            assert next(answer, None) is None
            broken = stream(model, ids, WAYS["sampled"])
            for _ in range(n_tokens):
                next(broken)
            hook = layers[1].mlp.register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(broken)
            hook.remove()
            for ended in (answer.generation(), broken.generation()):
                assert list(ended.tokens) == expected[number][:n_tokens]
                assert ended.stopped_by is None
            assert list(generate(model, ids, WAYS["sampled"]).tokens) == expected[number]
        if n_tokens % 2:
            cache.clear()
    assert cache.stats().errors == 0


def test_streams_that_take_turns_do_not_mix() -> None:
    model = build(FAMILIES["llama"])
    first = tokens(1, 23)
    prompts = [first, branch(first, 18, 25, seed=1), branch(first, 9, 12, seed=2)]
    expected = [recompute(model, ids, WAYS["sampled"])[0] for ids in prompts]
    wrapped(model)
    answers = [stream(model, ids, WAYS["sampled"]) for ids in prompts]
    together = list(zip(*answers, strict=True))
    assert [[token.id for token in one] for one in zip(*together, strict=True)] == expected
    assert [answer.generation().n_prefix for answer in answers] == [0, 18, 9]


STORIES = Path(os.environ.get("LLMCACHE_MODELS", "")) / "stories260K"


@pytest.mark.skipif(not (STORIES / "config.json").is_file(), reason="needs $LLMCACHE_MODELS/stories260K")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("way", WAYS)
def test_a_trained_model(kind: Any, way: str) -> None:
    model = tf.AutoModelForCausalLM.from_pretrained(STORIES).eval()
    stem = model.generate(
        torch.tensor([[1]]), attention_mask=torch.ones(1, 1), max_length=80, do_sample=False, pad_token_id=0
    )
    prompts = [stem, torch.cat([stem[:, :70], stem[:, 20:40]], dim=1), stem]
    expected = [recompute(model, ids, WAYS[way])[0] for ids in prompts]
    for ids, tokens_of in zip(prompts, expected, strict=True):
        assert list(generate(model, ids, WAYS[way], cache=kind).tokens) == tokens_of
    cache = LLMCache.wrap(model, auto_bypass=False)
    rungs = []
    for ids, tokens_of in zip(prompts, expected, strict=True):
        got = generate(model, ids, WAYS[way], cache=kind)
        assert list(got.tokens) == tokens_of
        rungs.append((got.rung, got.n_prefix))
    assert rungs == [(None, 0), ("prefix", 70), ("exact", 0)]
    assert cache.stats().errors == 0
