"""Records of a cache as named tensors, for files, and back.

Sizes: N requests, P slots, F fingerprint width, S width of a signature.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmcache.arrays import Floats, below
from llmcache.banks.entry import Entry
from llmcache.banks.records import BlockPlace, SavedRequest
from llmcache.matching.partition import IndexSlot
from llmcache.request.rows import KEY_LENGTH, Scope


def pack_requests(records: list[SavedRequest], scopes: list[Scope]) -> dict[str, Tensor]:
    """All of records but their states; a scope is named by its number."""
    number = {scope: i for i, scope in enumerate(scopes)}
    blocks = {record.key: i for i, record in enumerate(records) if record.place is not None}
    slots = [(i, slot) for i, record in enumerate(records) for slot in record.slots]
    packed = {
        "answers": _answers(records),
        "is_kept": np.array([record.is_pinned for record in records], np.bool_),
        "layouts": np.frombuffer(b"".join(r.layout or _NO_LAYOUT for r in records), np.uint8).reshape(
            -1, len(_NO_LAYOUT)
        ),
        "keys": np.frombuffer("".join(r.key for r in records).encode(), np.uint8).reshape(-1, KEY_LENGTH),
        "ids": np.frombuffer(b"".join(r.ids for r in records), np.uint8),
        "n_id_bytes": np.array([len(r.ids) for r in records], np.int64),
        "scope": np.array([number[r.scope] for r in records], np.int64),
        "dtype": np.array([_DTYPES.index(r.dtype) for r in records], np.int64),
        "block.before": np.array([_before(record, blocks) for record in records], np.int64),
        "block.is_tail": np.array([r.place is not None and r.place.is_tail for r in records], np.bool_),
        "place.request": np.array([i for i, _ in slots], np.int64),
        "place.layer": np.array([-1 if one.layer is None else one.layer for _, one in slots], np.int64),
        "place.length": np.array([one.length for _, one in slots], np.int64),
        "place.slot": np.array([one.slot for _, one in slots], np.int64),
        "place.vector": np.stack([one.vector for _, one in slots]) if slots else np.zeros((0, 0), np.float32),
    }
    return arrays_to_tensors(packed)


def _before(record: SavedRequest, blocks: Mapping[str, int]) -> int:
    """Number of the block before one; for the first of a chain, and for requests of the banks, what stands for that."""
    if record.place is None:
        return _NO_BLOCK
    return _FIRST if record.place.before is None else blocks[record.place.before]


def arrays_to_tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def _answers(records: list[SavedRequest]) -> Floats:
    """Signatures (N, S), NaN where there is none."""
    width = max((len(record.answer) for record in records if record.answer is not None), default=0)
    answers = np.full((len(records), width), np.nan, np.float32)
    for row, record in zip(answers, records, strict=True):
        if record.answer is not None:
            row[:] = record.answer
    return answers


def pack_states(records: list[SavedRequest]) -> dict[str, Tensor]:
    """Entries of one layer and shape stacked into one tensor a name, beside the numbers of their requests."""
    groups: dict[tuple[Any, ...], list[tuple[int, Entry]]] = defaultdict(list)
    for i, record in enumerate(records):
        for layer, entry in record.entries.items():
            shapes = tuple((name, t.dtype, t.shape) for name, t in sorted(entry.tensors.items()))
            groups[layer, shapes].append((i, entry))
    packed: dict[str, Tensor] = {}
    for g, ((layer, _), members) in enumerate(groups.items()):
        packed[f"{layer}/{g}/requests"] = torch.tensor([i for i, _ in members], device="cpu")
        for name in members[0][1].tensors:
            packed[f"{layer}/{g}/state/{name}"] = torch.stack([entry.tensors[name].cpu() for _, entry in members])
    return packed


def unpack(requests: dict[str, Tensor], states: dict[str, Tensor], scopes: list[Scope]) -> Iterator[SavedRequest]:
    arrays = {name: tensor.numpy() for name, tensor in requests.items()}
    views: dict[int, dict[int, dict[str, Tensor]]] = defaultdict(dict)
    for name, numbers in states.items():
        if name.endswith("/requests"):
            layer, group, _ = name.split("/")
            stacks = below(f"{layer}/{group}/state/", states)
            for row, i in enumerate(numbers.tolist()):
                views[i][int(layer)] = {n: stack[row] for n, stack in stacks.items()}
    slots: dict[int, list[IndexSlot]] = defaultdict(list)
    for i, layer, length, slot, vector in zip(
        *(arrays[f"place.{what}"] for what in ("request", "layer", "length", "slot", "vector")), strict=True
    ):
        slots[int(i)].append(IndexSlot(None if layer < 0 else int(layer), int(length), vector, int(slot)))
    ends = np.cumsum(arrays["n_id_bytes"])
    ids = arrays["ids"].tobytes()
    keys = [key.tobytes().decode() for key in arrays["keys"]]
    for i, end in enumerate(ends):
        yield SavedRequest(
            keys[i],
            scopes[arrays["scope"][i]],
            ids[end - arrays["n_id_bytes"][i] : end],
            _DTYPES[arrays["dtype"][i]],
            # Copies: a tensor of a file may lie in it, and what is held must outlive the file.
            {layer: Entry({n: x.clone() for n, x in tensors.items()}) for layer, tensors in views[i].items()},
            tuple(slots[i]),
            None if np.isnan(arrays["answers"][i]).any() or not arrays["answers"].shape[1] else arrays["answers"][i],
            bool(arrays["is_kept"][i]),
            arrays["layouts"][i].tobytes() if arrays["layouts"][i].any() else b"",
            _place(int(arrays["block.before"][i]), bool(arrays["block.is_tail"][i]), keys),
        )


def _place(before: int, is_tail: bool, keys: Sequence[str]) -> BlockPlace | None:
    return None if before == _NO_BLOCK else BlockPlace(None if before == _FIRST else keys[before], is_tail)


_NO_LAYOUT = bytes(32)
_FIRST, _NO_BLOCK = -1, -2
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
