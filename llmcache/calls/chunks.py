"""Runs the uncached part of a prompt in chunks of tokens; other requests may use the model in between.

As in vLLM's chunked prefill. Lookup and storing see one call. The K/V cache holds the K/V of earlier chunks, and the
last states of all chunks are concatenated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from llmcache.calls.kv_fill import empty, last_states, with_states
from llmcache.engines.engine import Eager
from llmcache.models.adapters import CACHE
from llmcache.models.arguments import BY_COLUMN, Arguments
from llmcache.request.bypass import is_plain_cache


@dataclass(slots=True)
class Chunks:
    """Runs long prompts in chunks of `n_tokens` and calls `between` in between; see `LLMCache.chunked`."""

    n_tokens: int
    between: Callable[[], None]
    error: BaseException | None = None  # raised by `between`

    def fit(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a trunk call is longer than a chunk and can be split: its past must be in its K/V cache."""
        ids, kv_cache = arguments.get(args, kwargs, "input_ids"), arguments.get(args, kwargs, CACHE)
        if ids is None or ids.shape[-1] <= self.n_tokens or arguments.get(args, kwargs, "attention_mask") is not None:
            return False
        return is_plain_cache(kv_cache) and arguments.get(args, kwargs, "use_cache") is not False

    def run(self, eager: Eager, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the trunk in chunks; return its output with the states of all columns.

        If the output has more than states and K/V, the last chunk's is returned. On an error the K/V cache is emptied.
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
                passed = {name: value for name in BY_COLUMN if (value := arguments.get(args, kwargs, name)) is not None}
                columns = {name: value[..., begin : begin + self.n_tokens] for name, value in passed.items()}
                output = eager.run(*arguments.replace(args, kwargs, columns), ())
                states.append(last_states(output))
        except BaseException:
            empty(arguments.get(args, kwargs, CACHE))
            raise
        known = [columns for columns in states if columns is not None]
        return output if len(known) < len(states) else with_states(output, torch.cat(known, dim=1))
