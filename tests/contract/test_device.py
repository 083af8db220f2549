"""The same answers on a device, in each dtype. `LLMCACHE_TEST_DEVICE` names it, as PyTorch does; else it is the CPU."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from tests.contract.judge import ask, check_calls, check_edits, check_same, uncomputed, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, batch, padded, tokens

DEVICE = os.environ.get("LLMCACHE_TEST_DEVICE", "cpu")
MODELS = {"bert": BARE["bert"], "classifier": CLASSIFIERS["bert"], "gpt2": GENERATORS["gpt2"]}
DECODERS = ("gpt2", "llama")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_decoder = pytest.mark.parametrize("decoder", DECODERS)
each_place = pytest.mark.parametrize("place", ["cpu", "model"])


def on_device(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> Callable[[], nn.Module]:
    return lambda: make().to(DEVICE, dtype)


def moved(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def decoding(decoder: str, dtype: torch.dtype, place: str = "cpu") -> AbstractContextManager[tuple[LLMCache, Any]]:
    """Within: a decoder's cache with small blocks, kept on `place`, and the plain decoder."""
    return wrapped(on_device(GENERATORS[decoder], dtype), device=place, prefix={"block": 4})


@each_place
@each_dtype
@pytest.mark.parametrize("model", MODELS)
def test_a_repeat_is_the_stored_run_bit_for_bit(model: str, dtype: torch.dtype, place: str) -> None:
    call = moved(padded([9, 5, 7]))
    with wrapped(on_device(MODELS[model], dtype), device=place) as (cache, plain):
        check_calls(cache, plain, call, repeats=1)
        stored = ask(cache.model, **call)
        check_same(ask(cache.model, **call), stored, exact=True)
        assert [outcome.rung for outcome in cache.last] == ["exact"] * 3


@each_place
@each_dtype
@each_decoder
def test_a_known_beginning_is_served(decoder: str, dtype: torch.dtype, place: str) -> None:
    known = tokens(1, 20).to(DEVICE)
    longer = torch.cat([known, tokens(1, 6, seed=1).to(DEVICE)], dim=1)
    with decoding(decoder, dtype, place) as (cache, plain):
        assert check_calls(cache, plain, {"input_ids": known}, {"input_ids": longer}, repeats=1) == 1
        assert cache.last[0].n_prefix == 20


@each_dtype
@each_decoder
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_a_batch_is_a_tree(decoder: str, dtype: torch.dtype, left: bool) -> None:
    stem = tokens(1, 16)
    rows = [torch.cat([stem, tokens(1, n, seed=n)], dim=1) for n in (3, 5, 8)]
    call = moved(batch(rows, left))
    if left:
        call["position_ids"] = (call["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with decoding(decoder, dtype) as (cache, plain):
        check_same(ask(cache.model, **call), ask(plain, **call), padding=uncomputed(plain, call))
        assert sum(outcome.n_prefix for outcome in cache.last) == 2 * 16


@each_dtype
@each_decoder
def test_a_turn_is_kept(decoder: str, dtype: torch.dtype) -> None:
    first, more = tokens(1, 9).to(DEVICE), tokens(1, 5, seed=1).to(DEVICE)
    with decoding(decoder, dtype) as (cache, plain), torch.inference_mode():
        answer = cache.model.generate(
            first, attention_mask=torch.ones_like(first), do_sample=False, min_new_tokens=6, max_new_tokens=6
        )
        turn = {"input_ids": torch.cat([answer, more], dim=1)}
        check_same(ask(cache.model, **turn), ask(plain, **turn))
        assert cache.last[0].n_prefix == 14  # all but the last token, which was not run


@each_dtype
@pytest.mark.parametrize("model", MODELS)
def test_edited_weights_serve_nothing_of_before(model: str, dtype: torch.dtype) -> None:
    def scale(by: float, changed: Any) -> None:
        for weight in changed.parameters():
            weight.mul_(by)

    def load(changed: Any) -> None:
        changed.load_state_dict({name: value * 0.5 for name, value in changed.state_dict().items()})

    hits = check_edits(on_device(MODELS[model], dtype), [partial(scale, 1.5), load], moved(padded([9, 5])))
    assert hits == [2, 2, 2]
