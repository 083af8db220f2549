"""Measure `poisoning`: somebody has near-duplicates of others' requests stored, under other answers, to capture these.

    first `learn` requests   calibrate
    the attacker             picks targets among requests to come; edits each by one word until the model answers
                             otherwise; asks the edits that are nearest to the target, which are stored if they miss
    victims                  the targets, each `repeats` times, among other later requests, in a seeded order

A request is *captured* if a planted one serves it and its answer is another one than the model's own. The attacker may
ask the model all he wants, and knows what victims will ask, word for word: the worst case. With sources that are frozen
nothing that is planted after the calibration serves anybody else.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from experiments.measures.adversaries import Adversaries, name_of
from experiments.measures.base import Outcome
from experiments.measures.edits import words
from experiments.measures.learning import choice_of
from experiments.metrics.metrics import share_interval
from experiments.replay.rehearsal import Rehearsal
from experiments.replay.serving import Asked, asking, requests_expected
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from experiments.tasks.workload import Workload
from llmcache.calibration.risk_target import RiskTarget, Sources
from llmcache.request.observation import Observation

_N_PLACES = 3  # words of a target that the attacker tries to replace, each by every word that he knows


class Poisoning(Adversaries):
    """Settings of the measure; of `n_edits`, the words that the attacker tries in one place."""

    # Least probabilities with which hits are audited, that are compared.
    audits: tuple[float, ...] = Field(default=(0.0, 0.05), min_length=1)
    sources: tuple[Sources, ...] = ("growing", "frozen")  # who serves
    n_targets: int = Field(default=100, ge=1)  # requests that the attacker wants to capture
    n_planted: int = Field(default=8, ge=1)  # requests that he asks for each, at most
    repeats: int = Field(default=5, ge=1)  # how often each target is asked
    n_others: int = Field(default=500, ge=0)  # other later requests
    n_edits: int = Field(default=40, ge=1)


@dataclass(frozen=True, slots=True)
class Attack:
    """What the attacker asks, and who is asked for afterwards."""

    planted: Sequence[str]  # texts, those for one target after another
    victims: Sequence[int]  # numbers of later requests, in the order in which they are asked; targets several times
    targets: frozenset[int]  # which of them are targets


def run(experiment: Poisoning, folders: Folders) -> Outcome:
    """Attack once for each kind of sources, gate, loss and audit."""
    rehearsal = experiment.rehearse(folders)
    workload = rehearsal.workload
    attack = _plan(experiment, rehearsal)
    rows = list(_attacks(experiment, rehearsal, attack))
    metrics = {
        **experiment.about(workload),
        "learn": experiment.learn,
        "n_targets": len(attack.targets),
        "n_planted": len(attack.planted),
        "attacks": rows,
        "summary": [_shown(row) for row in rows],
    }
    return Outcome(rows, metrics)


# -- the attacker ------------------------------------------------------------------------------------------------------


def _plan(experiment: Poisoning, rehearsal: Rehearsal) -> Attack:
    rng, requests = Random(experiment.seed), rehearsal.workload.requests
    coming = list(range(experiment.learn, len(requests)))
    rng.shuffle(coming)
    targets, others = coming[: experiment.n_targets], coming[experiment.n_targets :][: experiment.n_others]
    known = sorted({word for request in requests[: experiment.learn] for word in words(request.text)})
    numbers = tracked(targets, len(targets), "Looking for requests to plant")
    planted = [text for number in numbers for text in _near(experiment, rehearsal, number, known, rng)]
    victims = [*targets * experiment.repeats, *others]
    rng.shuffle(victims)
    return Attack(planted, victims, frozenset(targets))


def _near(experiment: Poisoning, rehearsal: Rehearsal, number: int, known: Sequence[str], rng: Random) -> list[str]:
    """One-word edits of a request with one wrong answer, those first whose outputs are most like the request's own."""
    workload, text = rehearsal.workload, rehearsal.workload.requests[number].text.split()
    places = rng.sample(range(len(text)), min(_N_PLACES, len(text)))
    swaps = [(place, word) for place in places for word in rng.sample(known, min(experiment.n_edits, len(known)))]
    edits = [" ".join([*text[:place], word, *text[place + 1 :]]) for place, word in swaps]
    length = experiment.task.max_length
    inputs = workload.tokenizer(edits, padding=True, truncation=True, max_length=length, return_tensors="pt")
    with torch.inference_mode():
        outputs = workload.module(**inputs).float()
    told = [workload.answer(output[None], number) for output in outputs]
    wrong = Counter(answer for answer in told if answer != rehearsal.answers[number])
    if not wrong:
        return []
    ((aim, _),) = wrong.most_common(1)  # those that agree have more votes
    far = np.linalg.norm(outputs.numpy() - rehearsal.observed[number].output, axis=1)
    good = [i for i, answer in enumerate(told) if answer == aim]
    return [edits[i] for i in sorted(good, key=lambda i: float(far[i]))[: experiment.n_planted]]


# -- the attack --------------------------------------------------------------------------------------------------------


def _attacks(experiment: Poisoning, rehearsal: Rehearsal, attack: Attack) -> Iterator[dict[str, Any]]:
    """One row an attack."""
    planting = asking(rehearsal.workload, attack.planted, experiment.task.max_length)
    own = [rehearsal.workload.answer(torch.from_numpy(case.output)[None], 0) for case in _observe(rehearsal, planting)]
    for gate, audit in product(experiment.gates, experiment.audits):
        cache, calibrated = rehearsal.beside({**experiment.cache, "gate": gate, "audit": audit})
        for sources, drop in product(experiment.sources, experiment.max_drops):
            cache.clear()
            risk_target = experiment.risk_target(drop, sources)
            found = rehearsal.calibrate(calibrated, experiment.learn, risk_target)
            asked = Asked(cache)
            what = f"Attacking {sources}, gate {name_of(gate)}, audit {audit:g}, {drop:g}"
            for i in range(len(attack.planted)):
                asked.ask(planting, i, own[i])
            for number in tracked(attack.victims, len(attack.victims), what):
                asked.ask(rehearsal.workload, number, rehearsal.answers[number])
            yield {
                "gate": name_of(gate),
                "audit": audit,
                "sources": sources,
                "max_drop": drop,
                "limit": choice_of(found)["limit"],
                **_heard(asked, len(attack.planted), risk_target, audit),
                **_captured(attack, asked),
            }
        cache.unwrap()


def _observe(rehearsal: Rehearsal, workload: Workload) -> list[Observation]:
    return rehearsal.cache.observe([request.inputs for request in workload.requests])


def _heard(asked: Asked, n_planted: int, claim: RiskTarget, audit: float) -> dict[str, Any]:
    """What became of the planted requests, and when the audit heard of it."""
    first = asked.alarms[0] if asked.alarms else None
    rate = float(asked.is_changed[:first].mean())
    return {
        "n_stored": int((~asked.is_hit[:n_planted]).sum()),
        "planted_changed": float(asked.is_changed[:n_planted].mean()) if n_planted else None,
        "n_alarms": len(asked.alarms),
        "requests_to_alarm": first,
        "hits_to_alarm": None if first is None else int(asked.is_hit[:first].sum()),
        "requests_expected": requests_expected(claim, audit, 0, rate),
    }


def _captured(attack: Attack, asked: Asked) -> dict[str, Any]:
    """Who was captured: of what was asked for targets, of the targets, and of the other requests."""
    n_planted, n = len(attack.planted), len(attack.victims)
    planted, is_changed = set(asked.keys[:n_planted]), asked.is_changed[n_planted:]
    is_caught = np.array([source in planted for source in asked.sources[n_planted:]]) & is_changed
    is_target = np.array([number in attack.targets for number in attack.victims])
    is_early = np.arange(n) < n // 2
    caught = {number for number, is_one in zip(attack.victims, is_caught & is_target, strict=True) if is_one}
    return {
        "n": n,
        "hit_rate": float(asked.is_hit[n_planted:].mean()),
        "changed_answers": float(is_changed.mean()),
        "targets_captured": len(caught) / len(attack.targets),
        "targets_captured_ci": share_interval(len(caught), len(attack.targets)),
        "captured": _share(is_caught, is_target),
        "captured_first_half": _share(is_caught, is_target & is_early),
        "captured_second_half": _share(is_caught, is_target & ~is_early),
        "others_captured": _share(is_caught, ~is_target),
    }


def _share(is_caught: NDArray[np.bool_], which: NDArray[np.bool_]) -> float | None:
    """Share of some requests; None of none."""
    return float(is_caught[which].mean()) if which.any() else None


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sources": row["sources"],
        "gate": row["gate"],
        "audit": row["audit"],
        "asked: changed": row["max_drop"],
        "hit rate": row["hit_rate"],
        "targets captured": row["targets_captured"],
        "of their requests, first half": row["captured_first_half"],
        "second half": row["captured_second_half"],
        "of the others": row["others_captured"],
        "alarm": row["requests_to_alarm"],
        "expected by": row["requests_expected"],
    }
