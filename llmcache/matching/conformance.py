"""What every decision has to do, as a check for classes from outside the library and for its own."""

from collections.abc import Callable, Sequence
from math import inf, isnan

import numpy as np

from llmcache.matching.decision import Decision, Evidence
from llmcache.registry import rule


def check_decision(make: Callable[[], Decision], seed: int = 0) -> None:
    """Show it neighbours of every number up to `k`, before and after it could learn, and take up its state."""
    decision, rng = make(), np.random.default_rng(seed)
    _check_choices(decision, [_evidence(decision, rng, n)[0] for n in range(decision.k + 1) for _ in range(20)])
    seen, is_right = zip(*(_evidence(decision, rng, decision.k) for _ in range(300)), strict=True)
    decision.fit(seen, is_right)
    asked = [_evidence(decision, rng, n)[0] for n in range(decision.k + 1) for _ in range(20)]
    chosen = _check_choices(decision, asked)
    other = make()
    other.restore(decision.state())
    rule(_check_choices(other, asked) == chosen, "restore: chooses as the one whose state it takes up")


def _evidence(decision: Decision, rng: np.random.Generator, n: int) -> tuple[Evidence, list[bool]]:
    """Neighbours, likelier right the more alike, some without an answer; and which of them are right."""
    similarity = np.sort(rng.uniform(0.2, 1, n))[::-1]
    is_right = rng.random(n) < similarity**2
    answers = np.where(is_right, 0, rng.integers(-1, 3, n))  # -1: none
    agree = ((answers[:, None] == answers) & (answers >= 0)).tolist() if decision.reads_answers else ()
    return Evidence(similarity.tolist(), agree, rng.normal(is_right, 0.5).tolist()), is_right.tolist()


def _check_choices(decision: Decision, asked: Sequence[Evidence]) -> list[tuple[int, float]]:
    chosen = []
    for seen in asked:
        n = len(seen.similarity)
        if not n:
            continue  # it is not asked then
        number, risk = decision.choose(seen)
        rule(decision.choose(seen) == (number, risk), "choose: the same of the same evidence")
        rule(not isnan(risk), "choose: a risk that is a number")
        if risk < inf:
            least, most = decision.risk_range
            rule(least - 1e-9 <= risk <= most + 1e-9, "choose: a risk within risk_range, or infinite")
            rule(0 <= number < n, "choose: the number of a neighbour")
            is_told = not decision.reads_answers or seen.agree[number][number]
            rule(is_told, "choose: no neighbour without an answer where answers are read")
        chosen.append((number, risk))
    return chosen
