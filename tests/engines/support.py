"""What the tests of engines share: a cache's figures of its engine, and a comparison with the plain model."""

from typing import Any

import torch
from torch import Tensor, nn

from llmcache import LLMCache
from tests.contract.models import plain


def figures(cache: LLMCache) -> Any:
    found = cache.stats().engine
    assert found is not None
    return found


def agree(cache: LLMCache, alone: nn.Module | None = None, **inputs: Any) -> None:
    """Compare a call's output, at valid tokens, with the plain model's (None: a BERT classifier's)."""
    alone = plain("bert", "classifier") if alone is None else alone
    with torch.inference_mode():
        found, expected = cache.model(**inputs), alone(**inputs)
    assert type(found) is type(expected)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    both = (one if type(one) is tuple else one.to_tuple() for one in (found, expected))
    tensors = ([x for x in one if isinstance(x, Tensor)] for one in both)  # unrequested K/V are left out
    for one, other in zip(*tensors, strict=True):
        where = mask if one.shape[:2] == mask.shape else slice(None)
        torch.testing.assert_close(one[where], other[where], atol=1e-4, rtol=0)
