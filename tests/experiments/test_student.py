"""The student, a baseline of calibrated reuse: the larger its answer's lead, the less it abstains."""

import numpy as np

from experiments.replay.rehearsal import Frozen, Rehearsal
from experiments.replay.student import Student
from llmcache.lab import RiskTarget
from tests.experiments.measuring import LEARN, N

CLAIM = RiskTarget(0.2, 0.05, "changed", "frozen", 0)


def test_each_answer_is_given_by_one_example_and_the_likelier_wrong_the_riskier(rehearsal: Rehearsal) -> None:
    student = Student(rehearsal.calibrated)
    learned, later = rehearsal.observed[:LEARN], rehearsal.observed[LEARN:]
    limits = student.learn(learned)
    assert (np.diff(limits) > 0).all() and limits[0] >= 0 and limits[-1] <= 0.5
    answers = {case.row.key: case.answer for case in learned}
    found = student.look_up(later, set())
    examples = {answers[one.key].tobytes(): one.key for one in found}
    assert len(examples) == len({one.key for one in found}) > 2
    changed = np.array([(case.answer != answers[one.key]).any() for case, one in zip(later, found, strict=True)])
    order = np.argsort([one.risk for one in found])
    assert changed[order[: N // 8]].mean() < changed[order[-N // 8 :]].mean()
    key = later[0].row.key
    assert student.look_up(later[:1], {key}) == [(-np.inf, key, "exact")]


def test_its_limit_is_chosen_on_what_it_did_not_learn_from(rehearsal: Rehearsal) -> None:
    student = Student(rehearsal.calibrated)
    found = student.calibrate(rehearsal.observed[:LEARN], CLAIM)
    assert found.chosen is not None and found.chosen.bound <= CLAIM.max_drop and found.n_tested >= 50
    served = Frozen(student, rehearsal.observed[:LEARN], rehearsal.observed[LEARN:]).serve(found.chosen.limit)[0]
    assert {"student", "exact", "computed"} >= set(served) and "student" in served
