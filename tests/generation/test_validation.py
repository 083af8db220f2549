"""Bad generation requests are refused before anything is computed; errors name the value and the cure."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from llmcache import ConfigError, LLMCache, RequestError, UnsupportedModelError
from llmcache.generation import Sampling, decode_step, generate, prefill, stream
from tests.tiny_models import (
    BARE,
    CACHE,
    CLASSIFIERS,
    GENERATORS,
    STRANGE_GENERATORS,
    TOKEN_HEADS,
    VOCABULARY,
    build,
    tokens,
)

CONTEXT = 64  # of the tiny models
IDS = tokens(1, 8)


@pytest.fixture
def model() -> nn.Module:
    """A model that fails the test if it runs."""
    model = build(GENERATORS["gpt2"])
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    return model


@pytest.fixture
def llama() -> Any:
    return build(GENERATORS["llama"])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"temperature": math.nan, "do_sample": True}, "temperature=nan: give a number over 0"),
        ({"temperature": 0.0, "do_sample": True}, "leave do_sample out"),
        ({"temperature": "1", "do_sample": True}, "temperature='1'"),
        ({"temperature": math.inf, "do_sample": True}, "temperature=inf"),
        ({"top_k": 0, "do_sample": True}, "top_k=0: give a whole number"),
        ({"top_k": True, "do_sample": True}, "top_k=True"),
        ({"repetition_penalty": math.nan}, "repetition_penalty=nan"),
        ({"top_p": 0.0, "do_sample": True}, "top_p=0.0: give a share"),
        ({"top_p": 1.1, "do_sample": True}, "top_p=1.1"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5: give a number from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3: give a number from -2 to 2"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: give a whole number of tokens, 1 or more"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"seed": -1}, "seed=-1"),
        ({"n_logprobs": -1}, "n_logprobs=-1"),
        ({"stop_ids": 2}, "stop_ids=2: give a sequence"),
        ({"stop_ids": "2"}, "stop_ids='2'"),
        ({"do_sample": 1}, "do_sample=1: give True or False"),
        ({"temperature": 0.5}, "temperature=0.5 has no effect on greedy tokens: set do_sample=True"),
        ({"top_k": 5}, "top_k=5 has no effect"),
    ],
)
def test_settings(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Sampling(**settings)


Call = Callable[[Any], object]


def masked(mask: Any) -> Call:
    return lambda model: prefill(model, tokens(2, 8), attention_mask=mask)


def writing(n_tokens: int = 8, **more: Any) -> Call:
    return lambda model: generate(model, tokens(1, n_tokens), Sampling(**more))


#: What is asked, and what is told.
REFUSED: list[tuple[Call, str]] = [
    (lambda m: prefill(m, IDS[:, :0]), r"the prompt is empty \(shape \(1, 0\)\): give at least one token.*\(1\)"),
    (lambda m: stream(m, IDS[:, :0]), "the prompt is empty"),
    (lambda m: prefill(m, IDS[0]), r"ids: the shape is \(8,\); give \(1, T\)"),
    (lambda m: prefill(m, IDS.float()), r"int64 \(got torch.float32\)"),
    (lambda m: prefill(m, [[5, 6]]), r"int64 \(got list\)"),
    (lambda m: prefill(m, torch.tensor([[5, VOCABULARY]])), "ids: 96 is not in the vocabulary, 0 to 95"),
    (lambda m: prefill(m, torch.tensor([[5, -1]])), "ids: -1 is not in the vocabulary"),
    (lambda m: prefill(m, tokens(1, CONTEXT + 1)), "65 tokens exceed the model's context of 64: keep the prompt's end"),
    (lambda m: prefill(m, IDS, cache="paged"), "cache: unknown kind 'paged'; known: dynamic, static, sliding"),
    (
        lambda m: generate(m, IDS, cache="sliding"),
        r"no layer of this \w+ model has a sliding window .*take cache='dynamic' or 'static'",
    ),
    (lambda m: prefill(m, IDS, max_length=10), "max_length=10 is for cache='static'"),
    (lambda m: generate(m, IDS, cache="static", max_length=0), "max_length=0: give the tokens"),
    (lambda m: generate(m, IDS, cache="static", max_length=9.0), "max_length=9.0"),
    (writing(60, max_new_tokens=5), r"60 tokens and max_new_tokens=5 exceed .* 64: 4 new ones fit"),
    (
        lambda m: prefill(m, IDS, cache="static", max_length=7),
        r"room for 7 tokens and holds 0, so 8 more .* max_length=8 or more",
    ),
    (
        lambda m: stream(m, IDS, Sampling(max_new_tokens=4), cache="static", max_length=10),
        "max_length=11 or more",  # the last of 4 is not run
    ),
    (lambda m: generate(m, tokens(2, 8)), "2 rows; one request at a time"),
    (writing(stop_ids=[3, 96]), "stop_ids: 96 is not in the vocabulary"),
    (writing(n_logprobs=97), "n_logprobs=97: the vocabulary has 96"),
    (lambda m: generate(m.train(), IDS), r"training mode: call model.eval\(\)"),
    (masked(torch.ones(2, 7)), r"the shape of ids, \(2, 8\) \(got \(2, 7\)\)"),
    (masked(torch.full((2, 8), 2)), "1 for tokens and 0 for padding"),
    (masked([[1] * 8] * 2), "got list"),
    (masked(torch.tensor([[1] * 8, [0] * 8])), "nothing but padding"),
]


@pytest.mark.parametrize(("ask", "told"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused_before_the_model_runs(model: nn.Module, ask: Call, told: str) -> None:
    with pytest.raises((RequestError, ConfigError), match=told):
        ask(model)
    assert issubclass(RequestError, ValueError)


def test_what_a_window_does_not_take() -> None:
    """The model masks columns, not tokens. A static cache would roll before the window of 4 is full."""
    windowed = build(STRANGE_GENERATORS["mistral"])
    for row in ([1] * 7 + [0], [1, 0] + [1] * 6):
        with pytest.raises(RequestError, match="pad on the left"):
            prefill(windowed, tokens(2, 8), attention_mask=torch.tensor([[1] * 8, row]))
    _, kv_cache = prefill(windowed, IDS[:, :3], cache="static", max_length=3)
    with pytest.raises(RequestError, match="room for 3 tokens and holds 3"):
        decode_step(windowed, IDS[0, :1], kv_cache)
    _, kv_cache = prefill(windowed, IDS[:, :3], cache="static", max_length=4)
    for new in IDS[0]:
        decode_step(windowed, new[None], kv_cache)


def test_steps(llama: Any) -> None:
    _, kv_cache = prefill(llama, tokens(2, CONTEXT - 1))
    step, mask = tokens(2, 1)[:, 0], torch.ones(2, CONTEXT, dtype=torch.int64)

    def refused(told: str, last: Tensor, mask: Tensor | None = None, kv: Any = kv_cache) -> None:
        with pytest.raises(RequestError, match=told):
            decode_step(llama, last, kv, mask)

    refused("last: 96 is not in the vocabulary", torch.tensor([5, 96]))
    refused(r"last: the shape is \(2, 1\); give \(B,\)", step[:, None])
    refused("last: 1 tokens for a K/V cache of 2 rows", step[:1])
    refused(r"the shape is \(2, 63\); give \(2, 64\)", step, mask[:, 1:])
    refused("its last column stands for `last`", step, mask.index_fill(1, torch.tensor([CONTEXT - 1]), 0))
    refused(r"run the prompt with prefill\(\) first", step, kv=DynamicCache())
    refused(r"run the prompt with prefill\(\) first", step, kv=StaticCache(config=llama.config, max_cache_len=8))
    assert int(kv_cache.get_seq_length()) == CONTEXT - 1
    decode_step(llama, step, kv_cache, mask)
    refused("65 tokens exceed the model's context of 64", step)
    padded = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    _, kv_cache = prefill(llama, tokens(2, 4), attention_mask=padded)
    refused(r"the prompts had padding.* give \(2, 5\)", step, kv=kv_cache)
    decode_step(llama, step, kv_cache, torch.cat([padded, torch.ones_like(padded[:, :1])], dim=1))
    _, kv_cache = prefill(llama, tokens(2, 4), attention_mask=torch.ones_like(padded))
    decode_step(llama, step, kv_cache)


@pytest.mark.parametrize(
    "make",
    [BARE["llama"], CLASSIFIERS["gpt2"], TOKEN_HEADS["span"], GENERATORS["t5"], lambda: nn.Linear(2, 2)],
    ids=["trunk", "classifier", "span", "seq2seq", "no transformer"],
)
def test_models_that_generate_nothing(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(UnsupportedModelError, match="give a causal language model"):
        prefill(build(make), IDS)


def test_a_cache_and_a_model_that_keeps_its_kv_to_itself(llama: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"LLMCache cannot .*cache\.model"), LLMCache.wrap(llama) as cache:
        generate(cache, IDS)
    forward = llama.forward
    llama.forward = lambda **inputs: forward(**{name: one for name, one in inputs.items() if name != CACHE})
    with pytest.raises(UnsupportedModelError, match="put K/V of 0 tokens into its cache, for a prompt of 8"):
        prefill(llama, IDS)


@pytest.mark.parametrize(("do_sample", "broken"), [(True, math.inf), (False, math.nan)])
def test_logits_that_are_not_finite(broken: float, do_sample: bool) -> None:
    model: Any = build(GENERATORS["gpt2"])
    answer = stream(model, IDS, Sampling(do_sample=do_sample, stop_ids=()))
    next(answer)
    model.lm_head.weight.data[7, 0] = broken
    with pytest.raises(RequestError, match="not finite"):
        next(answer)
