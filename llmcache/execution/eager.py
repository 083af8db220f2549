"""Why a call runs eagerly although graphs are in force: what of it no graph can stand for.

Each reason is a name of `stats().compiled.eager`. Those that concern the graphs themselves are told where they are
held, in `compiled.py`: they were dropped, none has the shape, or one failed.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.execution.old_call import Call
from llmcache.models.adapters import Trunk
from llmcache.models.hooks import are_hooked
from llmcache.models.model_config import setting
from llmcache.models.tracing import are_strange, is_traced
from llmcache.request.rows import Row

_TAKEN = frozenset({"input_ids", "attention_mask", "token_type_ids", "return_dict", "use_cache"})


@dataclass(frozen=True, slots=True)
class Conditions:
    """What must hold for graphs to stand for a trunk in a call.

    Attributes:
        trunk: Whose graphs they are.
        defaults: Of the arguments of its forward, by name.
        takes_types: Token types are an input of the graphs.
        torch_settings: Settings of torch when they were made.
        modules: Parts of the trunk, whose hooks a graph would not run.
        thread: The one thread that may run them; None: all may.
    """

    trunk: Trunk
    defaults: Mapping[str, Any]
    takes_types: bool
    torch_settings: tuple[Any, ...]
    modules: Sequence[nn.Module]
    thread: int | None

    def find_reason(self, arguments: dict[str, Any], call: Call | None, is_training: bool) -> str | None:
        """The first that does not hold, as the reason to count, or None; `call` is None where nobody read its rows."""
        if not self.take(arguments) or (is_traced() or are_strange(arguments.values())):
            return "arguments"
        if torch.is_grad_enabled() or is_training:
            return "gradients"
        device = arguments["input_ids"].device.type
        if self.torch_settings != torch_settings() or torch.is_autocast_enabled(device):
            return "torch_settings"
        if self.thread not in (None, threading.get_ident()):
            return "thread"
        if are_hooked(self.modules):
            return "hooked"
        is_padded_right = _is_right_padded(arguments) if call is None else all(map(_begins, _computed(call)))
        return None if is_padded_right else "padding"

    def take(self, arguments: dict[str, Any]) -> bool:
        """Whether a graph was made for such arguments: tokens, a 2-D mask, types; no K/V, and no more output."""
        ids = arguments.get("input_ids")
        if not (isinstance(ids, Tensor) and ids.ndim == 2 and ids.numel() and not ids.is_floating_point()):
            return False
        if arguments.get("token_type_ids") is not None and not self.takes_types:
            return False
        mask = arguments.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
            return False
        if self.trunk.makes_kv and arguments.get("use_cache") is not False:
            return False
        for what in self.trunk.asks_for_more:
            asked = arguments.get(what)
            if asked if asked is not None else setting(self.trunk.config, what):
                return False
        known = {*_TAKEN, *self.trunk.asks_for_more}
        return all(
            name in known or value is None or value is self.defaults.get(name) for name, value in arguments.items()
        )


def torch_settings() -> tuple[Any, ...]:
    """What of torch's own settings a graph may have been made for."""
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _computed(call: Call) -> Iterator[Row]:
    return (row for row in call.rows if row.number not in call.plan.reused)


def _begins(row: Row) -> bool:
    """Whether a row is valid from its first token on to its last one, and its mask holds only 0 and 1."""
    is_plain = row.bypass_reason in ("", "no_content")
    return is_plain and row.n_valid > 0 and isinstance(row.valid, slice) and row.valid.start == 0


def _is_right_padded(arguments: dict[str, Any]) -> bool:
    """Whether the same can be told of all rows of a call that nobody has read; an accelerator would be waited for."""
    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    if mask is None:
        return not ids.is_cpu or int(ids.min()) >= 0  # of a graph an id below 0 might be one of the last tokens
    if not (ids.is_cpu and mask.is_cpu) or int(ids.min()) < 0:
        return False
    rows = mask.to(torch.int8)
    is_binary = bool(((mask == 0) | (mask == 1)).all())
    return is_binary and bool(rows[:, 0].all()) and bool((rows[:, 1:] <= rows[:, :-1]).all())
