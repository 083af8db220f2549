"""Verdicts on claims."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from experiments.runs.read import Run

#: Finished runs by experiment.
Results = Mapping[str, Sequence[Run]]


class Verdict(StrEnum):
    HOLDS = "holds"
    HOLDS_UNDER = "holds under"
    DOES_NOT_HOLD = "does not hold"
    INCOMPLETE = "incomplete"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict  # on the claim as written
    measured: str
    why: str
    condition: str = ""  # with `HOLDS_UNDER`, when it holds; else a note to the verdict


NOTHING = Judgement(Verdict.NOT_MEASURED, "", "")
