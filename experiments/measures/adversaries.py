"""Measure `adversaries`: small edits of stored requests that make other requests of them. How many are served?

    first `learn` requests   calibrate, with frozen sources; once for each gate and each loss that is allowed
    edits of the sources     asked: a hit is *false* if the model's own answer to the edited request is another one
    later requests           asked: hits that the gate costs

All requests are computed once; who would serve whom the library's own code decides, as it does when it serves.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Self

from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.edits import edits_of
from experiments.measures.learning import LearningExperiment, choice_of, limit_of
from experiments.methods.cached import Cached
from experiments.metrics.metrics import share_interval
from experiments.models.loading import encode
from experiments.replay.rehearsal import Rehearsal
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from llmcache import Calibration
from llmcache.lab import CalibratedReuse, Observation, RiskTarget, split

Gate = bool | dict[str, Any]


class Adversaries(LearningExperiment):
    """Settings of the measure."""

    # Content gates that are compared: false, true, or options of one.
    gates: tuple[Gate, ...] = Field(default=(False, True), min_length=1)
    n_edits: int = Field(default=500, ge=1)  # most edited requests of each kind

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        """Check all settings, those of each gate included; see `Section.make`."""
        made = super().make(values, name)
        for gate in made.gates:
            Cached.check({**made.cache, "gate": gate}, "gates")
        return made


@dataclass(frozen=True, slots=True)
class Edited:
    """An edited request."""

    kind: str
    origin: int  # number of the request that was edited
    text: str
    case: Observation


def run(experiment: Adversaries, folders: Folders) -> Outcome:
    """Calibrate with each gate, and ask the edited requests."""
    rehearsal = experiment.rehearse(folders)
    workload = rehearsal.workload
    edited = _edit(experiment, rehearsal)
    rows, settings = [], []
    for gate in experiment.gates:
        cache, calibrated = rehearsal.beside({**experiment.cache, "gate": gate})
        for claim in experiment.frozen_claims:
            cache.clear()
            found = rehearsal.calibrate(calibrated, experiment.learn, claim)
            asked = _ask(rehearsal, calibrated, found, edited)
            at = {"gate": name_of(gate), "max_drop": claim.max_drop}
            rows += [at | row for row in asked]
            settings.append(at | _figures(experiment, rehearsal, calibrated, claim, found) | {"edits": _by_kind(asked)})
        cache.unwrap()
    metrics = {
        **experiment.about(workload),
        "learn": experiment.learn,
        "settings": settings,
        "summary": [row for setting in settings for row in _shown(setting)],
    }
    return Outcome(rows, metrics)


def name_of(gate: Gate) -> str:
    """A gate in a table: what is on and which of its options were set."""
    if not isinstance(gate, dict):
        return "on" if gate else "off"
    return " ".join(f"{key}={value}" for key, value in gate.items()) or "on"


def _edit(experiment: Adversaries, rehearsal: Rehearsal) -> list[Edited]:
    """Edited requests, made of those that serve whichever loss is allowed, and computed."""
    parts = [set(split(experiment.learn, claim)[0]) for claim in experiment.frozen_claims]
    requests, rng = rehearsal.workload.requests, Random(experiment.seed)
    texts = [request.text for request in requests]
    drafts = []
    for kind, edit in edits_of(texts[: experiment.learn]).items():
        origins = sorted(set.intersection(*parts))
        rng.shuffle(origins)
        made = [(kind, i, text) for i in origins if (text := edit(texts[i], rng)) is not None]
        drafts += made[: experiment.n_edits]
    tokenizer, length = rehearsal.workload.tokenizer, experiment.task.max_length
    asked = tracked(drafts, len(drafts), "Computing edited requests")
    cases = rehearsal.cache.observe(encode(tokenizer, text, length) for *_, text in asked)
    known = {case.row.key for case in rehearsal.observed}  # an edit that somebody asked is no adversary
    made = zip(drafts, cases, strict=True)
    return [Edited(*draft, case) for draft, case in made if case.row.key not in known]


def _ask(
    rehearsal: Rehearsal, calibrated: CalibratedReuse, found: Calibration, edited: Sequence[Edited]
) -> list[dict[str, int | str | None]]:
    """One row an edited request: whether it is served, by whom, and whether that changes its answer."""
    # Its text is made of the data set's, and stays out of the results.
    limit = limit_of(found)
    known = {case.row.key: (i, case) for i, case in enumerate(rehearsal.observed)}
    risks, sources = calibrated.fitter.risks([one.case for one in edited], ())
    rows: list[dict[str, int | str | None]] = []
    for one, risk, key in zip(edited, risks, sources, strict=True):
        number, source = known[key] if key is not None and risk <= limit else (None, None)
        rows.append(
            {
                "kind": one.kind,
                "origin": rehearsal.workload.requests[one.origin].id,
                "source": None if number is None else rehearsal.workload.requests[number].id,
                "is_hit": int(number is not None),
                "by_origin": int(number == one.origin),
                "is_false": int(source is not None and _differ(source, one.case)),
                "is_another": int(_differ(rehearsal.observed[one.origin], one.case)),
            }
        )
    return rows


def _differ(one: Observation, other: Observation) -> bool:
    """Whether the model puts them into different classes."""
    return bool(one.answer[0] != other.answer[0])


def _by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each kind of edit, and of all: how many were served, and how many of those with a changed answer."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    groups = {kind: [row for row in rows if row["kind"] == kind] for kind in kinds} | {"all": list(rows)}
    return {kind: _counts(group) for kind, group in groups.items() if group}


def _counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    n, total = len(rows), {key: sum(row[key] for row in rows) for key in ("is_hit", "is_false", "by_origin")}
    return {
        "n": n,
        "another_answer": sum(row["is_another"] for row in rows) / n,
        "hit_rate": total["is_hit"] / n,
        "hit_rate_ci": share_interval(total["is_hit"], n),
        "by_origin": total["by_origin"] / n,
        "false_reuse": total["is_false"] / n,
        "false_reuse_ci": share_interval(total["is_false"], n),
    }


def _figures(
    experiment: Adversaries, rehearsal: Rehearsal, calibrated: CalibratedReuse, claim: RiskTarget, found: Calibration
) -> dict[str, Any]:
    """What was chosen, and what became of the later requests of the stream."""
    served, sources = experiment.frozen(rehearsal, calibrated, claim).serve(limit_of(found))
    told = rehearsal.answers_from(experiment.learn, sources)
    return {**choice_of(found), "n_sources": found.n_sources, **experiment.figures(rehearsal, told, served)}


def _shown(setting: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for kind, counts in setting["edits"].items():
        yield {
            "gate": setting["gate"],
            "asked: changed": setting["max_drop"],
            "hit rate": setting["hit_rate"],
            "edit": kind,
            "n": counts["n"],
            "edits served": counts["hit_rate"],
            "with another answer": counts["false_reuse"],
        }
