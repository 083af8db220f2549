"""Answers a call before its layers: before tokens are embedded, masks made, and layers passed through one by one.

Where fingerprints are made of token ids alone, all that a decision needs is known before the trunk has run, and so it
is where requests are held in blocks. If every row is then served at the last layer, only the trunk's output is still to
be packed, and the caller's K/V cache to be filled. If not, and nothing is left to do at the layers, the trunk is run as
it is for the other rows, and these are put beside those that are served. How the output is packed is learned from calls
that went the whole way, layer by layer: it is understood if it is the last states and, at most, what the trunk's own
pooler makes of them, or the K/V cache. All other calls go the whole way, and so do hits of a trunk on which somebody
hung hooks, which would not run.

Sizes: B rows, T tokens, D hidden width.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.execution.frames import Frame
from llmcache.execution.old_call import Call
from llmcache.execution.runner import fill_cache
from llmcache.models.adapters import CACHE, Trunk
from llmcache.models.arguments import DECIDING, Arguments
from llmcache.models.hooks import are_hooked
from llmcache.models.model_config import setting
from llmcache.models.payloads import Payload, place_padding
from llmcache.reuse.prefix.rung import last_states

_STATES, _POOLED = "last_hidden_state", "pooler_output"

Kind = tuple[Any, ...]
#: `(last states (B, T, D), K/V cache or None) -> output`.
Pack = Callable[[Tensor, Any], Any]


@dataclass(frozen=True, slots=True)
class OutputTemplate:
    """How the trunk packs its output.

    Attributes:
        dtype: Of the last states.
        entering: Dtype of the states that enter layer 0.
        width: D.
        weights: Digest of the trunk that put it out.
        pack: Makes the output.
        is_normed: The last states are those that enter the final norm, and the output has what comes out of it.
    """

    dtype: torch.dtype
    entering: torch.dtype
    width: int
    weights: str
    pack: Pack
    is_normed: bool = False

    def states_of(self, output: Any, n_rows: int, n_tokens: int, entered_norm: Tensor | None) -> Tensor:
        """The last states (B, T, D) of a trunk that was run for B rows of T tokens: in its output, or before its norm.

        Raises:
            KeyError: It has none.
            TypeError: Likewise, or they are no tensor.
            ValueError: They are of another shape or dtype than before.
        """
        in_output = output[_STATES] if isinstance(output, Mapping) else output[0]
        states = entered_norm if self.is_normed else in_output
        if not isinstance(states, Tensor):
            raise TypeError(f"{_STATES} is a {type(states).__name__}")
        if states.shape != (n_rows, n_tokens, self.width) or states.dtype != self.dtype:
            raise ValueError(f"{_STATES} is {states.dtype} {tuple(states.shape)}")
        return states


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
        self._arguments = Arguments(trunk.module.forward)
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
        """How the trunk packs its last states when it runs, whoever hung hooks on it; None where not known."""
        template = self._packings.get(kind)
        return None if template is None or template.is_normed else template

    def learn(self, call: Call, output: Any) -> None:
        """See the output of a call that went the whole way."""
        scope, kv_cache = call.read.scope, None
        if call.plan.prefill is None:
            states = call.progress.states
        else:
            states, kv_cache = last_states(output), call.plan.prefill.kv_cache
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
            if self.may_open and (understood := _understand(states, output, self._trunk, kv_cache)):
                template = OutputTemplate(
                    states.dtype, call.read.entering, states.shape[-1], scope.weights, *understood
                )
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
        for number in call.plan.left_out:
            states[number] = torch.nan
        self._place(call, states)
        if call.plan.prefill is not None:
            call.progress.kv_cache = call.plan.prefill.kv_cache
            for number in range(self._trunk.depth):
                fill_cache(call, number, ids.shape[1])
        output = template.pack(states, call.progress.kv_cache)
        call.progress.n_skipped += call.n_rows * self._trunk.depth
        call.progress.has_begun = call.progress.is_complete = True
        return output

    def run(
        self,
        call: Call,
        frame: Frame,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Output of a call none of whose rows is served."""
        template, output = frame.template, forward(*args, **kwargs)
        assert template is not None
        with suppress(KeyError, TypeError, ValueError):  # packed otherwise than before, so nothing of it is kept
            n_rows, n_tokens = call.inputs.arguments["input_ids"].shape
            call.progress.states = template.states_of(output, n_rows, n_tokens, frame.entered_norm)
        call.progress.has_begun = call.progress.is_complete = True
        return output

    def run_rest(
        self,
        call: Call,
        frame: Frame,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Output of a call some of whose rows are served at the last layer: the trunk is run for the others."""
        template, ids = frame.template, call.inputs.arguments["input_ids"]
        assert template is not None
        rows = [row.number for row in call.rows if row.number not in call.plan.reused]
        index = torch.tensor(rows, device=ids.device)
        for name in DECIDING:
            tensor = self._arguments.get(args, kwargs, name)
            if tensor is not None and len(tensor) == call.n_rows:
                args, kwargs = self._arguments.replace(args, kwargs, name, tensor.index_select(0, index))
        output = forward(*args, **kwargs)
        computed = template.states_of(output, len(rows), ids.shape[1], frame.entered_norm)
        states = computed.new_empty((*ids.shape, template.width)).index_copy_(0, index, computed)
        self._place(call, states)
        output = template.pack(states, None)
        call.progress.states = states
        call.progress.n_skipped += len(call.plan.reused) * self._trunk.depth
        call.progress.has_begun = call.progress.is_complete = True
        return output

    def _place(self, call: Call, states: Tensor) -> None:
        """Put stored states in (B, T, D)."""
        for reuse in call.plan.reused.values():
            valid = call.read.rows[reuse.row].valid
            self._payload.place(reuse.entry.to(states.device), states[reuse.row], valid)
            place_padding(reuse.padding, states[reuse.row], valid)

    def kind(self, call: Call) -> Kind:
        """What the packing of an output hangs on."""
        device = call.inputs.arguments["input_ids"].device.type
        knows = torch.amp.is_autocast_available(device)
        autocast = torch.get_autocast_dtype(device) if knows and torch.is_autocast_enabled(device) else None
        by_default = setting(self._trunk.config, "return_dict")
        passed = call.inputs.arguments
        # The trunk may refuse an unusual dtype: it is asked before a call like this one is answered without it.
        dtypes = [(name, getattr(passed.get(name), "dtype", None)) for name in DECIDING]
        dtypes = [one for one in dtypes if one[1] not in (None, torch.int64)]
        keeps_kv = None if call.plan.prefill is None else passed.get(CACHE) is None
        return passed.get("return_dict"), by_default, passed.get("use_cache"), autocast, keeps_kv, *dtypes


def _understand(states: Tensor, output: Any, trunk: Trunk, kv_cache: Any) -> tuple[Pack, bool] | None:
    """How an output is packed from the last states, what comes beside them, and if they are normed first; or None."""
    beside = _POOLED if kv_cache is None else CACHE
    if isinstance(output, tuple):
        named = dict(zip((_STATES, beside), output, strict=False))
        if len(output) > len(named):
            return None
    elif isinstance(output, Mapping):
        named = dict(output.items())
    else:
        return None
    if set(named) - {_STATES, beside}:
        return None
    module, last = trunk.module, named.get(_STATES)
    is_normed = last is not states
    if is_normed and not (isinstance(last, Tensor) and kv_cache is None and _is_norm_of(trunk, states, last)):
        return None
    more, pooler = named.get(beside), getattr(module, "pooler", None)
    is_kv = more is not None and more is kv_cache
    is_pooled = isinstance(more, Tensor) and isinstance(pooler, nn.Module) and torch.equal(pooler(last), more)
    if not (more is None or is_kv or is_pooled):
        return None

    kind, has_more = type(output), beside in named

    def pack(states: Tensor, kv_cache: Any) -> Any:
        if is_normed:
            states = module.get_submodule(str(trunk.adapter.norm))(states)  # the one of now, as the pooler
        made: dict[str, Any] = {_STATES: states}
        if has_more:
            pooled = module.get_submodule("pooler")(states) if is_pooled else None
            made[beside] = kv_cache if is_kv else pooled
        return tuple(made.values()) if kind is tuple else kind(**made)

    return pack, is_normed


def _is_norm_of(trunk: Trunk, states: Tensor, last: Tensor) -> bool:
    """Whether states (B, T, D) of an output are others after the final norm; what was not kept of them is NaN."""
    if trunk.norm is None or last.shape != states.shape or last.dtype != states.dtype:
        return False
    return torch.allclose(trunk.norm(states), last, rtol=0.0, atol=0.0, equal_nan=True)
