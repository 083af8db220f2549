"""A request that was computed, with all that was seen of it: what calibrations learn from.

Sizes: T tokens, D hidden width, S width of a signature, C logits.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcache.arrays import Floats
from llmcache.request.rows import Row, Scope

if TYPE_CHECKING:
    from llmcache.bank import Entry


@dataclass(slots=True)
class Observation:
    """One request that was computed.

    Attributes:
        scope: Its scope.
        row: The request.
        features: Content tokens, float32 (T,), -1 elsewhere.
        target: Mean row of the last hidden states that its entry keeps, float32 (D,).
        answer: Signature of its answer (S,).
        output: What the model put out for it, float32 (C,).
        entry: What is stored of it. Nobody writes to it.
        head: Digest of the weights outside the trunk, as they were then.
        seconds: From the trunk's arguments to the answer, with what the cache did meanwhile, by the row.
        label: What it should have been answered, where that was given.
        number: Which of the requests that were given it is, from 0.
        generation: Of its namespace, before it was computed, see `Bank.generation`.
    """

    scope: Scope
    row: Row
    features: Floats
    target: Floats
    answer: Floats
    output: Floats
    entry: "Entry"
    head: str
    seconds: float
    label: Any = None
    number: int = 0
    generation: int = 0
