"""Answers a call before its layers: before tokens are embedded, masks made, and layers passed through one by one.

Where fingerprints are made of token ids alone, all that a decision needs is known before the trunk has run. If every
row is then served at the last layer, only the trunk's output is still to be packed. How that is done is learned from
calls that went the whole way: an output is understood if it is the last states and, at most, what the trunk's own
pooler makes of them. All other calls go the whole way, and all calls of a trunk on which somebody hung hooks, which
would not run.

Sizes: B rows, T tokens, D hidden width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.models.adapters import Trunk
from llmcache.models.hooks import are_hooked
from llmcache.models.model_config import setting
from llmcache.models.payloads import Payload, place_padding
from llmcache.request.call import Call

_STATES, _POOLED = "last_hidden_state", "pooler_output"

Kind = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class OutputTemplate:
    """How the trunk packs its output.

    Attributes:
        dtype: Of the last states.
        entering: Dtype of the states that enter layer 0.
        width: D.
        weights: Digest of the trunk that put it out.
        pack: `last states (B, T, D) -> output`.
    """

    dtype: torch.dtype
    entering: torch.dtype
    width: int
    weights: str
    pack: Callable[[Tensor], Any]


class FastPath:
    """Packs outputs of one trunk. Thread-safe: what is learned is replaced as a whole."""

    def __init__(self, trunk: Trunk, payload: Payload) -> None:
        """Begin without having seen an output.

        Args:
            trunk: Of the model.
            payload: What entries keep of a state.
        """
        self._trunk = trunk
        self._payload = payload
        self._packings: dict[Kind, OutputTemplate | None] = {}
        self._hooked: list[nn.Module] = []  # whose hooks would not run
        self.forget()

    @property
    def may_open(self) -> bool:
        """Whether calls of such a trunk are ever answered here."""
        return not self._trunk.adapter.is_guess

    def template(self, call: Call) -> OutputTemplate | None:
        """How the output of such a call is packed; None where that is not known, or not understood."""
        return self._packings.get(self.kind(call))

    @property
    def is_watched(self) -> bool:
        """Whether somebody hung hooks where they would not run."""
        return are_hooked(self._hooked)

    def known(self, kind: Kind) -> OutputTemplate | None:
        """How the trunk packs outputs of a kind when it runs, whoever hung hooks on it; None where not known."""
        return self._packings.get(kind)

    def learn(self, call: Call, output: Any) -> None:
        """See the output of a call that went the whole way."""
        states, scope = call.progress.states, call.read.scope
        if states is None:
            return
        kind = self.kind(call)
        known = self._packings.get(kind)
        if kind in self._packings and (known is None or known.weights == scope.weights):
            return
        if known is not None:
            self.forget()
        if not self.is_watched:
            self._packings = {**self._packings, kind: None}  # also where what follows fails
            if self.may_open and (pack := _understand(states, output, self._trunk.module)):
                template = OutputTemplate(states.dtype, call.read.entering, states.shape[-1], scope.weights, pack)
                self._packings = {**self._packings, kind: template}

    def forget(self) -> None:
        """What was learned no longer holds: the model was changed."""
        within = {part for layer in self._trunk.layers for part in layer.modules() if part is not layer}
        self._hooked = [part for part in self._trunk.module.modules() if part not in within][1:]
        self._packings = {}

    def answer(self, call: Call, template: OutputTemplate) -> Any:
        """Output of a call whose rows are all served at the last layer."""
        ids = call.inputs.arguments["input_ids"]
        states = torch.empty((*ids.shape, template.width), dtype=template.dtype, device=ids.device)
        for reuse in call.plan.reused.values():
            valid = call.rows[reuse.row].valid
            self._payload.place(reuse.entry.to(states.device), states[reuse.row], valid)
            place_padding(reuse.padding, states[reuse.row], valid)
        output = template.pack(states)
        call.progress.n_skipped += call.n_rows * self._trunk.depth
        call.progress.has_begun = call.progress.is_complete = True
        return output

    def kind(self, call: Call) -> Kind:
        """What the packing of an output hangs on."""
        device = call.inputs.arguments["input_ids"].device.type
        knows = torch.amp.is_autocast_available(device)
        autocast = torch.get_autocast_dtype(device) if knows and torch.is_autocast_enabled(device) else None
        by_default = setting(self._trunk.config, "return_dict")
        return call.inputs.arguments.get("return_dict"), by_default, call.inputs.arguments.get("use_cache"), autocast


def _understand(states: Tensor, output: Any, trunk: nn.Module) -> Callable[[Tensor], Any] | None:
    """How an output is packed from the last states, or None."""
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
    pooler = getattr(trunk, "pooler", None)
    if pooled is not None and not (isinstance(pooler, nn.Module) and torch.equal(pooler(states), pooled)):
        return None

    kind, has_pooled, is_pooled = type(output), _POOLED in named, pooled is not None

    def pack(states: Tensor) -> Any:
        made: dict[str, Any] = {_STATES: states}
        if has_pooled:
            made[_POOLED] = trunk.get_submodule("pooler")(states) if is_pooled else None  # the one of now
        return tuple(made.values()) if kind is tuple else kind(**made)

    return pack
