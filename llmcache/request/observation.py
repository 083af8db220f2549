"""A request that was computed, with all that was seen of it: what calibrations learn from.

Sizes: F0 features, D hidden width, S width of a signature, C logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmcache.arrays import Floats
from llmcache.request.rows import Row, Scope


@dataclass(slots=True)
class Observation:
    """One request that was computed.

    Attributes:
        scope: Its scope.
        row: The request.
        features: What its fingerprint is projected from (F0,).
        target: What its fingerprint is to resemble: the mean row of the payload of the last layer, float32 (D,).
        answer: Signature of its answer (S,).
        output: What the model put out for it, float32 (C,).
        states: What would be stored of it, by layer, and may be once the requests are learned from: not to be written
            to. Empty where it is stored already, and not to be kept beside that.
        head: Digest of the weights outside the trunk, as they were then.
        seconds: From the trunk's arguments to the answer, with what the cache did meanwhile, by the row.
        label: What it should have been answered, where that was given.
        number: Which of the requests that were given it is, from 0.
        generation: Of its namespace in the store behind memory, before it was computed; 0 without one.
        purges: `Purges.now` of the banks, likewise.
    """

    scope: Scope
    row: Row
    features: Floats
    target: Floats
    answer: Floats
    output: Floats
    states: Mapping[int, Mapping[str, Tensor]]
    head: str
    seconds: float
    label: Any = None
    number: int = 0
    generation: int = 0
    purges: int = 0
