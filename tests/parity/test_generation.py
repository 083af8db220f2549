"""Generation, token by token, against transformers' own that recomputes the whole sequence at each step."""

from collections.abc import Callable
from functools import cache as once
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from llmcache.generation import Sampling, decode_step, generate, prefill, stream
from tests.reuse.prompts import FAMILIES, STORIES, branch, needs_stories, wrapped
from tests.tiny_models import PAD, STRANGE_GENERATORS, batch, build, tokens

WINDOW = 4  # of the Mistral
DECODERS: dict[str, Callable[[], nn.Module]] = {
    **FAMILIES,
    "mistral": STRANGE_GENERATORS["mistral"],  # a sliding window in each layer
}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "stop_ids": ()}
DRAWN = {"do_sample": True, "temperature": 3.0, "top_k": 40, "top_p": 0.95, "seed": 5}
WAYS = {
    "greedy": Sampling(**GREEDY),
    "penalised": Sampling(**GREEDY, repetition_penalty=1.7),
    "sampled": Sampling(**GREEDY, **DRAWN, repetition_penalty=1.2, n_logprobs=4),
}
# Which kinds of K/V cache a family can use, and in which of them stored prefixes are served.
KINDS = [(family, kind) for family in DECODERS for kind in ("dynamic", "static")] + [("mistral", "sliding")]
SERVED = [pair for pair in KINDS if pair not in (("mistral", "static"), ("mistral", "sliding"))]
TRAINED = [pytest.param("trained", kind, marks=needs_stories) for kind in ("dynamic", "static")]
STEM = tokens(1, 20)
PROMPTS = [branch(STEM, 12, 14, seed=1), branch(STEM, 10, 17, seed=2), tokens(1, 3, seed=3)]
NEW = tokens(3, 5, seed=4)
# Padding on the right is refused where there is a window.
PADDED = [(*pair, left) for pair in KINDS for left in (True, False) if left or pair[0] != "mistral"]

in_each_way = pytest.mark.parametrize("way", WAYS)


def decoder(family: str) -> Any:
    return trained() if family == "trained" else build(DECODERS[family])


def trained() -> Any:
    return tf.AutoModelForCausalLM.from_pretrained(STORIES).eval()


@once
def story() -> Tensor:
    ids: Tensor = trained().generate(
        torch.ones(1, 1, dtype=torch.int64), max_length=80, do_sample=False, pad_token_id=0
    )
    return ids


def recompute(model: Any, ids: Tensor, sampling: Sampling) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities as transformers makes them from the whole sequence at each step, without K/V."""
    model.generation_config.eos_token_id = None
    torch.manual_seed(sampling.seed)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        use_cache=False,
        repetition_penalty=float(sampling.repetition_penalty),
        max_new_tokens=sampling.max_new_tokens,
        pad_token_id=PAD,
        output_logits=True,
        return_dict_in_generate=True,
        **({name: DRAWN[name] for name in DRAWN if name != "seed"} if sampling.do_sample else {"do_sample": False}),
    )
    new = made.sequences[0, ids.shape[1] :]
    logprobs = torch.cat(made.logits).log_softmax(-1).gather(1, new[:, None])
    return new.tolist(), logprobs[:, 0].tolist()


@once
def recomputed(family: str, way: str, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """The same, once for all kinds of K/V cache."""
    return recompute(decoder(family), torch.tensor([prompt]), WAYS[way])


@pytest.mark.slow
@in_each_way
@pytest.mark.parametrize(("family", "kind"), [*KINDS, *TRAINED])
def test_tokens_are_those_of_recomputing(family: str, kind: Any, way: str) -> None:
    model = decoder(family)
    for length in (1, WINDOW, 23):
        ids = story()[:, :length] if family == "trained" else tokens(1, length, seed=length)
        expected, logprobs = recomputed(family, way, tuple(ids[0].tolist()))
        got = generate(model, ids, WAYS[way], cache=kind)
        assert list(got.tokens) == expected
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(logprobs), atol=1e-4, rtol=1e-4)
        assert (got.stopped_by, got.n_prompt, got.n_prefix, got.rung) == ("length", length, 0, None)


@pytest.mark.slow
@in_each_way
@pytest.mark.parametrize(("family", "kind"), [*SERVED, *TRAINED])
def test_tokens_on_a_wrapped_model(family: str, kind: Any, way: str) -> None:
    """A miss, a prefix hit, and both prompts once more."""
    model = decoder(family)
    first = story() if family == "trained" else tokens(1, 23)
    n_shared = first.shape[1] - 5
    second = torch.cat([first[:, :n_shared], first[:, 3:10]], dim=1)
    expected = [recomputed(family, way, tuple(ids[0].tolist()))[0] for ids in (first, second)]
    cache = wrapped(model)
    seen = []
    for number, ids in ((0, first), (1, second), (0, first), (1, second)):
        got = generate(model, ids, WAYS[way], cache=kind)
        assert list(got.tokens) == expected[number]
        seen.append((got.rung, got.n_prefix))
    assert seen == [(None, 0), ("prefix", n_shared), ("exact", 0), ("prefix", second.shape[1] // 4 * 4)]
    stats = cache.stats()
    assert (stats.hits, stats.errors) == ({"prefix": 2, "exact": 1}, 0)
    assert stats.bypassed == {"decode": 4 * (WAYS[way].max_new_tokens - 1)}


@pytest.mark.parametrize("kind", ["static", "sliding"])
def test_a_cache_that_holds_a_window_goes_by_the_prefixes(kind: Any) -> None:
    model, ids = decoder("mistral"), tokens(1, 23)
    expected = recompute(model, ids, WAYS["greedy"])[0]
    cache = wrapped(model)
    generate(model, ids, WAYS["greedy"])  # stores prefix and entry
    for _ in range(2):
        got = generate(model, ids, WAYS["greedy"], cache=kind)
        assert (list(got.tokens), got.rung, got.outcome.bypassed) == (expected, None, "kv_cache_kind")
    assert cache.stats().n_hits == cache.stats().errors == 0


@once
def prompts_alone(family: str, kind: Any) -> Tensor:
    """Logits after each prompt and after each of its new tokens, (3, 6, V), by a model that is not wrapped."""
    model = decoder(family)
    logits = []
    for prompt, new in zip(PROMPTS, NEW, strict=True):
        first, kv_cache = prefill(model, prompt, cache=kind)
        logits.append(torch.cat([first, *(decode_step(model, one[None], kv_cache) for one in new)]))
    return torch.stack(logits)


@pytest.mark.slow
@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize(("family", "kind", "left"), PADDED)
def test_rows_of_a_padded_batch_are_as_alone(family: str, kind: Any, left: bool, is_wrapped: bool) -> None:
    model, alone = decoder(family), prompts_alone(family, kind)
    cache = wrapped(model) if is_wrapped else None
    prefill(model, STEM)
    ids, mask = batch(PROMPTS, left).values()
    logits, kv_cache = prefill(model, ids, attention_mask=mask, cache=kind)
    steps = [logits]
    for new in NEW.T:
        mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
        steps.append(decode_step(model, new, kv_cache, mask))
    torch.testing.assert_close(torch.stack(steps, dim=1), alone, atol=1e-4, rtol=1e-4)
    if cache is not None:
        assert cache.stats().errors == 0
        assert (cache.stats().n_prefix_tokens > 0) == ((family, kind) in SERVED and left)


@pytest.mark.slow
@pytest.mark.parametrize("family", DECODERS)
def test_what_was_interrupted_leaves_nothing_behind(family: str) -> None:
    """At each of its tokens, by its reader or in the middle of the model."""
    model, first, way = decoder(family), tokens(1, 23), WAYS["sampled"]
    prompts = [first, branch(first, 18, 25)]
    expected = [recompute(model, ids, way)[0] for ids in prompts]
    layers = model.transformer.h if family == "gpt2" else model.model.layers
    cache = wrapped(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for n_tokens in range(4):
        for ids, whole in zip(prompts, expected, strict=True):
            answer = stream(model, ids, way)
            assert [next(answer).id for _ in range(n_tokens)] == whole[:n_tokens]
            answer.close()
            assert next(answer, None) is None
            broken = stream(model, ids, way)
            assert [next(broken).id for _ in range(n_tokens)] == whole[:n_tokens]
            hook = layers[1].mlp.register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(broken)
            hook.remove()
            for ended in (answer.generation(), broken.generation()):
                assert (list(ended.tokens), ended.stopped_by) == (whole[:n_tokens], None)
            assert list(generate(model, ids, way).tokens) == whole
        if n_tokens % 2:
            cache.clear()
    assert cache.stats().errors == 0


def test_streams_that_take_turns_do_not_mix() -> None:
    model, first, way = decoder("llama"), tokens(1, 23), WAYS["sampled"]
    prompts = [first, branch(first, 18, 25), branch(first, 9, 12, seed=2)]
    expected = [recompute(model, ids, way)[0] for ids in prompts]
    wrapped(model)
    answers = [stream(model, ids, way) for ids in prompts]
    together = list(zip(*answers, strict=True))
    assert [[token.id for token in one] for one in zip(*together, strict=True)] == expected
    assert [answer.generation().n_prefix for answer in answers] == [0, 18, 9]
