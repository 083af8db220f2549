"""Vectors of single tokens, from which learned fingerprints are pooled.

Sizes: m tokens, D hidden width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from llmcache.errors import ConfigError
from llmcache.models.adapters import Trunk, device_of, unpack
from llmcache.models.callables import CallableTrunk
from llmcache.models.packing import Payload
from llmcache.request.rows import Row
from llmcache.support.arrays import Floats, Ids

_BATCH = 256


class TokenVectors:
    """Computes vectors of tokens with the model. Nothing is cached or counted."""

    def __init__(self, trunk: Trunk, payload: Payload, forward: Callable[..., Any]) -> None:
        """Find the model's input embeddings; `forward` runs the trunk without the cache.

        Raises:
            ConfigError: The model has no `get_input_embeddings`.
        """
        find = getattr(trunk.module, "get_input_embeddings", None)
        table = find() if callable(find) else None
        self._callable = trunk.module if isinstance(trunk.module, CallableTrunk) else None
        if not isinstance(table, torch.nn.Embedding) and self._callable is None:
            raise ConfigError(
                f"fingerprint 'learned': {type(trunk.module).__name__} does not say where its input embeddings are "
                "(get_input_embeddings); use another fingerprint"
            )
        self._table, self._device = table, device_of(trunk.module)
        self._payload = payload
        self._forward = forward
        self._frame: tuple[list[int], list[int]] = ([], [])
        self._contextual: dict[int, Floats] = {}

    def frame(self, row: Row, content: Sequence[int]) -> None:
        """Take the special tokens around a request's content as the frame of every token; drop vectors so far."""
        ids = np.frombuffer(row.ids, f"u{row.id_width}").tolist()
        self._frame = (ids[: ids.index(content[0])], ids[len(ids) - ids[::-1].index(content[-1]) :])
        self._contextual.clear()

    def embed(self, ids: Ids) -> Floats:
        """Return the input embeddings of tokens, float32 (m, D)."""
        if self._callable is not None:
            return self._callable.embed(ids)
        assert self._table is not None
        with torch.inference_mode():
            chosen = self._table.weight[torch.from_numpy(ids).to(self._table.weight.device)]
            return np.asarray(chosen.float().cpu().numpy())

    def contextual(self, ids: Ids) -> Floats:
        """Return the payloads of requests of one token each, averaged over their rows, float32 (m, D)."""
        names = ids.tolist()
        new = [name for name in names if name not in self._contextual]
        for start in range(0, len(new), _BATCH):
            batch = new[start : start + _BATCH]
            self._contextual |= zip(batch, self._compute(batch), strict=True)
        made = np.stack([self._contextual[name] for name in names])
        return made if self._callable is None else self._callable.widened(made)

    @torch.inference_mode()
    def _compute(self, tokens: list[int]) -> list[Floats]:
        before, after = self._frame
        rows = [[*before, token, *after] for token in tokens]
        ids = torch.tensor(rows, device=self._device)
        hidden = unpack(self._forward(input_ids=ids, return_dict=False))
        states = [self._payload.take(row, slice(0, len(rows[0]))) for row in hidden]
        return list(torch.stack([state.float().mean(dim=0) for state in states]).cpu().numpy())
