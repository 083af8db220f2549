"""The student gives the answer that the forecast favours, by an example of it, under a calibrated limit."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcache import LLMCache
from llmcache.errors import ConfigError
from llmcache.matching import Combined, Evidence, Risk, Student
from llmcache.matching.risk import lead_of
from llmcache.reuse.chooser import NeighbourChooser
from tests import inside
from tests.calibration.test_calibrated_reuse import alone, ask
from tests.matching.test_decision import made
from tests.tiny_models import tokenizer
from tests.topics import N_CALIBRATED, N_TOPICS, batched, calibrated, classifier, requests


def led(n: int, seed: int = 0) -> tuple[list[Evidence], list[list[bool]]]:
    """Evidence with a lead, and who is right, the forecast's own answer last: the likelier, the further it leads."""
    rng = np.random.default_rng(seed)
    evidence, is_right = made(n, seed=seed)
    favours = rng.normal(0, 1, (n, 5)).astype(np.float32)
    leads = [lead_of(favour, float(favour.std()), 6)[1] for favour in favours]
    gaps = np.array([-lead[1] for lead in leads])
    told = rng.random(n) < 1 / (1 + np.exp(1 - 3 * gaps))
    seen = [Evidence(one.similarity, one.agree, one.favour, lead) for one, lead in zip(evidence, leads, strict=True)]
    return seen, [[*right, bool(last)] for right, last in zip(is_right, told, strict=True)]


def test_a_lead_is_that_of_the_answer_favoured_most() -> None:
    first, near = lead_of(np.array([-1.0, 2.0, 1.5], np.float32), 1.0, 4)
    assert first == 1
    assert lead_of(np.array([1.0], np.float32), 0.0, 4)[0] == 0  # one answer was ever given: it has no rival
    assert near[0] == 2.0 and near[1] == pytest.approx(-0.5)
    assert len(near) == len(lead_of(np.array([1.0], np.float32), 0.0, 4)[1])


@pytest.mark.slow
def test_a_student_doubts_less_the_further_its_answer_leads() -> None:
    student = Student()
    evidence, is_right = led(800)
    assert {student.choose(one)[1] for one in evidence[:5]} == {np.inf}  # before it has learned
    student.fit(evidence, is_right)
    assert student.choose(Evidence([0.9] * 8))[1] == np.inf  # without a forecast
    fresh, right = led(600, seed=1)
    chosen = [student.choose(one) for one in fresh]
    assert {number for number, _ in chosen} == {8}  # none of the eight neighbours
    changes = np.array([not one[-1] for one in right])[np.argsort([risk for _, risk in chosen])]
    assert changes[:200].mean() < changes[200:400].mean() < changes[400:].mean()


@pytest.mark.slow
def test_combined_takes_whoever_is_doubted_less() -> None:
    evidence, is_right = led(800)
    both, risk, student = Combined(), Risk(), Student()
    for one in (both, risk, student):
        one.fit(evidence, is_right)
    fresh = led(200, seed=1)[0]
    chosen = [both.choose(one) for one in fresh]
    assert chosen == [min(risk.choose(one), student.choose(one), key=lambda found: found[1]) for one in fresh]
    assert {number == 8 for number, _ in chosen} == {True, False}
    untold = [Evidence(one.similarity, one.agree, one.favour) for one in fresh]
    assert [both.choose(one) for one in untold] == [risk.choose(one) for one in untold]
    assert both.choose(Evidence([], (), (), fresh[0].lead))[0] == 0  # no neighbour: it is the forecast's, number 0


@pytest.mark.parametrize("kind", [Student, Combined])
def test_what_was_saved_doubts_the_same(kind: type[Any]) -> None:
    taught, loaded = kind(), kind()
    taught.fit(*led(400))
    loaded.restore(taught.state())
    for evidence in led(50, seed=5)[0]:
        assert loaded.choose(evidence) == taught.choose(evidence)


@pytest.fixture(scope="module", params=["student", "combined"])
def cache(request: pytest.FixtureRequest) -> Iterator[LLMCache]:
    with calibrated(decide=request.param, audit=0) as cache:
        yield cache


@pytest.mark.slow
def test_an_answer_is_given_by_an_example_of_it_and_counts_as_the_students(cache: LLMCache) -> None:
    is_alone = cache.config.decide.name == "student"
    fresh = requests(150, seed=7)[0]
    own, before = alone(cache, fresh), cache.stats().hits.get("student", 0)
    examples, n_changed, n_told = {}, 0, 0
    for inputs, answer in zip(fresh, own, strict=True):
        told = int(cache(**inputs).logits.argmax())
        (outcome,) = cache.last
        n_changed += told != answer
        assert not (is_alone and outcome.rung == "semantic")
        if outcome.rung == "student":
            n_told += 1
            assert outcome.similarity is None
            assert examples.setdefault(told, outcome.source) == outcome.source  # one for each answer
    assert n_told > (30 if is_alone else 0) and cache.stats().hits["student"] == before + n_told
    assert len(examples) <= N_TOPICS and n_changed / len(fresh) <= 0.1
    assert cache.stats().errors == 0


@pytest.mark.slow
def test_a_replay_tells_the_rungs(cache: LLMCache) -> None:
    assert cache.calibrated is not None and cache.calibration is not None and cache.calibration.chosen is not None
    fresh = requests(60, seed=11)[0]
    found = cache.calibrated.fitter.look_up(cache.observe(batched(fresh)), set())
    limit = cache.calibration.chosen.limit
    assert [one.rung if one.risk <= limit else None for one in found] == ask(cache, fresh)[1]


@pytest.mark.slow
@pytest.mark.parametrize("decide", ["student", "combined"])
def test_a_saved_one_gives_answers_by_the_same_examples_whatever_was_stored_first(decide: str, tmp_path: Path) -> None:
    """Its limit was chosen with these: others of the same answer have other logits."""
    learned, fresh = requests(N_CALIBRATED)[0], requests(60, seed=7)[0]

    def told(cache: LLMCache) -> tuple[list[str], list[tuple[list[float], str | None]]]:
        assert cache.calibrated is not None
        answers = [(cache(**one).logits[0].tolist(), cache.last[0].rung) for one in fresh]
        return cache.calibrated.chooser.examples, answers

    with LLMCache.wrap(classifier(), auto_bypass=False, audit=0, decide=decide) as cache:
        for one in batched(learned[::-1]):
            cache(**one)
        cache.calibrate(batched(learned), max_drop=0.05)
        if decide == "student":  # searches nothing
            assert not inside.banks(cache)._index and cache.stats().index_nbytes == 0
        cache.save(tmp_path)
        examples, answers = told(cache)
        assert examples and "student" in {rung for _, rung in answers}
    with LLMCache.load(classifier(), tmp_path) as cache:
        assert told(cache) == (examples, answers)


@pytest.mark.slow
def test_a_save_while_another_thread_purges_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with calibrated(decide="student", audit=0) as cache, ThreadPoolExecutor(1) as pool:
        banks, saved = inside.banks(cache), []
        purge = banks.purge

        def slowly(namespace: str) -> int:
            n_requests = purge(namespace)
            saved.append(pool.submit(cache.save, tmp_path))
            wait(saved, timeout=0.5)
            return n_requests

        monkeypatch.setattr(banks, "purge", slowly)
        cache.purge(namespace="default")
        saved[0].result()
    with LLMCache.load(classifier(), tmp_path) as cache:
        assert cache.calibration is None and cache.stats().n_stored == 0


@pytest.mark.slow
def test_examples_stay_where_sources_grow() -> None:
    settings = {"decide": "student", "sources": "growing", "max_entries": N_CALIBRATED}
    with LLMCache.wrap(classifier(), auto_bypass=False, audit=0, **settings) as cache:
        cache.calibrate(batched(requests(N_CALIBRATED)[0]), max_drop=0.05)
        kept = [record.key for record in inside.records(cache) if record.is_pinned]
        assert 1 < len(kept) <= N_TOPICS
        rungs = ask(cache, requests(N_CALIBRATED, seed=3)[0])[1]
        assert rungs[-50:].count("student") > 5
        assert {*kept} <= {record.key for record in inside.records(cache)}


@pytest.mark.slow
def test_a_changed_answer_strikes_no_example(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = NeighbourChooser.choose

    def wrongly(self: NeighbourChooser, *args: Any) -> Any:
        (found,), (examples,) = choose(self, *args), self._examples.values()
        return [type(found)(examples.neighbours[0], found.risk, found.at_first, found.rung)] if found else [found]

    with calibrated(decide="student", audit=1.0, audit_in_background=False, max_drop=0.3) as cache:
        monkeypatch.setattr(NeighbourChooser, "choose", wrongly)
        ask(cache, requests(60, seed=7)[0])
        cache.drain()
        audit = cache.stats().audit
    assert audit is not None and audit.n_alarms > 0  # what is wrong is heard all the same
    assert audit.n_quarantined == 0


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"fingerprint": "mean"}, "forecasts nothing"),
        ({"payload": "sequence"}, "another length"),
        ({"answer": "embedding"}, "a class or a set of labels"),
        ({"gate": True}, "the gate compares a request"),
        ({"tau": 0.9, "learn": None}, "calibrated, not set by tau"),
        ({"decide": {"name": "student", "k": 3}}, "decide"),
    ],
)
def test_what_leaves_a_student_nothing_to_serve_is_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        LLMCache.wrap(classifier(), tokenizer=tokenizer(), **{"decide": "student", "learn": 2500, **settings})
