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
    """One computed request.

    Attributes:
        scope: Its scope.
        row: Its row.
        tokens: Its content tokens.
        target: Mean row of the last hidden states that its entry keeps, float32 (D,).
        answer: Signature of its answer (S,).
        output: The model's output for it, float32 (C,).
        entry: Its entry. Never written to.
        head: Digest of the weights outside the trunk when it was computed.
        seconds: Time of its call, work of the cache included, divided by the call's rows.
        label: The correct answer, if given.
        number: Its position among the given requests, from 0.
        generation: `Purges.generation` before it was computed.
        draft: The output of the model's draft for it, float32 (C,); None without one.
        draft_s: Time of the draft.
        drafted_by: Name of the draft; "" without one.
        own: The same request computed by the model itself, if an engine computed this one; else None.
    """

    scope: Scope
    row: Row
    tokens: Sequence[int]
    target: Floats
    answer: Floats
    output: Floats
    entry: "Entry"
    head: str
    seconds: float
    label: Any = None
    number: int = 0
    generation: int = 0
    draft: Floats | None = None
    draft_s: float = 0.0
    drafted_by: str = ""
    own: "Observation | None" = None
