"""The plain model decides which arguments a call may have, on hits as on misses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers import DynamicCache

from llmcache import LLMCache
from llmcache.generation import Sampling, generate
from tests.contract.judge import ask, check_calls, check_edits, check_same, wrapped
from tests.contract.models import SIZES
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, VOCABULARY, build, llama, tokens

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def outcome_of(model: Any, inputs: dict[str, Any]) -> Any:
    """Return a model's output, or the type of its error."""
    try:
        return ask(model, **inputs)
    except Exception as error:
        return type(error)


def check_outcomes(model: Any, plain: Any, *calls: dict[str, Any], where: str = "output") -> None:
    """Check that a wrapped model raises or answers as the plain one does."""
    for number, call in enumerate(calls):
        check_same(outcome_of(model, call), outcome_of(plain, call), where=f"{where}, call {number}")


# -- prompts in chunks ----------------------------------------------------------------------------------------------

ROPE = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}
DECODERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": GENERATORS["gpt2"],
    "dynamic": lambda: tf.LlamaForCausalLM(llama(max_position_embeddings=16, rope_parameters=ROPE)),
    "eager": lambda: tf.LlamaForCausalLM(llama(attn_implementation="eager")),
}
N = 23
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "last logits": {"logits_to_keep": 1},
    "a tuple": {"return_dict": False},
    "states": {"output_hidden_states": True},
    "attentions": {"output_attentions": True},
    "labels": {"labels": tokens(1, N, 5)},
    "positions": {"position_ids": torch.arange(N)[None]},
    "positions from 3": {"position_ids": torch.arange(3, N + 3)[None]},
    "positions of two texts": {"position_ids": torch.cat([torch.arange(9), torch.arange(N - 9)])[None]},
    "a mask": {"attention_mask": torch.ones(1, N, dtype=torch.int64)},
    "no K/V": {"use_cache": False},
}


@pytest.mark.parametrize("family", DECODERS)
def test_chunks_change_nothing_but_who_has_the_model_when(family: str) -> None:
    """A call within `chunked()` returns the output of one run: served, computed or bypassed, whatever it asks for."""
    with wrapped(DECODERS[family]) as (cache, plain):
        for name, asked in ASKED.items():
            if (name == "attentions") != (family == "eager"):
                continue
            own = DynamicCache()
            expected = outcome_of(plain, {"input_ids": tokens(1, N), "past_key_values": own, **asked})
            for turn in ("disabled", "first", "second"):
                kept = DynamicCache()
                with cache.chunked(5, lambda: None), cache.disabled() if turn == "disabled" else cache.namespace(name):
                    found = outcome_of(cache.model, {"input_ids": tokens(1, N), "past_key_values": kept, **asked})
                check_same(found, expected, where=f"{name}, {turn}")
                check_same(kept, own, where=f"{name}, {turn}, K/V")


# -- dtypes -----------------------------------------------------------------------------------------------------------

MASK = torch.ones(2, 6, dtype=torch.int64)
MASK[1, 4:] = 0
#: Values that every dtype represents, except ids as bool.
GIVEN: dict[str, Tensor] = {
    "input_ids": tokens(2, 6),
    "attention_mask": MASK,
    "token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 1]] * 2),
    "position_ids": torch.tensor([[0, 1, 1, 1, 1, 1]] * 2),
}


FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "bert": (BARE["bert"], ("input_ids", "attention_mask", "token_type_ids", "position_ids")),
    "t5": (BARE["t5"], ("input_ids", "attention_mask")),
    "gpt2": (GENERATORS["gpt2"], ("input_ids", "attention_mask", "position_ids")),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_dtypes_of_arguments(family: str) -> None:
    """For every dtype the wrapped model raises or answers as the plain one does, even if the request is known."""
    make, names = FAMILIES[family]
    dtypes = (*INTEGERS, *FLOATS) if family == "bert" else (torch.bool, torch.uint8, torch.int32, torch.float32)
    usual = {name: GIVEN[name] for name in names}
    with wrapped(make) as (cache, plain):
        check_outcomes(cache.model, plain, usual, usual, {**usual, "input_ids": usual["input_ids"].bool().long()})
        for name, dtype in product(names, dtypes):
            inputs = {**usual, name: usual[name].to(dtype)}
            check_outcomes(cache.model, plain, inputs, inputs, where=f"{name} {dtype}")
        for seed, dtype in enumerate(FLOATS):  # a mask of zeros and ones may have any dtype
            mask = {"attention_mask": MASK.to(dtype)}
            assert check_calls(cache, plain, usual | mask | {"input_ids": tokens(2, 6, seed + 10)}) == 2
            mask["attention_mask"][0, 2] = 0.5
            check_outcomes(cache.model, plain, usual | mask, usual | mask, where=f"fractions of {dtype}")
        assert cache.stats().n_hits > 2 * (1 + len(names))


@pytest.fixture(scope="module")
def known() -> Iterator[tuple[nn.Module, nn.Module]]:
    """A wrapped model and a plain one, shared by all refusals."""
    model, plain = build(CLASSIFIERS["bert"]), build(CLASSIFIERS["bert"])
    with LLMCache.wrap(model, auto_bypass=False):
        yield model, plain


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_ids": torch.full((2, 6), VOCABULARY)},
        {"input_ids": torch.full((2, 6), -1)},
        {"input_ids": tokens(2, 65)},
        {"token_type_ids": torch.full((2, 6), 2)},
        {"token_type_ids": torch.full((2, 6), -1)},
        {"position_ids": torch.arange(60, 66)[None]},
        {"position_ids": torch.arange(-1, 5)[None]},
        {"attention_mask": torch.ones(2, 5, dtype=torch.int64)},
        {"attention_mask": torch.ones(3, 6, dtype=torch.int64)},
        {"token_type_ids": torch.zeros(2, 5, dtype=torch.int64)},
        {"position_ids": torch.zeros(3, 6, dtype=torch.int64)},
        {"input_ids": tokens(2, 6).tolist()},
        {"input_ids": tokens(2, 6)[0]},
        {"input_ids": tokens(2, 6)[None]},
        {"no_such_argument": 1},
    ],
    ids=lambda wrong: " ".join(f"{name} {getattr(value, 'shape', '')}" for name, value in wrong.items()),
)
def test_what_the_model_refuses_is_refused(known: tuple[nn.Module, nn.Module], wrong: dict[str, Any]) -> None:
    """The wrapped model refuses a call that the plain one refuses, even if its other arguments are known."""
    inputs = {"input_ids": tokens(2, 6), "attention_mask": MASK}
    check_outcomes(*known, inputs, inputs, {**inputs, **wrong}, {**inputs, **wrong})


# -- defaults of torch ------------------------------------------------------------------------------------------------


@contextmanager
def default(device: str | None = None, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


DEFAULTS: dict[str, dict[str, Any]] = {
    "meta": {"device": "meta"},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
}
MODELS = {"bert": CLASSIFIERS["bert"], "t5": BARE["t5"], "gpt2": BARE["gpt2"]}


@pytest.mark.parametrize(
    ("family", "name"),
    [*(("bert", name) for name in DEFAULTS), ("t5", "float64"), ("gpt2", "meta"), ("gpt2", "bfloat16")],
)
def test_defaults_of_torch(family: str, name: str) -> None:
    """A default device or dtype other than torch's own changes neither outputs nor hits."""
    calls = [{"input_ids": tokens(2, 6, seed), "attention_mask": MASK} for seed in (0, 1, 0, 0)]  # of the old default
    model, plain = build(MODELS[family]), build(MODELS[family])
    with default(**DEFAULTS[name]), LLMCache.wrap(model, auto_bypass=False) as cache:
        check_outcomes(model, plain, *calls)
        fails = isinstance(outcome_of(plain, calls[0]), type)
        assert (cache.stats().errors, cache.stats().n_hits) == (0, 0 if fails else 4)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_torch_when_prompts_are_continued(name: str) -> None:
    """K/V of a stored prefix have the model's device and dtype, whatever torch's defaults."""
    with wrapped(GENERATORS["llama"]) as (cache, plain):
        ids = tokens(1, 40)
        expected = generate(plain, ids, Sampling(max_new_tokens=3)).tokens
        with default(**DEFAULTS[name]):
            check_outcomes(cache.model, plain, *({"input_ids": part} for part in (ids[:, :20], ids, ids)))
        assert generate(cache.model, ids, Sampling(max_new_tokens=3)).tokens == expected


# -- names that look like flags ---------------------------------------------------------------------------------------

#: Models whose configs have settings `output_...` that are no flags.
NAMED_ALIKE: dict[str, Callable[[], nn.Module]] = {
    "rembert": lambda: tf.RemBertModel(tf.RemBertConfig(**SIZES, input_embedding_size=16, output_embedding_size=24)),
    "of one's own": lambda: tf.BertModel(
        tf.BertConfig(**SIZES, output_multiplier=0.5, output_gate_type="sigmoid", output_range=(0, 1))
    ),
}


@pytest.mark.parametrize("family", NAMED_ALIKE)
def test_sizes_are_no_flags(family: str) -> None:
    """A setting `output_...` that is a size or a name asks for no further output: repeats are hits."""
    with wrapped(NAMED_ALIKE[family]) as (cache, plain):
        assert check_calls(cache, plain, {"input_ids": tokens(2, 6), "attention_mask": MASK}, repeats=3) == 4


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_flags_of_the_config_are_flags(name: str) -> None:
    """A known request still returns hidden states or attentions if an argument or the config asks for them."""

    def eager() -> nn.Module:
        return tf.BertModel(tf.BertConfig(**SIZES, attn_implementation="eager"))

    edits = [lambda model, value=value: setattr(model.config, name, value) for value in (False, True)]
    calls = [{"input_ids": tokens(2, 6), **asked} for asked in ({}, {name: True}, {name: False})]
    assert check_edits(eager, edits, *calls)[0] > 0
