"""Vectors of single tokens, which learned fingerprints pool.

Sizes: m tokens, D hidden width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from llmcache.arrays import Floats, Ids
from llmcache.errors import ConfigError
from llmcache.models.adapters import Trunk, unpack
from llmcache.models.packing import Payload
from llmcache.request.rows import Row

_BATCH = 256


class TokenVectors:
    """Asks a model for vectors of tokens. Nothing that it computes is cached or counted."""

    def __init__(self, trunk: Trunk, payload: Payload, forward: Callable[..., Any]) -> None:
        """Prepare to ask; `forward` computes as the trunk itself does, unseen by the cache."""
        find = getattr(trunk.module, "get_input_embeddings", None)
        table = find() if callable(find) else None
        if not isinstance(table, torch.nn.Embedding):
            raise ConfigError(
                f"fingerprint 'learned': {type(trunk.module).__name__} does not say where its input embeddings are "
                "(get_input_embeddings); use another fingerprint"
            )
        self._table = table
        self._payload = payload
        self._forward = forward
        self._frame: tuple[list[int], list[int]] = ([], [])
        self._thought: dict[int, Floats] = {}

    def frame(self, row: Row, content: Sequence[int]) -> None:
        """Learn the special tokens around the content of one request, and forget what was computed."""
        ids = np.frombuffer(row.ids, f"u{len(row.ids) // row.n_valid}").tolist()
        self._frame = (ids[: ids.index(content[0])], ids[len(ids) - ids[::-1].index(content[-1]) :])
        self._thought.clear()

    def embed(self, ids: Ids) -> Floats:
        """Input embeddings, float32 (m, D)."""
        with torch.inference_mode():
            chosen = self._table.weight[torch.from_numpy(ids).to(self._table.weight.device)]
            return np.asarray(chosen.float().cpu().numpy())

    def think(self, ids: Ids) -> Floats:
        """What an entry would keep of requests of one token each, averaged over its rows: float32 (m, D)."""
        names = ids.tolist()
        new = [name for name in names if name not in self._thought]
        for start in range(0, len(new), _BATCH):
            batch = new[start : start + _BATCH]
            self._thought |= zip(batch, self._compute(batch), strict=True)
        return np.stack([self._thought[name] for name in names])

    @torch.inference_mode()
    def _compute(self, tokens: list[int]) -> list[Floats]:
        before, after = self._frame
        rows = [[*before, token, *after] for token in tokens]
        ids = torch.tensor(rows, device=self._table.weight.device)
        hidden = unpack(self._forward(input_ids=ids, return_dict=False))
        states = [self._payload.take(row, slice(0, len(rows[0]))) for row in hidden]
        return list(torch.stack([state.float().mean(dim=0) for state in states]).cpu().numpy())
