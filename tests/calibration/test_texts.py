"""Calibration on texts: in batches of one length, in order, and whole."""

from typing import Any

import pytest
import torch

from llmcache import CalibrationError, LLMCache
from tests.contract.streams import classifier, requests


class Words:
    """A tokenizer for texts of decimal token ids."""

    model_max_length = 16
    all_special_ids = (1, 2)

    def __call__(self, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in text.split()]])}


def texts(n: int) -> list[str]:
    """Requests of five to eight tokens, as texts."""
    ids = requests(n)[0].tolist()
    return [" ".join(map(str, one[: 5 + i % 4])) for i, one in enumerate(ids)]


def test_texts_are_computed_together_and_observed_in_order() -> None:
    """Up to 32 texts of one length are one call of the model; each is observed as if alone."""
    model: Any = classifier()
    sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    with LLMCache.wrap(model, tokenizer=Words()) as cache:
        observed = cache.observe(texts(200))
        together = list(sizes)
        alone = [cache.observe([one])[0] for one in texts(200)[:40]]
    assert max(together) == 32 and len(together) <= 8
    assert [case.number for case in observed] == list(range(200))
    for one, other in zip(observed, alone, strict=False):
        assert one.row.key == other.row.key
        assert torch.allclose(torch.from_numpy(one.output), torch.from_numpy(other.output), atol=1e-3)


def test_the_one_that_cannot_be_computed_is_named() -> None:
    """The error names the number of a text that the model refuses, even within a batch."""
    model: Any = classifier()

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        if (kwargs["input_ids"][:, 1] == 69).any():
            raise ValueError("no")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    given = [one.replace(" 69 ", " 68 ") for one in texts(60)]
    words = given[40].split()
    given[40] = " ".join([words[0], "69", *words[2:]])
    with LLMCache.wrap(model, tokenizer=Words()) as cache, pytest.raises(CalibrationError, match="request 40"):
        cache.observe(given)
