"""Measure `payback`: learning is counted apart, pays back when it does, and a pattern of hits comes again as it was."""

import numpy as np
import pytest
import torch

from experiments.measures.base import serve_once
from experiments.measures.bench.pattern import Pattern, Settings
from experiments.measures.payback import payback
from experiments.methods.base import Served
from experiments.methods.cached import Cached
from experiments.methods.calibrated import Calibrated
from experiments.metrics.trace import Trace
from experiments.replay.rehearsal import Rehearsal, grow
from experiments.support.folders import Folders
from experiments.tasks import build, make_task
from experiments.tasks.workload import Workload
from llmcache.calibration.risk_target import RiskTarget
from tests.experiments.measuring import TASK, learning, measured, told
from tests.tiny_models import save_bert

LEARN, N = 120, 220
CLAIM = RiskTarget(0.2, 0.05, "changed", "growing", 0)
CACHE = {"answer": "class", "sources": "growing"}
MORE = {"metric": "accuracy", "max_drops": [0.1, 0.3], "rounds": 2, "cache": CACHE}
VALUES = learning("payback", task=TASK | {"limit": N}, learn=LEARN, **MORE)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build(make_task(VALUES["task"]), Folders(), 0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_bert(tmp_path_factory.mktemp("tiny") / "bert", " ".join(f"word{i}" for i in range(400))))


def test_a_method_that_learns_serves_as_a_replay_says(workload: Workload) -> None:
    method = Calibrated(workload, {"answer": "class", "audit": 0}, LEARN, CLAIM)
    answers, notes = serve_once(method, range(N))
    found = method.calibration
    assert found is not None and found.chosen is not None and found.sources == "growing"
    rehearsal = Rehearsal(workload, {"answer": "class"})
    learned, later = rehearsal.observed[:LEARN], rehearsal.observed[LEARN:]
    rehearsal.calibrated.calibrate(learned, CLAIM)
    served, sources = grow(rehearsal.calibrated, learned, later, found.chosen.limit)
    assert {note.by for note in notes[:LEARN]} == {"computed"}
    assert [note.by for note in notes[LEARN:]] == served.tolist()
    assert answers == rehearsal.answers[:LEARN] + rehearsal.answers_from(LEARN, sources)
    assert {"semantic", "computed"} <= set(served)
    again, _ = serve_once(method, range(N))  # a second round learns anew
    assert again == answers


def test_what_the_audit_looks_into_is_done_by_the_end_of_the_stream(workload: Workload) -> None:
    method = Calibrated(workload, {"answer": "class", "audit": 1.0}, LEARN, CLAIM)
    method.begin()
    notes = []
    with torch.inference_mode():
        for number in range(N):
            method.ask(number)
            notes.append(method.last())
    hits = [note for note in notes if note.by == "semantic"]
    assert len(hits) > 5 and all(note.similarity is not None and note.source is not None for note in hits)
    audit = method.stats.audit
    assert audit is not None and (audit.n_recomputed, audit.n_waiting) == (len(hits), 0)
    method.end()


def test_learning_is_paid_back_when_as_much_was_saved() -> None:
    def paid_back(base: list[list[int]], ms: list[list[int]], learn: int) -> dict[str, float | None]:
        return payback(np.array(base), np.array(ms), learn)

    base = [[10, 10, 10, 10, 10, 10]]
    figures = paid_back(base, [[13, 16, 5, 8, 8, 8]], learn=2)
    assert figures == {"learning_extra_s": pytest.approx(0.009), "paid_back_after": 3.0}
    assert paid_back(base, [[13, 16, 9, 9, 9, 9]], learn=2)["paid_back_after"] is None
    assert paid_back(base, [[10, 10, 12, 12, 12, 12]], learn=2)["paid_back_after"] == 0.0
    rounds = paid_back([[10] * 4] * 3, [[11, 9, 9, 9], [12, 9, 9, 9], [13, 9, 9, 9]], learn=1)
    assert rounds == {"learning_extra_s": pytest.approx(0.002), "paid_back_after": 2.0}


def test_a_trace_after_some_requests_is_that_of_the_others() -> None:
    nothing = np.full((2, 3), "computed")
    trace = Trace(np.array([[1, 2, 3], [4, 5, 6]]), nothing, np.zeros((2, 3), dtype=bool), [0] * 3, [Served()] * 3)
    later = trace.after(2)
    assert later.ms.tolist() == [[3], [6]]
    assert later.served.shape == later.evicting.shape == (2, 1)
    assert (len(later.answers), len(later.notes)) == (1, 1)


def test_figures_are_of_the_later_requests(tiny: str) -> None:
    outcome = measured(VALUES, replay={"model": tiny, "seq_len": 24, "limit": 40, "fill": 5})
    metrics = outcome.metrics
    assert (metrics["n"], metrics["n_counted"], metrics["learn"]) == (N, N - LEARN, LEARN)
    assert list(metrics["methods"]) == ["llmcache 0.1", "llmcache 0.3"]
    for figures in metrics["methods"].values():
        assert figures["cache_ms"]["n"] == 2 * (N - LEARN)
        h, o, c = figures["hit_rate"], figures["miss_overhead"], figures["hit_cost"]
        assert figures["speedup_expected"] == pytest.approx(1 / ((1 - h) * (1 + o) + h * c))
        assert figures["calibration"]["metric"] == "accuracy"
        assert 0 < figures["calibration"]["n_tested"] < LEARN
    assert metrics["methods"]["llmcache 0.3"]["hit_rate"] > 0.2
    assert len(outcome.rows) == 4 * 2  # each way and the model alone beside it, by round
    text = told(VALUES, outcome)
    assert text.count("accuracy, growing") == 2 and "100 x 2" in text and "40 x 2" in text
    assert len({tuple(row) for row in metrics["summary"]}) == 1
    # The pattern of hits comes again.
    for row in outcome.metrics["replayed"].values():
        assert row["as_in_the_pattern"] == 1.0 and row["n"] == 40
        assert row["speedup_asked"] == pytest.approx(0.9 / ((1 - row["hit_rate"]) * 1.03 + 0.02 * row["hit_rate"]))
    assert outcome.metrics["replayed"]["llmcache 0.3"]["hit_rate"] > 0.1


@pytest.mark.parametrize("wanted", [[True] * 6, [False] * 6, [True, False, False, True, True, False]])
def test_hits_and_misses_are_made_as_asked(wanted: list[bool], tiny: str) -> None:
    settings = Settings(model=tiny, seq_len=24, fill=3)
    workload = Pattern(settings, wanted, 0)
    _, notes = serve_once(Cached(workload, {"tau": settings.tau}), range(len(workload.requests)))
    assert [note.by for note in notes[:3]] == ["computed"] * 3
    assert [note.by for note in notes[3:]] == ["semantic" if hits else "computed" for hits in wanted]
