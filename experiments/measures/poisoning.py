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
from random import Random
from typing import Any

import numpy as np
import torch
from pydantic import Field

from experiments.edits import words
from experiments.folders import Folders
from experiments.measures.adversaries import Adversaries, name_of
from experiments.measures.base import Outcome
from experiments.metrics import share_interval
from experiments.progress import tracked
from experiments.rehearsal import Rehearsal
from experiments.serving import Reply, ask, ask_all, asking, cache_beside
from experiments.tasks import build
from experiments.workload import Answer
from llmcache.claim import Claim, Sources

_N_PLACES = 3  # words of a target that the attacker tries to replace, each by every word that he knows


class Poisoning(Adversaries):
    """Settings of the measure; of `n_edits`, the words that the attacker tries in one place.

    Attributes:
        audits: Least probabilities with which hits are looked into, that are compared.
        sources: Who serves.
        n_targets: Requests that the attacker wants to capture.
        n_planted: Requests that he asks for each, at most.
        repeats: How often each target is asked.
        n_others: Other later requests.
    """

    audits: tuple[float, ...] = Field(default=(0.0, 0.05), min_length=1)
    sources: tuple[Sources, ...] = ("growing", "frozen")
    n_targets: int = Field(default=100, ge=1)
    n_planted: int = Field(default=8, ge=1)
    repeats: int = Field(default=5, ge=1)
    n_others: int = Field(default=500, ge=0)
    n_edits: int = Field(default=40, ge=1)


@dataclass(frozen=True, slots=True)
class Attack:
    """What the attacker asks, and who is asked for afterwards.

    Attributes:
        planted: Texts, those for one target after another.
        victims: Numbers of later requests, in the order in which they are asked; targets several times.
        targets: Which of them are targets.
    """

    planted: Sequence[str]
    victims: Sequence[int]
    targets: frozenset[int]


def run(experiment: Poisoning, folders: Folders) -> Outcome:
    """Attack once for each kind of sources, gate, loss and audit.

    Raises:
        ConfigError: The data or the model does not fit the settings.
        FileNotFoundError: A data file is missing.
    """
    workload = build(experiment.task, folders, experiment.seed)
    experiment.check_stream(workload)
    rehearsal = Rehearsal(workload, experiment.cache)
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
    for gate in experiment.gates:
        for audit in experiment.audits:
            cache, trust = cache_beside(rehearsal, {**experiment.cache, "gate": gate, "audit": audit})
            for sources in experiment.sources:
                for drop in experiment.max_drops:
                    cache.clear()
                    claim = Claim(drop, experiment.config.delta, "changed", sources, experiment.seed)
                    found = trust.calibrate(rehearsal.observed[: experiment.learn], claim)
                    planting = asking(rehearsal.workload, attack.planted, experiment.task.max_length)
                    keys, n_stored = set(), 0
                    for i in range(len(attack.planted)):
                        reply = ask(cache, planting, i)
                        keys.add(cache.last[0].key)
                        n_stored += reply.source is None
                    what = f"Attacking {sources}, gate {name_of(gate)}, audit {audit:g}, {drop:g}"
                    victims = tracked(attack.victims, len(attack.victims), what)
                    replies = ask_all(cache, rehearsal.workload, victims)
                    named = {"gate": name_of(gate), "audit": audit, "sources": sources, "max_drop": drop}
                    now = cache.calibration
                    yield named | {
                        "limit": None if found.chosen is None else found.chosen.limit,
                        "n_stored": n_stored,
                        **_figures(attack, rehearsal.answers, replies, keys),
                        "n_alarms": 2 if now is None else now.n_alarms,
                    }
            cache.unwrap()


def _figures(attack: Attack, answers: Sequence[Answer], replies: Sequence[Reply], planted: set[str]) -> dict[str, Any]:
    """Who was captured: of what was asked for targets, of the targets, and of the other requests."""
    pairs = list(zip(attack.victims, replies, strict=True))
    is_captured = [reply.source in planted and reply.answer != answers[number] for number, reply in pairs]
    is_target = [number in attack.targets for number, _ in pairs]
    caught = [i for i in range(len(pairs)) if is_captured[i]]
    n_asked, n_caught = sum(is_target), sum(is_target[i] for i in caught)
    n_others = len(pairs) - n_asked
    half = len(pairs) // 2
    return {
        "n": len(pairs),
        "hit_rate": sum(reply.source is not None for reply in replies) / len(pairs),
        "changed_answers": sum(reply.answer != answers[number] for number, reply in pairs) / len(pairs),
        "captured": n_caught / n_asked,
        "captured_first_half": sum(is_target[i] for i in caught if i < half) / max(1, sum(is_target[:half])),
        "captured_second_half": sum(is_target[i] for i in caught if i >= half) / max(1, sum(is_target[half:])),
        "targets_captured": len({pairs[i][0] for i in caught if is_target[i]}) / len(attack.targets),
        "targets_captured_ci": share_interval(len({pairs[i][0] for i in caught if is_target[i]}), len(attack.targets)),
        "others_captured": (len(caught) - n_caught) / n_others if n_others else None,
    }


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
        "alarms": row["n_alarms"],
    }
