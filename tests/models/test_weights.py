"""The digest covers tensors and settings wherever they are, and follows their edits; a cache asks for it rarely."""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from llmcache import LLMCache
from llmcache.errors import BankFileError, StoreError
from llmcache.models import hashing, weights
from llmcache.models.weights import Weights
from tests.calls.helpers import X, wrapped
from tests.contract.judge import ask, check_same
from tests.contract.judge import plain_answer as plain
from tests.tiny_models import BARE, CLASSIFIERS, STRANGE_GENERATORS, build, tokens


class Holder(nn.Module):
    """Keeps tensors wherever modules may keep them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3))
        self.aside = [nn.Linear(2, 2)]
        self.weight.quant_state = SimpleNamespace(code=torch.randn(3))  # as bitsandbytes does
        self.register_buffer("whole", torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8))
        self.nested = {"a": [1, 2]}
        self.table = np.arange(3)


def wrapping(seed: int = 0) -> nn.Linear:
    """A module whose weight wraps two tensors, as torchao's quantised weights do."""
    torch.manual_seed(seed)
    module = nn.Linear(3, 3, bias=False)
    module.weight = nn.Parameter(TwoTensor(torch.randn(3, 3), torch.randn(3, 3)))
    return module


def quantised(seed: int = 0) -> nn.Module:
    """Linear layers that keep int8 weights in packed parameters."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, dtype=torch.qint8)


class RootNorm(nn.LayerNorm):
    """Another class with the same tensors."""


KEEPERS: dict[str, Callable[..., Any]] = {
    "holder": Holder,
    "subclass": wrapping,
    "packed": quantised,
    "norm": lambda seed=0: nn.LayerNorm(seed + 2),
    "llama": lambda seed=0: build(BARE["llama"], seed),
}
EDITS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "in a module in a list": ("holder", lambda m: m.aside[0].weight.add_(1)),
    "on a parameter": ("holder", lambda m: m.weight.quant_state.code.add_(1)),
    "scale of a quantised tensor": (
        "holder",
        lambda m: setattr(m, "whole", torch.quantize_per_tensor(m.whole.dequantize() * 2, 0.2, 0, torch.quint8)),
    ),
    "an empty holder": ("holder", lambda m: m.aside[0].register_buffer("more", torch.ones(1))),
    "elements within elements": ("holder", lambda m: m.nested["a"].append(3)),
    "an array": ("holder", lambda m: setattr(m, "table", np.zeros(3))),
    "a tensor that wraps others": ("subclass", lambda m: m.weight.add_(1)),
    "a wrapped tensor": ("subclass", lambda m: m.weight.b.add_(1)),
    "packed weights": ("packed", lambda m: m[0].set_weight_bias(quantised(1)[0].weight(), m[0].bias())),
    "a packed bias": ("packed", lambda m: m[0].bias().add_(1.0)),
    "class": ("norm", lambda m: setattr(m, "__class__", RootNorm)),
    "a new attribute": ("norm", lambda m: setattr(m, "note", True)),
    "a buffer that is not saved": ("llama", lambda m: m.rotary_emb.inv_freq.view(-1)[3:4].fill_(9.0)),
    "an edit in inference mode": ("llama", torch.inference_mode()(lambda m: m.rotary_emb.inv_freq.mul_(2.0))),
}


@pytest.mark.parametrize("kind", KEEPERS)
def test_equal_modules_have_equal_digests(kind: str) -> None:
    make = KEEPERS[kind]
    assert Weights(make()).digest() == Weights(make()).digest() != Weights(make(1)).digest()
    assert Weights(make()).refusal is None


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_seen_by_an_old_and_a_new_watcher(name: str) -> None:
    kind, edit = EDITS[name]
    module = KEEPERS[kind]()
    weights = Weights(whole := nn.Sequential(module))
    before = weights.digest()
    with torch.no_grad():
        edit(module)
    assert before != weights.digest() == Weights(whole).digest()


UNREADABLE: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: torch.jit.script(nn.Linear(2, 2)),
    "sparse": lambda: nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse())]),
    "lazy": lambda: nn.LazyLinear(2),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_is_refused(kind: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), UNREADABLE[kind]())
    weights = Weights(module)
    digest = weights.digest()
    assert weights.refusal == weights.unreadable == "unseen_weights"
    assert weights.digest() == digest != Weights(module).digest()
    module[1] = nn.Linear(2, 2)
    weights.digest()
    assert weights.refusal is None


def test_settings_that_decide_no_state_do_not_count() -> None:
    model = build(BARE["bert"])
    weights = Weights(model)
    before = weights.digest()
    for name, value in (("use_cache", False), ("return_dict", False), ("problem_type", "regression")):
        setattr(model.config, name, value)
        assert weights.digest() == before


@pytest.mark.parametrize("family", ["bert", "deberta", "gpt2", "t5"])
def test_a_model_that_was_saved_has_the_same_digest(family: str, tmp_path: Path) -> None:
    model: Any = build(BARE[family])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert Weights(model).digest() == Weights(again).digest()


def test_an_edit_that_is_taken_back_is_seen_of_a_tensor_and_where_another_call_saw_it() -> None:
    norm = nn.BatchNorm1d(2).eval()
    weights = Weights(nn.Sequential(norm))
    digest, eps = weights.digest(), norm.eps

    def edit_and_restore() -> None:
        before = norm.running_mean.clone()
        norm.running_mean.mul_(3).add_(1)
        norm.running_mean.copy_(before)

    def edit_beside_another_call() -> None:
        norm.eps = 0.5
        weights.digest()
        norm.eps = eps

    for act in edit_and_restore, edit_beside_another_call:
        mark = weights.snapshot_of(digest)
        act()
        assert not weights.stayed(mark, digest)
        assert weights.digest() == digest


def test_what_is_replaced_is_seen_even_where_memory_is_used_again() -> None:
    for _ in range(50):
        model = nn.Module()
        model.query = nn.Linear(32, 32)
        weights = Weights(model)
        before = weights.digest()
        for _ in range(2):  # the second may reuse the first one's memory
            model.query.weight.data = model.query.weight.data * 1.1
        assert weights.digest() != before
        before = weights.digest()
        model.query = None
        model.query = nn.Linear(32, 32)  # may reuse the old one's id
        assert weights.digest() != before


def test_of_what_makes_answers_tensors_classes_and_functions_count_and_no_numbers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    weights = Weights(model, without=model[0], has_values=False)
    digests = [weights.digest()]
    model[1].n_calls = 1
    assert weights.digest() == digests[0]
    for name, value in (("act", nn.functional.relu), ("weight", nn.Parameter(torch.zeros(2, 2)))):
        setattr(model[1], name, value)
        digests.append(weights.digest())
    assert len(set(digests)) == 3


# -- in a cache --------------------------------------------------------------------------------------------------------


def check(cache: LLMCache, n_hits: int, **inputs: Any) -> None:
    """Assert that two calls answer as the model does now, with this number of hits."""
    inputs = inputs or X
    expected, before = plain(cache, **inputs), cache.stats().n_hits
    for _ in range(2):
        check_same(cache(**inputs), expected)
    assert cache.stats().n_hits - before == n_hits


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of tensors hashed at a time."""
    counts: list[int] = []

    def counted(tensors: list[Tensor]) -> list[str]:
        counts.append(len(tensors))
        return hashing.digests(tensors)

    monkeypatch.setattr(weights, "digests", counted)
    return counts


def test_what_takes_turns_finds_its_own_entries_at_no_cost(hashed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = wrapped(BARE["bert"])
    norm = cache.model.encoder.layer[0].output.LayerNorm
    for norm.eps in (1e-12, 0.5):
        check(cache, n_hits=2)
    hashed.clear()
    monkeypatch.setattr(cache._core.wrapped.weights, "_survey", lambda: pytest.fail("what was seen before is known"))
    for norm.eps in (1e-12, 0.5, 1e-12, 0.5):
        check(cache, n_hits=4)
    assert not hashed


@pytest.mark.parametrize("family", ["bert", "gpt2", "marian"])
def test_calls_in_a_row_look_at_nothing_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = X | ({"decoder_input_ids": tokens(2, 3)} if family == "marian" else {})
    cache = wrapped((CLASSIFIERS | STRANGE_GENERATORS)[family])
    cache(**inputs)  # the first call sees what wrapping changed
    monkeypatch.setattr(cache._core.wrapped.weights, "_refresh", lambda: pytest.fail("nothing was edited"))
    for _ in range(2):
        cache(**inputs)
    assert "weights_changed" not in cache.stats().bypassed and cache.stats().errors == 0


def test_weights_that_cannot_be_read_are_computed_and_never_saved(tmp_path: Path) -> None:
    with wrapped(BARE["bert"]) as cache:
        cache(**X)
        cache.save(tmp_path)
    model = build(BARE["bert"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.encoder.layer[1].output.dense = torch.jit.script(model.encoder.layer[1].output.dense)
    with pytest.raises(BankFileError, match="scripted"):
        LLMCache.load(model, tmp_path)
    cache = LLMCache.wrap(model)
    check(cache, n_hits=0)
    stats = cache.stats()
    assert (stats.bypassed["unseen_weights"], stats.n_stored, stats.errors) == (4, 0, 0)
    with pytest.raises(StoreError, match="scripted"):
        cache.save(tmp_path)


def test_offloaded_weights_are_computed_and_counted() -> None:
    cache = wrapped(BARE["bert"])
    cache(**X)
    expected = plain(cache, **X)
    cpu_offload(cache.model, execution_device=torch.device("cpu"))
    check_same(cache(**X), expected, exact=True)
    stats = cache.stats()
    assert (stats.bypassed["meta_weights"], stats.errors, stats.n_hits) == (2, 0, 0)


def steady() -> LLMCache:
    """A cache of 70 requests whose weights have been steady for so long that calls are opened without a check."""
    cache = wrapped(BARE["bert"])
    for seed in range(70):
        cache(input_ids=tokens(1, 5, seed))
    assert cache._core.wrapped.weights.is_steady and cache.stats().n_stored == 70
    return cache


def test_what_was_stored_without_a_look_serves_no_other_weights() -> None:
    cache = steady()
    with torch.no_grad():
        cache.model.encoder.layer[0].output.dense.weight.mul_(1.5)
    for seed in (69, 3):
        check(cache, n_hits=1, input_ids=tokens(1, 5, seed))
    assert cache.stats().errors == 0


def test_a_save_holds_nothing_that_was_stored_under_other_weights(tmp_path: Path) -> None:
    cache = steady()
    with torch.no_grad():
        cache.model.embeddings.word_embeddings.weight.mul_(1.5)
    cache.save(tmp_path)
    other = build(BARE["bert"])
    other.load_state_dict(cache.model.state_dict())
    assert LLMCache.load(other, tmp_path).stats().n_stored == 0


def train_a_step(model: nn.Module) -> torch.optim.Optimizer:
    """Run a forward and a backward with gradients; the caller makes the step, which leaves no trace."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, fused=True)
    model(**X).logits.sum().backward()
    return optimizer


@pytest.mark.parametrize("most_bytes", [weights.MAX_HELD_BYTES, 1000])
def test_what_holds_gradients_is_hashed_in_each_call_or_the_call_is_computed(
    most_bytes: int, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_HELD_BYTES", most_bytes)
    cache = wrapped(CLASSIFIERS["bert"])
    cache(**X)
    optimizer = train_a_step(cache.model)
    n_trained = sum(parameter.grad is not None for parameter in cache.model.bert.parameters())
    hashed.clear()
    for _ in range(2):
        optimizer.step()
        check_same(ask(cache.model, **X), plain(cache, **X))
    n_computed = cache.stats().bypassed.get("gradients_held", 0)
    assert (set(hashed), n_computed) == ((set(), 4) if most_bytes == 1000 else ({n_trained}, 0))
    optimizer.step()
    optimizer.zero_grad()
    check(cache, n_hits=2)
    hashed.clear()
    check(cache, n_hits=4)
    assert not hashed


def test_hashing_by_several_threads_gives_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((n,), float(n)) for n in range(1, 40)]
    alone = hashing.digests(tensors)
    monkeypatch.setattr(hashing, "_MANY_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert hashing.digests(tensors) == alone
    assert len(set(alone)) == 39
