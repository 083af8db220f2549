"""Layers with a bank, in every family: layers skipped, states stored, and the K/V of skipped layers."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache, UnsupportedModelError
from llmcache.models.weights import Weights
from tests.contract.test_copies import sentences
from tests.paper.reference import LAYERS, assert_close, run, served, wrapped
from tests.tiny_models import (
    BARE,
    CLASSIFIERS,
    GENERATORS,
    STRANGE_GENERATORS,
    STRANGERS,
    TOKEN_HEADS,
    build,
    padded,
    states,
    tokens,
)

SEEN = padded([6, 6, 6])
MIXED = {name: torch.cat([SEEN[name], fresh]) for name, fresh in padded([6, 6], seed=40).items()}
STRANGE = ("convbert", "modernbert", "qwen3")
EVERY: dict[str, Any] = {
    **BARE,
    **{name: STRANGERS[name] for name in STRANGE},
    **{f"{name} classifier": make for name, make in CLASSIFIERS.items()},
}
NEAR: dict[str, Any] = {"tau": 0.9999, "allow_unsafe": True}
#: A family of each kind: the inputs and outputs of layers decide which of them can be skipped.
OF_EACH_KIND = ("bert", "gpt2", "t5", "modernbert", "bart classifier")


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        *((family, "all") for family in EVERY),
        *((family, layers) for family in OF_EACH_KIND for layers in ("last", [1], [0, 2])),
    ],
    ids=str,
)
def test_every_family_is_served_whole_calls_and_parts_of_batches(family: str, layers: Any) -> None:
    cache, alone = LLMCache.wrap(build(EVERY[family]), layers=layers, **NEAR), build(EVERY[family])
    seen, mixed = (dict(inputs) for inputs in (SEEN, MIXED))
    if family in ("t5 classifier", "bart classifier"):  # they read the end-of-text token's state
        end = alone.config.eos_token_id
        for inputs in (seen, mixed):
            inputs["input_ids"] = inputs["input_ids"].clone()
            inputs["input_ids"][:, -1] = end
    keeps_no_kv = {"use_cache": False} if cache.payload != "sequence" and family != "t5" else {}
    for inputs, hits in ((seen, 0), (seen, 3), (mixed, 3), (mixed, 5)):
        found, expected = states(cache(**inputs)), run(alone, **inputs, **(keeps_no_kv if "gpt2" in family else {}))
        assert_close(found, expected, inputs["attention_mask"])
        assert served(cache) == [True] * hits + [False] * (len(found) - hits)
    stats = cache.stats()
    n_layers = 3 if family in STRANGE else 4
    n_skipped = {"all": len(stats.n_entries), "last": n_layers, "[1]": 2, "[0, 2]": 3}[str(layers)]
    assert stats.n_layers_skipped == n_skipped * 11
    assert (stats.errors, stats.bypassed, stats.n_misses) == (0, {}, 5)


@pytest.mark.parametrize(("family", "reason"), [("megatron", "unknown_output"), ("squeezebert", "unknown_layout")])
def test_layers_that_nobody_knows_how_to_skip_are_computed(family: str, reason: str) -> None:
    cache, alone = wrapped(STRANGERS[family], **NEAR), build(STRANGERS[family])
    for n in (1, 2):
        assert torch.equal(states(cache(**SEEN)), run(alone, **SEEN))
        assert (cache.stats().bypassed, cache.stats().n_stored) == ({reason: 3 * n}, 0)


@pytest.mark.parametrize("layer", [0, 2, -1])
def test_a_hit_resumes_after_its_layer(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[nn.Module] = []
    kind = type(build(BARE["bert"]).encoder.layer[0])
    forward = kind.forward

    @functools.wraps(forward)
    def note(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ran.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", note)
    cache = wrapped("bert", tau=-1.0, layers=[layer], payload="sequence")
    one, two = tokens(1, 6, seed=1), tokens(1, 6, seed=2)
    earlier = cache(input_ids=one).logits
    ran.clear()
    assert_close(cache(input_ids=two).logits, earlier)
    assert ran == list(cache.model.bert.encoder.layer)[layer % 4 + 1 :]
    assert cache.stats().hits_by_layer == {layer % 4: 1}


def test_of_several_banks_the_deepest_that_hits_serves() -> None:
    cache = wrapped("bert", tau={0: -1.0, 3: 0.9999}, layers=[0, 3], payload="sequence")
    one, two = tokens(1, 6, seed=1), tokens(1, 6, seed=2)
    for ids, layers in ((one, {}), (two, {0: 1}), (two, {0: 1, 3: 1})):  # computed above a served layer 0, and stored
        cache(input_ids=ids)
        assert cache.stats().hits_by_layer == layers


@pytest.mark.parametrize(
    ("family", "payload"),
    [
        *(("bert", payload) for payload in ("cls", "last", "mean", "sequence")),
        *(("gpt2", "last"), ("llama", "mean"), ("t5", "cls"), ("t5", "sequence")),
    ],
)
def test_what_an_entry_keeps_fits_any_length_if_it_is_one_vector(family: str, payload: str) -> None:
    cache = wrapped(BARE[family], tau=-1.0, layers="last", payload=payload)
    first, other = padded([6, 6]), padded([5, 3], seed=9)
    kept = states(cache(**first))
    found = states(cache(**other))
    if payload == "sequence":
        assert served(cache) == [False, False]
        return
    assert served(cache) == [True, True]
    read = {
        "cls": lambda x, mask: x[:, 0],
        "last": lambda x, mask: x[torch.arange(2), mask.sum(1) - 1],
        "mean": lambda x, mask: (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),
    }[payload]
    sources = [[one.key for one in served_by(cache, first)].index(one.source) for one in served_by(cache, other)]
    assert_close(read(found, other["attention_mask"]), read(kept, first["attention_mask"])[sources])
    assert cache.stats().nbytes == 2 * 32 * 4


def served_by(cache: LLMCache, inputs: dict[str, Tensor]) -> Any:
    cache(**inputs)
    return cache.last


def shared(family: str) -> Any:
    """Return a function that makes models which run two layers in turn: 0, 1, 0, 1."""

    def make() -> nn.Module:
        model = BARE[family]()
        layers: Any = model.get_submodule(LAYERS[family])
        layers[2], layers[3] = layers[0], layers[1]
        return model

    return make


@pytest.mark.parametrize("layers", ["all", "last", [2]], ids=str)
def test_a_layer_that_is_run_several_times(layers: Any) -> None:
    cache, alone = wrapped(shared("bert"), layers=layers, **NEAR), build(shared("bert"))
    for inputs, hits in ((SEEN, 0), (MIXED, 3), (MIXED, 5)):
        assert_close(states(cache(**inputs)), run(alone, **inputs))
        assert sum(served(cache)) == hits
    with pytest.raises(UnsupportedModelError, match="run at several places"):
        LLMCache.wrap(build(shared("gpt2")), **NEAR)


# -- K/V ---------------------------------------------------------------------------------------------------------------

KV = {"gpt2": GENERATORS["gpt2"], "llama": GENERATORS["llama"]}


@pytest.mark.parametrize(("layers", "left"), [("all", False), ("all", True), ("last", False), ([1], True)], ids=str)
@pytest.mark.parametrize("family", KV)
def test_kv_of_skipped_layers_is_that_of_the_request_that_was_stored(family: str, layers: Any, left: bool) -> None:
    cache, alone = wrapped(KV[family], layers=layers, **NEAR), build(KV[family])
    inputs = padded([6, 4], left=left)
    more = {name: torch.cat([inputs[name], fresh]) for name, fresh in padded([6, 6], seed=50).items()}
    valid = more["attention_mask"].bool()
    for asked, hits in ((inputs, 0), (more, 2), (more, 4)):
        with torch.inference_mode():
            expected = alone(**asked, use_cache=True)
        output = cache(**asked, use_cache=True)
        assert sum(served(cache)) == hits
        assert_close(output.logits, expected.logits, asked["attention_mask"])
        for ours, theirs in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
            assert ours.get_seq_length() == theirs.get_seq_length() == 6
            for name in ("keys", "values"):
                pair = [getattr(one, name).transpose(1, 2)[valid[: len(asked["input_ids"])]] for one in (ours, theirs)]
                assert_close(*pair)
    assert cache.stats().errors == 0


@pytest.mark.parametrize("cached", [None, "static"])
def test_generation_goes_on_from_served_states(cached: str | None) -> None:
    cache, alone = wrapped(GENERATORS["llama"], **NEAR), build(GENERATORS["llama"])
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": cached}
    inputs = padded([6, 4], left=True)
    expected = alone.generate(**inputs, **settings)
    for _ in range(2):
        assert torch.equal(cache.model.generate(**inputs, **settings), expected)
    stats = cache.stats()
    assert stats.hits == ({"paper": 2} if cached is None else stats.hits) and stats.errors == 0
    assert (stats.n_decode_steps, "decode" in stats.bypassed) == (2 * 2 * 5, False)


def test_requests_with_kv_and_without_are_kept_apart_and_other_kinds_of_kv_bypass() -> None:
    cache = wrapped(STRANGE_GENERATORS["mistral"], **NEAR)
    cache(**SEEN, use_cache=True)
    assert cache.stats().bypassed == {"kv_cache_kind": 3}  # a sliding window
    cache = wrapped(TOKEN_HEADS["causal"], **NEAR)
    for use_cache, hits in ((False, 0), (True, 0), (True, 3), (False, 0)):
        cache(**SEEN, use_cache=use_cache)
        assert sum(served(cache)) == hits


def test_a_classifiers_entries_hold_no_kv() -> None:
    cache = wrapped("gpt2", layers="last", **NEAR)
    for _ in range(2):
        assert cache(**SEEN).past_key_values is None
    assert served(cache) == [True] * 3
    cache(**SEEN, use_cache=True)
    assert cache.stats().bypassed == {"kv_cache_with_pooled_payload": 3}


def test_sentence_embeddings_are_pooled_from_one_vector() -> None:
    model, texts = sentences(), ["w1 w2 w3", "w4 w5", "w6 w7 w8 w9"]
    expected, states = model.encode(texts), model.encode(texts, output_value="token_embeddings")
    with LLMCache.wrap(model, tau=0.9999, layers="last") as cache:
        for _ in range(2):
            assert torch.allclose(torch.tensor(model.encode(texts)), torch.tensor(expected), atol=1e-5)
        assert cache.payload == "mean" and cache.stats().hits == {"paper": 3}
        for found, own in zip(model.encode(texts, output_value="token_embeddings"), states, strict=True):
            torch.testing.assert_close(found, own)  # the vector is not taken for states
        assert cache.stats().hits == {"paper": 6}


def test_states_of_tokens_are_owed_where_nothing_could_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    model, known, more = sentences(), ["w1 w2 w3", "w4 w5"], ["w1 w2 w3", "w6 w7 w8 w9"]
    expected = model.encode(more, output_value="token_embeddings")
    with LLMCache.wrap(model, tau=0.9999, layers="last") as cache:
        for _ in range(2):
            model.encode(known)
        monkeypatch.setattr(Weights, "stayed", lambda *_: False)
        for found, own in zip(model.encode(more, output_value="token_embeddings"), expected, strict=True):
            torch.testing.assert_close(found, own)
        assert cache.stats().bypassed == {"weights_changed": 2}
