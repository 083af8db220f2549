"""A pattern of hits and misses, replayed on another model: what a hit rate is worth there.

Requests are made up so that hits and misses come as they came elsewhere: a miss asks what was never asked, a hit asks a
stored request with one token changed, which the nearest one serves. The first requests fill the cache.
"""

import random
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from experiments.models.architectures import Requests, build, check
from experiments.support.section import Section
from experiments.tasks.plain import Plain
from experiments.tasks.workload import Request


class Settings(Section):
    """What the pattern is replayed on."""

    model: str = "bert-base"  # architecture, with random weights, which cost the clock the same, or a folder
    seq_len: int = Field(default=128, ge=8)  # tokens a request
    limit: int = Field(default=300, ge=1)  # requests of the pattern, from its beginning
    fill: int = Field(default=32, ge=1)  # requests before it, all computed and stored
    # Threshold between requests that were made up anew and those with one token changed.
    tau: float = Field(default=0.98, gt=0.0, le=1.0)


class Pattern(Plain):
    """A classifier and its made-up requests: those that fill the cache, then the pattern. No answer is right."""

    tokenizer = None

    def __init__(self, settings: Settings, is_hit: Sequence[bool], seed: int) -> None:
        check(settings.model, settings.seq_len)
        pair = build(settings.model, seed, "cpu")
        self.module = pair.model
        self.facts = {"weights": pair.weights}
        made = Requests(pair.model.config, 1, settings.seq_len, seed, "cpu")
        rng = random.Random(seed)
        stored = [made.fresh() for _ in range(settings.fill)]
        asked = list(stored)
        for hits in is_hit[: settings.limit]:
            asked.append(made.near(rng.choice(stored)) if hits else made.fresh())
            if not hits:
                stored.append(asked[-1])
        self.requests = [Request(str(i), made.inputs(ids), "", None) for i, ids in enumerate(asked)]

    def answer(self, output: Any, number: int) -> int:
        """Column of the highest logit."""
        return int(output.logits.argmax(dim=-1))

    def show(self, answer: int) -> str:
        return str(answer)
