"""A batch that was looked up before it is run: the part that the cache serves, and the part that is to be computed.

A call remembers what was found by the identity of its token ids: the tensors of `Part.inputs` are made here, and are
recognised when the model is run on them.

Sizes: B rows, T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.call import CachedForward
from llmcache.errors import ConfigError
from llmcache.models.arguments import DECIDING
from llmcache.request.call import Call


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a batch, to be run once: `model(**part.inputs)`.

    Attributes:
        rows: Their numbers in the batch, in order.
        inputs: The sub-batch, by name: tensors with one row a request hold a copy of these rows, others are as they
            were. What is edited in it is looked up anew when it is run.
    """

    rows: tuple[int, ...]
    inputs: dict[str, Any]
    _call: Call | None = field(default=None, repr=False)  # what was found lives as long as this


@dataclass(frozen=True, slots=True)
class Found:
    """What `LLMCache.look_up` found of a batch.

    Attributes:
        served: Rows that the cache serves: no layer runs for them. None: there are none.
        missing: The other rows. None: there are none.
    """

    served: Part | None
    missing: Part | None


def look_up(model: nn.Module, forward: CachedForward | None, batch: Mapping[str, Any]) -> Found:
    """Return what a cache holds of a batch; see `LLMCache.look_up`. Without `forward`, nothing."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim < 2:
        raise ConfigError("look_up: give tokenised inputs by name, with input_ids (rows, tokens)")
    every = range(len(ids))
    if forward is None:
        return Found(None, Part(tuple(every), dict(batch)))
    run = partial(model, dict(batch)) if isinstance(model, nn.Sequential) else partial(model, **batch)
    with torch.inference_mode():
        call = forward.prepared.look_up(run)
    if call is not None and not _can_resume(call, batch):
        call = None
    hits = () if call is None else sorted(call.hits)

    def part(numbers: Sequence[int]) -> Part | None:
        if not numbers:
            return None
        inputs = _take(batch, numbers, len(ids))
        return Part(tuple(numbers), inputs, None if call is None else forward.prepared.keep(call, numbers, inputs))

    return Found(part(hits), part([number for number in every if number not in set(hits)]))


def _can_resume(call: Call, batch: Mapping[str, Any]) -> bool:
    """Whether a call with tensors like those of a batch can be recognised when it is made."""
    is_plain = call.reason is None and call.prefill is None and call.mask_4d is None
    return is_plain and all(call.arguments.get(name) is batch.get(name) for name in DECIDING)


def _take(batch: Mapping[str, Any], numbers: Sequence[int], n_rows: int) -> dict[str, Any]:
    """Return copies of some rows, as tensors of which edits can be seen."""
    index = torch.tensor(numbers)
    with torch.inference_mode(False), torch.no_grad():
        return {
            name: value.index_select(0, index.to(value.device))
            if isinstance(value, Tensor) and value.ndim and len(value) == n_rows
            else value
            for name, value in batch.items()
        }
