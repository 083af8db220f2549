"""Parts as a user would write them: one of each kind, from public names only.

`n_used` counts the uses of all objects of a class.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmcache import Call, Codec, Fingerprint, Hit, Index, Policy, View


class MostRecent(Policy):
    """Evicts the entry used last."""

    n_used = 0

    def __init__(self, spare: int = 0) -> None:
        """Spare the keys used last, up to `spare`, as long as others are held."""
        self.spare = spare
        self.keys: dict[str, None] = {}

    def on_put(self, key: str, nbytes: int) -> None:
        self.on_remove(key)
        self.keys[key] = None

    def on_hit(self, key: str) -> None:
        if key in self.keys:
            self.on_put(key, 0)

    def on_remove(self, key: str) -> None:
        self.keys.pop(key, None)

    def victim(self) -> str:
        if not self.keys:
            raise KeyError("empty: no key to evict")
        type(self).n_used += 1
        keys = list(self.keys)
        return keys[max(-1 - self.spare, -len(keys))]


class Scan(Index):
    """Compares with every row, in NumPy."""

    n_used = 0

    def __init__(self, dim: int, block: int = 1000) -> None:
        """Open an empty index that compares `block` rows at a time."""
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        self.dim, self.block = dim, block
        self.rows: dict[int, np.ndarray] = {}

    def add(self, ids: np.ndarray, x: np.ndarray) -> None:
        self.check(x)
        if ids.dtype != np.int64 or ids.shape != x.shape[:1] or (ids < 0).any():
            raise ValueError(f"ids must be int64, ({len(x)},), none negative: got {ids.dtype} {ids.shape} {ids}")
        self.rows |= {name: row.copy() for name, row in zip(ids.tolist(), x, strict=True)}

    def search(self, x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        self.check(x)
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        type(self).n_used += 1
        held = np.array(list(self.rows.values()), np.float32).reshape(-1, self.dim)
        parts = [x @ held[at : at + self.block].T for at in range(0, len(held), self.block)]
        similarity = np.concatenate([np.empty((len(x), 0), np.float32), *parts], axis=1)
        best = np.argsort(-similarity, axis=1)[:, :k]
        return np.array([*self.rows], np.int64)[best], np.take_along_axis(similarity, best, axis=1)

    def vectors(self, ids: np.ndarray) -> np.ndarray:
        return np.array([self.rows[name] for name in ids.tolist()], np.float32).reshape(-1, self.dim)

    def remove(self, ids: np.ndarray) -> None:
        if ids.dtype != np.int64:
            raise ValueError(f"ids must be int64, got {ids.dtype}")
        for name in ids.tolist():
            self.rows.pop(name, None)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        return len(self) * self.dim * 4

    def check(self, x: np.ndarray) -> None:
        if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != self.dim or not np.isfinite(x).all():
            raise ValueError(f"rows must be finite float32 (N, {self.dim}), got {x.dtype} {x.shape}: {x}")


class Lengths(Fingerprint):
    """Requests with equally many content tokens are alike."""

    reads_states = False
    n_used = 0

    def __init__(self, longest: int = 512) -> None:
        """Tell lengths apart up to `longest`."""
        self.longest = longest

    def features(self, view: View) -> Tensor:
        return view.content.sum(dim=1, keepdim=True).float()

    def project(self, features: np.ndarray) -> np.ndarray:
        type(self).n_used += 1
        angle = features[:, 0] / self.longest * np.pi
        return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


class Mirrored(Codec):
    """Stores each row reversed."""

    n_used = 0

    def encode(self, name: str, x: Tensor) -> dict[str, Tensor]:
        if not x.is_floating_point():
            raise ValueError(f"{name}: only floats are packed, got {x.dtype}")
        return {name: x.detach().flip(-1)}

    def decode(self, name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        type(self).n_used += 1
        return tensors[name].flip(-1).to(dtype)

    def is_lossless(self, dtype: torch.dtype) -> bool:
        return True


class SameTokens:
    """Serves a request from an earlier one with the same tokens in another order."""

    name = "same_tokens"
    is_lossless = False
    n_used = 0

    def __init__(self, bank: Any, least: int = 1) -> None:
        """Serve requests of at least `least` tokens."""
        self.bank, self.least = bank, least
        self.seen: dict[tuple[object, ...], str] = {}

    def look_up(self, call: Call, rows: Any) -> None:
        held = {entry.key: entry for entry in self.bank.entries()}
        for row in rows:
            tokens = call.arguments["input_ids"][row.number, row.valid].tolist()
            source = held.get(self.seen.setdefault((call.scope, *sorted(tokens)), row.key))
            if source is not None and len(tokens) >= self.least:
                type(self).n_used += 1
                call.hits[row.number] = Hit(self.name, source.key, source.fields, similarity=None)


class Stage(nn.Module):
    """A layer without the usual argument names."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, signal: Tensor, strength: float = 1.0) -> Tensor:
        return signal + strength * self.mix(signal).tanh()


class Tower(nn.Module):
    """A trunk of no known family."""

    def __init__(self, n_layers: int = 3) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=96)
        self.words = nn.Embedding(96, 8)
        self.tower = nn.ModuleDict({"stages": nn.ModuleList(Stage() for _ in range(n_layers))})
        self.top = nn.LayerNorm(8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        signal = self.words(input_ids)
        for stage in self.tower["stages"]:
            signal = stage(signal, strength=0.5)
        return self.top(signal)
