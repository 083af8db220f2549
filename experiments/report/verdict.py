"""What can become of a claim."""

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
    verdict: Verdict  # of the claim as it is written
    measured: str
    why: str
    condition: str = ""  # under which it holds, with `HOLDS_UNDER`; else what has to be said with the verdict


NOTHING = Judgement(Verdict.NOT_MEASURED, "", "")
