"""A computed request and its answer, from which calibrations learn.

Sizes: D hidden width, S width of a signature, C logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmcache.memory.bank import Entry
from llmcache.request.rows import Row, Scope
from llmcache.support.arrays import Floats


@dataclass(slots=True)
class Observation:
    """One computed request."""

    scope: Scope
    row: Row
    tokens: Sequence[int]  # content tokens
    target: Floats  # mean row of the last hidden states that its entry keeps, float32 (D,)
    answer: Floats  # signature of its answer (S,)
    output: Floats  # the model's, float32 (C,)
    entry: Entry  # never written to
    head: str  # digest of the weights outside the trunk when it was computed
    seconds: float  # time of its call, work of the cache included, divided by the call's rows
    label: Any = None  # the correct answer, if given
    number: int = 0  # position among the given requests
    generation: int = 0  # `Purges.generation` before it was computed
    draft: Floats | None = None  # output of the model's draft, float32 (C,); None without one
    draft_s: float = 0.0  # time of the draft
    drafted_by: str = ""  # name of the draft; "" without one
    own: "Observation | None" = None  # the same request by the model itself, if an engine computed this one
