"""Runs what is left of a prompt in chunks of tokens, between which others may have the model (vLLM's chunked prefill).

Lookup and storing see one call. The K/V cache holds what earlier chunks made, and their last states are joined.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from llmcache.models.adapters import CACHE
from llmcache.models.arguments import BY_COLUMN, Arguments
from llmcache.prefix.kv_fill import empty
from llmcache.prefix.prefix import last_states, with_states
from llmcache.request.bypass import is_plain_cache


@dataclass(slots=True)
class Chunks:
    """Runs long prompts in chunks; see `LLMCache.chunked`."""

    n_tokens: int
    between: Callable[[], None]
    error: BaseException | None = None  # that `between` raised

    def fit(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a forward of the trunk is longer than a chunk, and can be cut: its past is all in its K/V cache."""
        ids, kv_cache = arguments.get(args, kwargs, "input_ids"), arguments.get(args, kwargs, CACHE)
        if ids is None or ids.shape[-1] <= self.n_tokens or arguments.get(args, kwargs, "attention_mask") is not None:
            return False
        return is_plain_cache(kv_cache) and arguments.get(args, kwargs, "use_cache") is not False

    def run(
        self, forward: Callable[..., Any], arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The output at all columns, or at the last ones of a trunk that puts out more.

        A forward that fails half-way leaves the K/V cache empty.
        """
        output, states = None, []
        try:
            for begin in range(0, arguments.get(args, kwargs, "input_ids").shape[-1], self.n_tokens):
                if begin:
                    try:
                        self.between()
                    except BaseException as error:
                        self.error = error
                        raise
                some, named = args, kwargs
                for name in BY_COLUMN:
                    if (value := arguments.get(args, kwargs, name)) is not None:
                        columns = value[..., begin : begin + self.n_tokens]
                        some, named = arguments.replace(some, named, name, columns)
                output = forward(*some, **named)
                states.append(last_states(output))
        except BaseException:
            empty(arguments.get(args, kwargs, CACHE))
            raise
        known = [one for one in states if one is not None]
        return output if len(known) < len(states) else with_states(output, torch.cat(known, dim=1))
