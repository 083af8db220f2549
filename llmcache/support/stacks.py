"""Packs many small records into a few tensors for files, by stacking tensors of the same name and shape."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def pack(records: Sequence[tuple[Mapping[str, Tensor], Any]]) -> tuple[list[Any], dict[str, Tensor]]:
    """Stack the tensors of records, each a pair of tensors by name and a JSON value.

    Returns for each record [number of its stack, JSON value]; and all stacks, by "number/name".
    """
    groups: dict[Any, list[Mapping[str, Tensor]]] = defaultdict(list)
    forms = [tuple((name, one.dtype, tuple(one.shape)) for name, one in tensors.items()) for tensors, _ in records]
    for form, (tensors, _) in zip(forms, records, strict=True):
        groups[form].append(tensors)
    numbers = {form: number for number, form in enumerate(groups)}
    packed = {
        f"{number}/{name}": torch.stack([tensors[name].cpu() for tensors in members])
        for number, members in enumerate(groups.values())
        for name in members[0]
    }
    return [[numbers[form], about] for form, (_, about) in zip(forms, records, strict=True)], packed


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
