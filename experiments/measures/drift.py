"""Measure `drift`: half of the intents come only after the middle of the stream. How soon is that known?

    first half     requests of one half of the intents, drawn by seed; the first `learn` calibrate
    second half    what is left: the other intents, mostly
    windows        changed answers every `window` requests, without audit and with each one
    unchanged      calibrated on `learn` requests of all intents, then asked the others again and again, drawn alike or
                   some of them often (Zipf): how many of these streams are told to have changed, too?

The claim is void once requests are drawn otherwise. That is told from requests alone, audited or not
(`llmcache/calibration/drift.py`); the audit looks into hits. Both are live here, and what was drawn is audited at
once. Streams that do not change are long and many: what is compared of each request was found once, and is replayed.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import combinations
from random import Random
from typing import Any, Literal

import numpy as np
from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.learning import LearningExperiment
from experiments.replay.rehearsal import Rehearsal
from experiments.replay.serving import Asked, has_drifted, requests_expected
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.tasks import build
from experiments.tasks.workload import Workload
from llmcache import ConfigError, LLMCache
from llmcache.lab import DriftDetector, Floats, Marks, Profile, RiskTarget, Sources, split

Late = Literal["any", "alike"]

_REPEATS = {"alike": 0.0, "zipf": 1.0}  # the request of rank r comes with probability proportional to r^-power


class Drift(LearningExperiment):
    """Settings of the measure."""

    # Least probabilities with which hits are audited, that are compared.
    audits: tuple[float, ...] = Field(default=(0.0, 0.05, 0.25), min_length=1)
    sources: tuple[Sources, ...] = ("frozen", "growing")  # who serves
    # Which intents come late. `any`: half of them, drawn by seed. `alike`: one of each two that the head tells apart
    # least, so that what is new is like what was seen.
    late: Late = "any"
    window: int = Field(default=500, ge=1)  # requests over which answers that changed are counted
    n_unchanged: int = Field(default=20, ge=0)  # streams that do not change, of each kind and claim
    length: int = Field(default=20_000, ge=1)  # requests of each of them


def run(experiment: Drift, folders: Folders) -> Outcome:
    """Serve the stream once for each kind of sources, loss and audit."""
    workload, change = drifting(build(experiment.task, folders, experiment.seed), experiment.late, experiment.seed)
    if change <= experiment.learn:
        raise ConfigError(
            f"learn={experiment.learn}: the intents change after {change} requests; learn from fewer, or raise "
            "task.limit or lower head.fit_share"
        )
    rehearsal = Rehearsal(workload, experiment.cache)
    windows, runs = [], []
    for audit in experiment.audits:
        cache, calibrated = rehearsal.beside({**experiment.cache, "audit": audit})
        for sources in experiment.sources:
            for drop in experiment.max_drops:
                cache.clear()
                risk_target = experiment.risk_target(drop, sources)
                rehearsal.calibrate(calibrated, experiment.learn, risk_target)
                named = {"sources": sources, "audit": audit, "max_drop": drop}
                watched = _Watched(cache, change - experiment.learn)
                later = range(experiment.learn, len(rehearsal.observed))
                watched.serve(rehearsal, later, f"Serving {sources}, audit {audit:g}, {drop:g}")
                windows += [named | row for row in watched.windows(experiment.window, experiment.learn)]
                runs.append(named | watched.figures(risk_target, audit))
        cache.unwrap()
    unchanged = _unchanged(experiment, rehearsal)
    metrics = {
        **experiment.about(workload),
        "learn": experiment.learn,
        "change": change,
        "runs": runs,
        "unchanged": unchanged,
        "summary": [_shown(figures) for figures in runs],
    }
    return Outcome(windows, metrics)


def drifting(workload: Workload, late: Late, seed: int) -> tuple[Workload, int]:
    """Requests of half of the intents first, then the rest, mixed; and the number of the rest's first one."""
    rng, intents = Random(seed), sorted({request.reference for request in workload.requests})
    if late == "alike":
        weights = workload.module.get_parameter("linear.weight").detach().numpy()
        known = [intent for intent in intents if intent < len(weights)]
        early = {rng.choice(pair) for pair in _pairs(known, weights)}
    else:
        early = set(rng.sample(intents, len(intents) // 2))
    first = [request for request in workload.requests if request.reference in early]
    change = min(len(first), len(workload.requests) // 2)
    rest = [request for request in workload.requests if request.reference not in early] + first[change:]
    rng.shuffle(rest)
    other = copy(workload)
    other.requests = first[:change] + rest
    return other, change


def _pairs(intents: Sequence[int], weights: Floats) -> list[tuple[int, int]]:
    """Columns of the head's weights (C, D) two by two, the most alike first; of an odd number one is left over."""
    unit = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    alike = unit @ unit.T
    pairs, left = [], set(intents)
    for one, other in sorted(combinations(intents, 2), key=lambda pair: -float(alike[pair])):
        if {one, other} <= left:
            pairs.append((one, other))
            left -= {one, other}
    return pairs


def _unchanged(experiment: Drift, rehearsal: Rehearsal) -> list[dict[str, Any]]:
    """How many streams of requests that are drawn like those of the calibration are told to be others."""
    rng, n = np.random.default_rng(experiment.seed), len(rehearsal.observed)
    order = rng.permutation(n).tolist()
    learned, rest = ([rehearsal.observed[i] for i in part] for part in np.split(order, [experiment.learn]))
    found = []
    for risk_target in experiment.frozen_claims:
        made = rehearsal.calibrated.calibrate(learned, risk_target)
        if made.watch is None or made.watch.profile is None:
            continue
        sources = {learned[i].row.key for i in split(len(learned), risk_target)[0]}
        marks = list(rehearsal.calibrated.fitter.marks(rest, sources).items())
        for kind, power in _REPEATS.items():
            weights = rng.permutation(np.arange(1.0, len(marks) + 1) ** -power)
            drawn = rng.choice(len(marks), (experiment.n_unchanged, experiment.length), p=weights / weights.sum())
            n_told = sum(_is_told(made.watch.profile, [marks[i] for i in numbers]) for numbers in drawn)
            named = {"max_drop": risk_target.max_drop, "repeats": kind, "n_different": len(marks)}
            found.append(named | {"n_streams": len(drawn), "length": experiment.length, "n_suspended": n_told})
    return found


def _is_told(profile: Profile, asked: Sequence[tuple[str, Marks]]) -> bool:
    likeness = DriftDetector(profile)
    return any(likeness.wants(key) and likeness.see(key, marks) for key, marks in asked)


class _Watched:
    """One cache that was just calibrated, and the later requests; those from `change` on are drawn otherwise."""

    def __init__(self, cache: LLMCache, change: int) -> None:
        self._cache = cache
        self._asked = Asked(cache)
        self._change = change  # places are those among the later requests
        self._said: list[str] = []  # by the cache of itself: at first, when the requests change, at the end
        self._noticed: list[int] = []  # requests until it said that they have changed, if it did

    def serve(self, rehearsal: Rehearsal, numbers: range, what: str) -> None:
        """Ask all requests, and take note of what the cache says; `what` stands before the bar."""
        self._said = [self._status]
        for place, number in enumerate(tracked(numbers, len(numbers), what)):
            if place == self._change:
                self._said.append(self._status)
            self._asked.ask(rehearsal.workload, number, rehearsal.answers[number])
            if not self._noticed and has_drifted(self._cache):
                self._noticed.append(place + 1)
        self._said.append(self._status)

    def windows(self, size: int, first: int) -> Iterator[dict[str, Any]]:
        """Hits and changed answers of every `size` requests; none has requests from both sides of the change."""
        hits, changed, change = self._asked.is_hit, self._asked.is_changed, self._change
        starts = [*range(0, change, size), *range(change, len(hits), size)]
        for start, end in zip(starts, [*starts[1:], len(hits)], strict=True):
            yield {
                "first": start + first,
                "n": end - start,
                "after_change": int(start >= change),
                "hit_rate": float(hits[start:end].mean()),
                "changed_answers": float(changed[start:end].mean()),
            }

    def figures(self, risk_target: RiskTarget, audit: float) -> dict[str, Any]:
        """What became of all of them, and when what was heard, given what was claimed and how many hits are drawn."""
        hits, changed, change = self._asked.is_hit, self._asked.is_changed, self._change
        late = [end for end in self._asked.alarms if end > change]
        noticed = [end for end in self._noticed if end > change]
        tightened, off = (self._after_change(late, i) for i in (0, 1))
        rate = float(changed[change : late[0] if late else None].mean())  # until the first alarm, which changes it
        return {
            "hit_rate_before": float(hits[:change].mean()),
            "changed_before": float(changed[:change].mean()),
            "hit_rate_after": float(hits[change:].mean()),
            "changed_after": float(changed[change:].mean()),
            "changed_until_alarm": rate,
            "n_after": len(hits) - change,
            "false_alarms": len(self._asked.alarms) - len(late),
            "requests_expected": requests_expected(risk_target, audit, change, rate),
            "requests_to_alarm": tightened[0],
            "hits_to_alarm": tightened[1],
            "requests_to_notice": self._after_change(noticed, 0)[0],
            "n_changed_until_notice": int(changed[change : noticed[0] if noticed else None].sum()),
            "noticed_too_early": bool(self._noticed) and not noticed,
            "requests_to_off": off[0],
            "hits_to_off": off[1],
            "status": dict(zip(("first", "at_change", "last"), self._said, strict=True)),
        }

    @property
    def _status(self) -> str:
        audit = self._cache.stats().audit
        assert audit is not None
        return audit.status

    def _after_change(self, ends: Sequence[int], i: int) -> tuple[int | None, int | None]:
        """Requests and hits from the change to alarm `i`, that of the alarm included; None where there was none."""
        if i >= len(ends):
            return None, None
        hits = self._asked.is_hit[self._change : ends[i]]
        return len(hits), int(hits.sum())


def _shown(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sources": figures["sources"],
        "audit": figures["audit"],
        "asked: changed": figures["max_drop"],
        "before": figures["changed_before"],
        "after": figures["changed_after"],
        "hits before": figures["hit_rate_before"],
        "hits after": figures["hit_rate_after"],
        "void said after": figures["requests_to_notice"],
        "changed until then": figures["n_changed_until_notice"],
        "alarm expected, requests": figures["requests_expected"],
        "alarm": figures["requests_to_alarm"],
        "in hits": figures["hits_to_alarm"],
        "off": figures["requests_to_off"],
        "status at the end": figures["status"]["last"],
    }
