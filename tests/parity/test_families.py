"""Every family: a wrapped model computes what the plain one does, cold and warm, whatever layer is reused."""

import pytest
import torch
from torch import Tensor, nn

from llmcache import LLMCache
from tests.reuse.prompts import close, run
from tests.tiny_models import BARE, CLASSIFIERS, GENERATORS, build, padded, states

LENGTHS = [9, 4, 7]

of_each_family = pytest.mark.parametrize("family", BARE)


def answer(model: nn.Module, **inputs: Tensor) -> Tensor:
    """Hidden states of valid tokens; logits as they are."""
    output = states(run(model, **inputs))
    return output[inputs["attention_mask"].bool()] if output.ndim == 3 else output


def rows(inputs: dict[str, Tensor], *numbers: int) -> dict[str, Tensor]:
    return {name: value[[*numbers]] for name, value in inputs.items()}


@pytest.mark.slow
@of_each_family
@pytest.mark.parametrize("layer", range(4))
def test_reusing_layer_l_and_computing_above_gives_the_plain_output(family: str, layer: int) -> None:
    model, inputs = build(BARE[family]), padded(LENGTHS)
    plain = answer(model, **inputs)
    with LLMCache.wrap(model, layers=[layer]) as cache:
        answer(model, **inputs)
        close(answer(model, **inputs), plain)
        stats = cache.stats()
    assert (stats.hits, stats.hits_by_layer) == ({"exact": len(LENGTHS)}, {layer: len(LENGTHS)})
    assert stats.n_layers_skipped == (layer + 1) * len(LENGTHS)


@pytest.mark.slow
@of_each_family
@pytest.mark.parametrize("layer", [0, 3])
def test_hits_and_misses_in_one_batch(family: str, layer: int) -> None:
    model, inputs = build(BARE[family]), padded([8, 8, 5, 6])
    plain = answer(model, **inputs)
    with LLMCache.wrap(model, layers=[layer]) as cache:
        answer(model, **rows(inputs, 1, 2))
        close(answer(model, **inputs), plain)
        assert cache.stats().hits == {"exact": 2}


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classifiers_are_served_what_their_head_reads(family: str) -> None:
    model = build(CLASSIFIERS[family])
    inputs = padded([8, 8, 8] if family in ("t5", "bart") else LENGTHS)
    at_end = inputs["attention_mask"][:, -1] == 1
    inputs["input_ids"][at_end, -1] = model.config.eos_token_id or 3
    plain = answer(model, **inputs)
    with LLMCache.wrap(model) as cache:
        assert torch.equal(answer(model, **inputs), plain)
        close(answer(model, **inputs), plain)
        stats = cache.stats()
    assert stats.hits == {"exact": len(plain)}
    if family not in ("t5", "bart"):
        assert stats.nbytes == len(plain) * 32 * 4  # one vector a request


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("known", [[], [1], [0, 1, 2]])
def test_kv_is_whole_after_every_prefill(family: str, known: list[int]) -> None:
    model, inputs = build(GENERATORS[family]), padded([6, 8, 3], left=True)
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    plain = run(model, **inputs, use_cache=True)
    with LLMCache.wrap(model) as cache:
        if known:
            cache(**rows(inputs, *known), use_cache=True)
        warm = cache(**inputs, use_cache=True)
        assert cache.stats().n_hits == len(known)
    mask = inputs["attention_mask"].bool()
    for ours, theirs in zip(warm.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert ours.get_seq_length() == 8
        for name in ("keys", "values"):
            close(*(getattr(kv, name).transpose(1, 2)[mask] for kv in (ours, theirs)))


def test_rows_do_not_depend_on_each_other() -> None:
    model, inputs = build(CLASSIFIERS["bert"]), padded([9, 5, 7, 3], seed=3)
    with LLMCache.wrap(model, tau=0.999) as cache:
        cache(**rows(inputs, 1))
        together = cache(**inputs).logits
    for row in range(4):
        length = int(inputs["attention_mask"][row].sum())
        alone = {name: value[:, :length] for name, value in rows(inputs, row).items()}
        close(together[row : row + 1], answer(model, **alone))


def test_other_padding_is_the_same_request() -> None:
    with LLMCache.wrap(build(CLASSIFIERS["bert"])) as cache:
        answers = [cache(**rows(padded([6, width]), 0)).logits for width in (6, 9)]
        assert cache.stats().hits == {"exact": 1}
    torch.testing.assert_close(*answers)
