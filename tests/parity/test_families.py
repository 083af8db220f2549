"""Every family: a wrapped model computes what the plain one does, cold and warm, whatever layer is reused."""

import pytest
import torch
from torch import nn

from llmcache import LLMCache
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, states, tokens

LENGTHS = [9, 4, 7]


def run(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return states(model(**inputs))


def visible(output: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Hidden states of valid tokens; pooled answers as they are."""
    return output[mask.bool()] if output.shape[:2] == mask.shape else output


@pytest.mark.parametrize("family", BARE)
def test_cold_is_bit_equal_and_unwrapped_is_bit_equal(family: str) -> None:
    model = build(BARE[family])
    inputs = padded(LENGTHS)
    plain = run(model, **inputs)
    cache = LLMCache.wrap(model)
    assert torch.equal(run(model, **inputs), plain)
    assert cache.stats().n_misses == len(LENGTHS)
    cache.unwrap()
    assert torch.equal(run(model, **inputs), plain)


@pytest.mark.parametrize("family", BARE)
@pytest.mark.parametrize("layer", range(4))
def test_reusing_layer_l_and_computing_above_gives_the_plain_output(family: str, layer: int) -> None:
    model = build(BARE[family])
    inputs = padded(LENGTHS)
    plain = visible(run(model, **inputs), inputs["attention_mask"])
    with LLMCache.wrap(model, layers=[layer]) as cache:
        run(model, **inputs)
        warm = visible(run(model, **inputs), inputs["attention_mask"])
        stats = cache.stats()
    assert stats.hits == {"exact": len(LENGTHS)}
    assert stats.hits_by_layer == {layer: len(LENGTHS)}
    assert stats.n_layers_skipped == (layer + 1) * len(LENGTHS)
    torch.testing.assert_close(warm, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", BARE)
def test_hits_and_misses_in_one_batch(family: str) -> None:
    model = build(BARE[family])
    seen, fresh = padded([8, 5], seed=1), padded([8, 6], seed=50)
    mixed = {name: torch.cat([fresh[name][:1], seen[name], fresh[name][1:]]) for name in seen}
    plain = visible(run(model, **mixed), mixed["attention_mask"])
    for layer in (0, 3):
        with LLMCache.wrap(model, layers=[layer]) as cache:
            run(model, **seen)
            warm = visible(run(model, **mixed), mixed["attention_mask"])
            assert cache.stats().hits == {"exact": 2}
        torch.testing.assert_close(warm, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classifiers_are_served_what_their_head_reads(family: str) -> None:
    model = build(CLASSIFIERS[family])
    inputs = padded([8, 8, 8] if family in ("t5", "bart") else LENGTHS)
    inputs["input_ids"][:, -1] = torch.where(
        inputs["attention_mask"][:, -1] == 1, model.config.eos_token_id or 3, inputs["input_ids"][:, -1]
    )
    plain = run(model, **inputs)
    with LLMCache.wrap(model) as cache:
        cold = run(model, **inputs)
        warm = run(model, **inputs)
        stats = cache.stats()
    assert torch.equal(cold, plain)
    torch.testing.assert_close(warm, plain, atol=1e-5, rtol=1e-5)
    assert stats.hits == {"exact": len(plain)}
    if family not in ("t5", "bart"):
        assert stats.nbytes == len(plain) * 32 * 4  # one vector a request


@pytest.mark.parametrize("family", GENERATORS)
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_is_token_identical_and_prefill_is_served(family: str, beams: int) -> None:
    model = build(GENERATORS[family])
    inputs = padded([7, 4], left=True)
    settings = {"max_new_tokens": 10, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    plain = model.generate(**inputs, **settings)
    with LLMCache.wrap(model) as cache:
        cold = model.generate(**inputs, **settings)
        before = cache.stats().n_hits
        warm = model.generate(**inputs, **settings)
        served = cache.stats().n_hits - before
    assert torch.equal(cold, plain)
    assert torch.equal(warm, plain)
    assert served >= 2


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("seen_rows", [[], [1], [0, 1, 2]])
def test_kv_is_whole_after_every_prefill(family: str, seen_rows: list[int]) -> None:
    model = build(GENERATORS[family])
    inputs = padded([6, 8, 3], left=True)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        plain = model(**inputs, position_ids=positions, use_cache=True)
    with LLMCache.wrap(model) as cache:
        if seen_rows:
            part = {name: value[seen_rows] for name, value in inputs.items()}
            cache(**part, position_ids=positions[seen_rows], use_cache=True)
        warm = cache(**inputs, position_ids=positions, use_cache=True)
        assert cache.stats().n_hits == len(seen_rows)
    mask = inputs["attention_mask"].bool()
    for ours, theirs in zip(warm.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert ours.get_seq_length() == 8
        for name in ("keys", "values"):
            kept = [getattr(kv, name).transpose(1, 2)[mask] for kv in (ours, theirs)]
            torch.testing.assert_close(*kept, atol=1e-5, rtol=1e-5)


def test_rows_do_not_depend_on_each_other() -> None:
    model = build(CLASSIFIERS["bert"])
    inputs = padded([9, 5, 7, 3], seed=3)
    cache = LLMCache.wrap(model, tau=0.999)
    cache(**{name: value[1:2] for name, value in inputs.items()})
    together = cache(**inputs).logits
    cache.unwrap()
    for row in range(4):
        length = int(inputs["attention_mask"][row].sum())
        alone = run(model, **{name: value[row : row + 1, :length] for name, value in inputs.items()})
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-5, rtol=1e-5)


def test_other_padding_is_the_same_request() -> None:
    model = build(CLASSIFIERS["bert"])
    ids = tokens(1, 6)
    wide = torch.cat([ids, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    mask = torch.tensor([[1] * 6 + [0] * 3])
    with LLMCache.wrap(model) as cache:
        first = cache(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        second = cache(input_ids=wide, attention_mask=mask).logits
        assert cache.stats().hits == {"exact": 1}
    torch.testing.assert_close(first, second)
