"""The model on inputs of any lengths: rows are padded, outputs told apart. Any number of threads may run it.

Sizes: B rows of a call, T tokens a row (padding included), O numbers of an output.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from llmcache.cache import LLMCache
from llmcache.errors import NotCachedError
from llmcache.serving.refusals import described
from llmcache.serving.tokenizing import Tokens

logger = logging.getLogger("llmcache.serving")

#: The model on padded rows: inputs to outputs (B, O), of which the dialects make answers.
Forward = Callable[[dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Output:
    """What the model made of one input.

    Attributes:
        values: float32 (O,): an embedding, or logits.
        n_tokens: Of the input, special ones included.
        rung: What served it, or None where it was computed.
        queue_s: Seconds that it waited.
        compute_s: Seconds that its lookup or its batch took.
    """

    values: NDArray[np.float32]
    n_tokens: int
    rung: str | None
    queue_s: float
    compute_s: float

    @property
    def is_finite(self) -> bool:
        """Whether it is an answer at all."""
        return bool(np.isfinite(self.values).all())


class PaddedModel:
    """One wrapped model, called with tokens."""

    def __init__(self, cache: LLMCache, forward: Forward, pad_id: int, is_caching: Callable[[], bool]) -> None:
        """Take a model.

        Args:
            cache: On the model that `forward` runs.
            forward: The model.
            pad_id: Token id of padding.
            is_caching: Whether inputs are looked up and stored at all.
        """
        self._cache = cache
        self._forward = forward
        self._pad_id = pad_id
        self._is_caching = is_caching

    def run(self, tokens: Sequence[Tokens], namespace: str, are_looked_up: bool = False) -> list[Output]:
        """What the model makes of inputs, served from a namespace or computed and stored there.

        Args:
            tokens: Of the inputs, at least one; pooling leaves out as many tokens of each.
            namespace: Where they are looked for.
            are_looked_up: `served` has found none of them there.
        """
        begun = perf_counter()
        with torch.inference_mode(), self._cache.namespace(namespace), self._switched(are_looked_up):
            values = self._forward(self._padded(tokens)).float().cpu().numpy()
        outcomes = self._cache.last
        took = perf_counter() - begun
        return [
            Output(values[i], len(one), outcomes[i].rung if i < len(outcomes) else None, 0.0, took)
            for i, one in enumerate(tokens)
        ]

    def served(
        self, tokens: Sequence[Tokens], namespace: str, are_looked_up: bool = False
    ) -> tuple[dict[int, Output], bool]:
        """Outputs of inputs that a namespace holds, by their places; and whether the others were looked for at all.

        Args:
            tokens: Of the inputs.
            namespace: Where they are looked for.
            are_looked_up: So they were, in another namespace.
        """
        try:
            with self._cache.only_if_cached(leave_out=True):
                made = self.run(tokens, namespace, are_looked_up)
        except NotCachedError as error:
            return {}, error.rows is not None and len(error.rows) == len(tokens)
        except Exception as error:  # nothing was computed: what served the entries failed
            logger.error("inputs that the cache holds could not be served, and are computed: %s", described(error))
            return {}, False
        return {i: one for i, one in enumerate(made) if one.rung is not None and one.is_finite}, True

    def states(self, tokens: Tokens, states_of: Forward) -> list[list[float]]:
        """States (T, D) of one input's tokens, computed as if there were no cache."""
        with torch.inference_mode(), self._cache.disabled():
            rows: list[list[float]] = states_of(self._padded([tokens]))[0].float().tolist()
        return rows

    def plain_s(self, tokens: Tokens, n_runs: int) -> float:
        """Seconds of the fastest of some runs on one input, computed as if there were no cache."""
        with self._cache.disabled():
            return min(self.run([tokens], "")[0].compute_s for _ in range(n_runs))

    def _switched(self, are_looked_up: bool) -> AbstractContextManager[object]:
        if not self._is_caching():
            return self._cache.disabled()
        return self._cache.looked_up() if are_looked_up else nullcontext()

    def _padded(self, tokens: Sequence[Tokens]) -> dict[str, torch.Tensor]:
        """Rows as the model takes them, padded on the right: ids, mask and, where it takes them, types (B, T)."""
        longest = max(map(len, tokens))

        def rows(values: Iterable[tuple[int, ...]], padding: int) -> torch.Tensor:
            return torch.tensor([[*one, *(padding,) * (longest - len(one))] for one in values])

        made = {
            "input_ids": rows((one.ids for one in tokens), self._pad_id),
            "attention_mask": rows(((1,) * len(one) for one in tokens), 0),
        }
        if tokens[0].types:
            made["token_type_ids"] = rows((one.types for one in tokens), 0)
        if tokens[0].n_prompt:
            made["prompt_length"] = torch.tensor([tokens[0].n_prompt])  # as sentence-transformers names it
        return made
