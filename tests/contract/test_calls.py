"""Same call, same output as the unwrapped model, at every position, whatever its arguments, mode and thread."""

import functools
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from llmcache import LLMCache
from tests.contract.judge import ask, check_calls, check_same, wrapped
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, PAD, build, tokens

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "bert": BARE["bert"],
    "classifier": CLASSIFIERS["bert"],
    "roberta": BARE["roberta"],
    "t5": BARE["t5"],
    "gpt2": GENERATORS["gpt2"],
    "llama": GENERATORS["llama"],
}
#: An encoder with a head, a bare encoder, and a decoder.
KINDS = ("classifier", "t5", "gpt2")
#: Families whose forward takes positions, token types, K/V.
POSITIONS, TYPES, KV = {"bert", "classifier", "gpt2", "llama"}, {"bert", "classifier"}, {"gpt2", "llama"}
CALLS = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@functools.cache
def pair(family: str) -> tuple[LLMCache, nn.Module]:
    """One cache per family, so that calls meet earlier entries, and a plain copy of its model."""
    return LLMCache.wrap(build(FAMILIES[family]), auto_bypass=False), build(FAMILIES[family])


# -- generated calls --------------------------------------------------------------------------------------------------


@st.composite
def calls(draw: Any, family: str) -> dict[str, Any]:
    """Draw a call's arguments from few requests, so that rows come again in other batches."""
    rows = draw(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([3, 5])), min_size=1, max_size=5))
    sides = draw(st.sampled_from(["left", "right", "both", "mixed"]))
    width = max(length for _, length in rows) + draw(st.sampled_from([0, 0, 2]))
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.int64)
    for number, (seed, length) in enumerate(rows):
        spare = width - length
        side = ("left", "right", "both")[number % 3] if sides == "mixed" else sides
        first = {"left": spare, "right": 0, "both": spare // 2}[side]
        ids[number, first : first + length] = tokens(1, length, seed)[0]
        mask[number, first : first + length] = 1
    if draw(st.integers(0, 3)) == 0:
        mask[draw(st.integers(0, len(rows) - 1)), width // 2] = 0  # a hole, or padding
    call: dict[str, Any] = {"input_ids": ids}
    if not mask.all() or draw(st.booleans()):
        call["attention_mask"] = mask.to(draw(st.sampled_from([torch.int64, torch.int64, torch.bool, torch.float32])))
    counted = (mask.cumsum(dim=1) - 1).clamp(min=0)
    if family in POSITIONS:
        made = {"none": None, "columns": torch.arange(width)[None], "counted": counted, "from 2": counted + 2}
        call["position_ids"] = made[draw(st.sampled_from(["none", *made]))]
    if family in TYPES:
        call["token_type_ids"] = draw(st.sampled_from([None, torch.zeros_like(ids), (ids % 2).clone()]))
    if family in KV:
        call["use_cache"] = draw(st.sampled_from([None, True, False]))
    call["return_dict"] = draw(st.sampled_from([None, True, False]))
    return {name: value for name, value in call.items() if value is not None}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@CALLS
@given(data=st.data())
def test_any_call(family: str, data: st.DataObject) -> None:
    """Same call, same output: batches partly known, permuted, with duplicates, padded anywhere, with holes, square."""
    cache, plain = pair(family)
    call = data.draw(calls(family))
    check_calls(cache, plain, call)


@pytest.mark.parametrize("family", ["bert", "classifier", "t5"])
def test_equal_rows_of_a_call_are_computed_once(family: str) -> None:
    """Equal rows of a call are computed once, also in the first call; the later ones count as exact hits."""
    short = {"input_ids": tokens(6, 5)[[0, 1, 0, 2, 1, 0]]}
    long = {"input_ids": tokens(6, 7, 9)[[0, 0, 0, 1]], "attention_mask": torch.ones(4, 7, dtype=torch.int64)}
    long["attention_mask"][1:3, 5:] = 0
    with wrapped(FAMILIES[family]) as (cache, plain):
        for call, rungs in (
            (short, [None, None, "exact", None, "exact", "exact"]),
            (long, [None, None, "exact", None]),
        ):
            check_calls(cache, plain, call, repeats=1)
            assert [one.rung for one in cache.last] == rungs
            assert check_calls(cache, plain, call, repeats=1) == len(rungs)
        for one in (cache.model, plain):  # an error of the model stays its own
            with pytest.raises((RuntimeError, IndexError)) if family != "t5" else nullcontext():
                ask(one, input_ids=tokens(1, 500).repeat(2, 1))
        assert cache.stats().n_misses - (family == "t5") == 6


def test_equal_rows_of_a_part_are_its_own() -> None:
    """A part of `look_up` with equal rows answers each of its rows as the model does (docs/howto.md)."""
    ids = tokens(4, 6)[[0, 1, 2, 1, 3, 2, 3]]
    with wrapped(FAMILIES["classifier"]) as (cache, plain):
        ask(cache.model, input_ids=ids[:1])
        missing = cache.look_up({"input_ids": ids}).missing
        assert missing is not None and missing.rows == (1, 2, 3, 4, 5, 6)
        check_same(ask(cache.model, **missing.inputs), ask(plain, input_ids=ids[1:]))
        assert [one.rung for one in cache.last] == [None, None, "exact", None, "exact", "exact"]
        served = cache.look_up({"input_ids": ids}).served
        assert served is not None and served.rows == tuple(range(7))
        check_same(ask(cache.model, **served.inputs), ask(plain, input_ids=ids))


@pytest.mark.parametrize("family", KINDS)
def test_arguments_by_position(family: str) -> None:
    """Arguments may be passed by position or by name."""
    cache, plain = pair(family)
    ids, mask = tokens(2, 5, 60), torch.ones(2, 5, dtype=torch.int64)
    after_ids = (None, mask) if family == "gpt2" else (mask,)
    for args, more in ((ids,), {}), ((ids, *after_ids), {}), ((ids,), {"attention_mask": mask}):
        for _ in range(2):
            check_same(ask(cache.model, *args, **more), ask(plain, *args, **more))


# -- gradients, modes, autocast ---------------------------------------------------------------------------------------


def test_gradients() -> None:
    """With gradients on nothing is served: outputs, losses and gradients are the model's own."""
    call = {"input_ids": tokens(3, 5), "labels": torch.tensor([0, 1, 2])}
    with wrapped(CLASSIFIERS["bert"]) as (cache, plain):
        both = cache.model, plain
        ask(cache.model, **call)
        for _ in range(2):
            losses = [one(**call).loss for one in both]
            for loss in losses:
                loss.backward()
            check_same(*([parameter.grad for parameter in one.parameters()] for one in both), exact=True)
        assert losses[0].item() == losses[1].item() and cache.stats().n_hits == 0
        for one in both:
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
        check_calls(cache, plain, call)


def test_answers_of_every_mode_are_of_that_mode() -> None:
    """An entry stored under `inference_mode` serves `no_grad` with normal tensors, and the other way round."""
    modes: tuple[Callable[[], AbstractContextManager[object]], ...] = (torch.inference_mode, torch.no_grad, nullcontext)
    with wrapped(BARE["bert"]) as (cache, plain):
        for seed, order in enumerate(itertools.permutations(modes)):
            for mode in (*order, *order):
                with mode():
                    found, expected = (one(input_ids=tokens(2, 5, seed)) for one in (cache.model, plain))
                    check_same(found, expected)
                    for ours, theirs in zip(found.values(), expected.values(), strict=True):
                        assert ours.is_inference() == theirs.is_inference()
                        assert ours.requires_grad == theirs.requires_grad
                if mode is torch.no_grad:
                    found.last_hidden_state.mul_(2.0)  # a normal tensor may be written, and take part in autograd
                    (found.last_hidden_state * torch.ones(1, requires_grad=True)).sum().backward()
        assert cache.stats().n_hits > 0


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, {}) for family in ("bert", "classifier", "gpt2")),
        *(("classifier", {"tau": 0.9999, "layers": layers}) for layers in ("all", "last", [1])),
    ],
    ids=str,
)
def test_autocast(family: str, settings: dict[str, Any]) -> None:
    """Entries computed under autocast serve calls under the same autocast only."""
    contexts = {
        "off": nullcontext,
        "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
        "float16": lambda: torch.autocast("cpu", torch.float16),
        "not enabled": lambda: torch.autocast("cpu", torch.bfloat16, enabled=False),
    }
    with wrapped(FAMILIES[family], **settings) as (cache, plain):
        for name in (*contexts, *contexts, *reversed(contexts)):
            with contexts[name]():
                check_calls(cache, plain, {"input_ids": tokens(2, 5)}, exact=not settings, repeats=1)
        assert cache.stats().n_hits >= 2 * 2 * len(contexts)


# -- owners and threads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings"), [*((family, {}) for family in KINDS), ("gpt2", {"tau": 0.9999, "allow_unsafe": True})]
)
def test_what_was_handed_out_may_be_changed(family: str, settings: dict[str, Any]) -> None:
    """Outputs, K/V and inputs belong to the caller: writes to them change no later answer."""
    with wrapped(FAMILIES[family], **settings) as (cache, plain):
        expected = [ask(plain, input_ids=tokens(2, 5, seed)) for seed in (0, 1)]
        for seed in (0, 1) * 3:
            ids = tokens(2, 5, seed)
            found = ask(cache.model, input_ids=ids)
            check_same(found, expected[seed])
            ids.fill_(7)
            with torch.inference_mode():
                for value in found.values():
                    kv = () if isinstance(value, Tensor) else value.layers
                    for tensor in [one for layer in kv for one in (layer.keys, layer.values)] or [value]:
                        tensor.fill_(float("nan"))
        assert cache.stats().n_hits == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [("bert", {}), ("gpt2", {}), *(("bert", {"tau": 0.9999, "layers": layers}) for layers in ("all", "last"))],
    ids=str,
)
def test_threads(family: str, settings: dict[str, Any]) -> None:
    """Threads that share a wrapped model each get their own answers and outcomes."""
    rng = torch.Generator().manual_seed(0)
    ids = tokens(4, 5)
    batches = [torch.randint(4, (1 + n % 3,), generator=rng).tolist() for n in range(15)]
    start = threading.Barrier(4, timeout=60)
    with wrapped(FAMILIES[family], **settings) as (cache, plain):
        expected = [ask(plain, input_ids=ids[rows]) for rows in batches]

        def work(first: int) -> None:
            start.wait()
            for n in range(len(batches)):
                number = (first * 4 + n) % len(batches)
                found = ask(cache.model, input_ids=ids[batches[number]])
                assert len(cache.last) == len(batches[number])  # this thread's own
                check_same(found, expected[number], where=f"batch {number}")

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == [None] * 4
        assert cache.stats().n_hits > 0 and cache.stats().n_requests == 4 * sum(map(len, batches))
