"""Packs many small records into a few tensors for files, by stacking tensors of the same name and shape."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def pack(records: Sequence[tuple[Mapping[str, Tensor], Any]]) -> tuple[list[Any], dict[str, Tensor]]:
    """Stack the tensors of records.

    Args:
        records: For each record its tensors by name, and a JSON value.

    Returns:
        For each record [number of its stack, JSON value]; and all stacks, by "number/name".
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, (tensors, _) in enumerate(records):
        groups[tuple((name, one.dtype, tuple(one.shape)) for name, one in tensors.items())].append(i)
    numbers = [0] * len(records)
    packed: dict[str, Tensor] = {}
    for number, members in enumerate(groups.values()):
        for i in members:
            numbers[i] = number
        for name in records[members[0]][0]:
            packed[f"{number}/{name}"] = torch.stack([records[i][0][name].cpu() for i in members])
    return [[number, about] for number, (_, about) in zip(numbers, records, strict=True)], packed


def unpack(meta: Sequence[Any], packed: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], Any]]:
    """Yield the records in their order; each tensor owns its memory."""
    stacks: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, stack in packed.items():
        number, _, own = name.partition("/")
        stacks[int(number)][own] = stack
    n_taken: dict[int, int] = defaultdict(int)
    for number, about in meta:
        i = n_taken[number]
        n_taken[number] += 1
        yield {name: stack[i].clone() for name, stack in stacks[number].items()}, about
