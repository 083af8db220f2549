"""Answers a call at the trunk's door: before tokens are embedded, masks made, and layers passed through one by one.

Where fingerprints are made of token ids alone, all that a decision needs is known before the trunk has run. If every
row is then served at the last layer, only the trunk's output is still to be packed. How that is done is learned from
calls that went the whole way: an output is understood if it is the last states and, at most, what the trunk's own
pooler makes of them. All other calls go the whole way.

Sizes: B rows, T tokens, D hidden width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.adapters import Trunk
from llmcache.context import Call
from llmcache.payloads import Payload

_STATES, _POOLED = "last_hidden_state", "pooler_output"

Kind = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """How the trunk packs its output.

    Attributes:
        dtype: Of the last states.
        entering: Dtype of the states that enter layer 0.
        width: D.
        pack: `last states (B, T, D) -> output`.
    """

    dtype: torch.dtype
    entering: torch.dtype
    width: int
    pack: Callable[[Tensor], Any]


class Door:
    """Packs outputs of one trunk. Thread-safe: what is learned is replaced as a whole."""

    def __init__(self, trunk: Trunk, payload: Payload) -> None:
        """Begin without having seen an output.

        Args:
            trunk: Of the model.
            payload: What entries keep of a state.
        """
        self._trunk = trunk
        self._payload = payload
        self._packings: dict[Kind, Packing | None] = {}

    def packing(self, call: Call) -> Packing | None:
        """How the output of such a call is packed; None where that is not known, or not understood."""
        return self._packings.get(self._kind(call))

    def learn(self, call: Call, entering: torch.dtype, states: Tensor, output: Any) -> None:
        """See an output, and the last states that went into it (B, T, D)."""
        if (kind := self._kind(call)) not in self._packings:
            pack = None if self._trunk.adapter.is_guess else _understand(states, output, self._trunk.module)
            packing = None if pack is None else Packing(states.dtype, entering, states.shape[-1], pack)
            self._packings = {**self._packings, kind: packing}

    def forget(self) -> None:
        """What was learned no longer holds: the model was changed."""
        self._packings = {}

    def answer(self, call: Call, packing: Packing) -> Any:
        """Output of a call whose rows are all served at the last layer."""
        ids = call.arguments["input_ids"]
        states = torch.empty((*ids.shape, packing.width), dtype=packing.dtype, device=ids.device)
        for reuse in call.reused.values():
            self._payload.place(reuse.entry.to(states.device), states[reuse.row], call.rows[reuse.row].valid)
        call.n_skipped += call.n_rows * self._trunk.depth
        call.is_complete = True
        return packing.pack(states)

    def _kind(self, call: Call) -> Kind:
        """What the packing of an output hangs on."""
        device = call.arguments["input_ids"].device.type
        knows = torch.amp.is_autocast_available(device)
        autocast = torch.get_autocast_dtype(device) if knows and torch.is_autocast_enabled(device) else None
        by_default = getattr(self._trunk.config, "return_dict", None)
        return call.arguments.get("return_dict"), by_default, call.arguments.get("use_cache"), autocast


def _understand(states: Tensor, output: Any, trunk: nn.Module) -> Callable[[Tensor], Any] | None:
    """How an output is packed from the last states, or None."""
    pooler = getattr(trunk, "pooler", None)
    if isinstance(output, tuple):
        named = dict(zip((_STATES, _POOLED), output, strict=False))
        if len(output) > len(named):
            return None
    elif isinstance(output, Mapping):
        named = dict(output.items())
    else:
        return None
    pooled = named.get(_POOLED)
    if named.get(_STATES) is not states or set(named) - {_STATES, _POOLED}:
        return None
    if pooled is not None and not (isinstance(pooler, nn.Module) and torch.equal(pooler(states), pooled)):
        return None

    kind, has_pooled, is_pooled = type(output), _POOLED in named, pooled is not None

    def pack(states: Tensor) -> Any:
        made: dict[str, Any] = {_STATES: states}
        if has_pooled:
            made[_POOLED] = pooler(states) if is_pooled and pooler is not None else None
        return tuple(made.values()) if kind is tuple else kind(**made)

    return pack
