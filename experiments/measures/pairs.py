"""Measure `pairs`: PAWS, sentences of the same words that say the same or not. Does the one answer for the other?

    some pairs    their sentences calibrate an embedding model, as traffic of sentences
    other pairs   first sentences are stored, as a growing cache would; then second ones are asked

Of label-0 pairs (another meaning), few should be served by the first sentence's entry; of label-1 pairs (the same
meaning), many: that is the recall. No sentence is in two pairs. Beside it stand the paper's way and a semantic response
cache, with the same sentences stored. `alike` is how many pairs have embeddings that count as the same answer: whether
the model itself tells the two kinds apart.

Sizes: N second sentences.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from experiments.data.paws import Pair, apart, read_paws
from experiments.measures.adversaries import Gate, name_of
from experiments.measures.base import Experiment, Outcome
from experiments.measures.learning import check_learn, choice_of, limit_of
from experiments.methods.cached import Cached
from experiments.metrics.metrics import share_interval
from experiments.models.loading import MINILM, check_length, load
from experiments.replay.recording import Recording, make_fingerprint
from experiments.replay.rehearsal import Rehearsal
from experiments.support.folders import Folders
from experiments.tasks.embedding import ALIKE, Embedding
from llmcache import CacheConfig, ConfigError
from llmcache.lab import RiskTarget


class Pairs(Experiment):
    """Settings of the measure."""

    model: str = MINILM  # A bare encoder; see `experiments.models.loading.load`
    learn: int = Field(default=2500, ge=2)  # sentences that calibrations learn from
    limit: int | None = Field(default=None, ge=1)  # most pairs that are asked
    # Losses that calibrations may leave, a fraction of 1.
    max_drops: tuple[float, ...] = Field(default=(0.005, 0.02), min_length=1)
    # Content gates that are compared: false, true, or options of one.
    gates: tuple[Gate, ...] = Field(default=(False, True), min_length=1)
    taus: tuple[float, ...] = (0.82, 0.85, 0.88)  # thresholds of the paper's way
    thresholds: tuple[float, ...] = (0.8,)  # of the semantic response cache
    cache: dict[str, Any] = Field(default_factory=dict)  # settings of llmcache
    max_length: int = Field(default=128, ge=3)  # most tokens of a sentence

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        """Check all settings, those of llmcache included; see `Section.make`."""
        made = super().make(values, name)
        for gate in made.gates:
            Cached.check({**made.cache, "gate": gate}, "cache")
        check_learn(made.learn, made.max_drops, made.delta)
        return made

    @property
    def delta(self) -> float:
        """Chance that a calibration's bound does not hold."""
        return CacheConfig.make(self.cache).delta


@dataclass(frozen=True, slots=True)
class Way:
    """What one way did."""

    settings: Mapping[str, Any]  # its name, gate, the loss that was asked for, and the limit: a risk, or a threshold
    source: NDArray[np.int64]  # number of the stored sentence that serves each second one (N,); -1 where it is computed


def run(experiment: Pairs, folders: Folders) -> Outcome:
    """Store first sentences and ask second ones, each way."""
    known, asked = _divide(experiment, apart(_shuffled(read_paws(folders.data), experiment.seed)))
    loaded = load(experiment.model, "states", folders.models)
    check_length(loaded, experiment.max_length)
    texts = [*known, *(pair.first for pair in asked), *(pair.second for pair in asked)]
    workload = Embedding(loaded, texts, [None] * len(texts), experiment.max_length)
    rehearsal = Rehearsal(workload, experiment.cache)
    firsts = range(len(known), len(known) + len(asked))
    ways = [*_calibrated(experiment, rehearsal, firsts), *_others(experiment, rehearsal, firsts)]
    pairs = _Asked(asked, firsts, rehearsal)
    figures = [pairs.figures(way) for way in ways]
    metrics = {
        "task": "paws",
        "model": experiment.model,
        "n": len(asked),
        "learn": len(known),
        **pairs.facts(),
        "ways": figures,
        "summary": [_shown(row) for row in figures],
    }
    return Outcome([row for way in ways for row in pairs.rows(way)], metrics)


def _divide(experiment: Pairs, pairs: list[Pair]) -> tuple[list[str], list[Pair]]:
    """Sentences to learn from, mixed, and pairs to ask."""
    n = experiment.learn // 2
    if len(pairs) <= n:
        raise ConfigError(
            f"learn={experiment.learn}: the data has {len(pairs)} pairs that share none; learn from fewer"
        )
    known = [sentence for pair in pairs[:n] for sentence in (pair.first, pair.second)]
    Random(experiment.seed).shuffle(known)
    return known, pairs[n:][: experiment.limit]


def _shuffled(pairs: list[Pair], seed: int) -> list[Pair]:
    return Random(seed).sample(pairs, len(pairs))


def _calibrated(experiment: Pairs, rehearsal: Rehearsal, firsts: range) -> Iterator[Way]:
    """Calibrated reuse, which holds what it learned from and the first sentences."""
    learned, stored = rehearsal.observed[: firsts.start], rehearsal.observed[firsts.start : firsts.stop]
    numbers = {case.row.key: i for i, case in enumerate(rehearsal.observed)}
    for gate in experiment.gates:
        cache, calibrated = rehearsal.beside({**experiment.cache, "gate": gate})
        for drop in experiment.max_drops:
            cache.clear()
            found = calibrated.calibrate(
                learned, RiskTarget(drop, experiment.delta, "changed", "growing", experiment.seed)
            )
            calibrated.fitter.stand(stored)
            risks, keys = calibrated.fitter.risks(rehearsal.observed[firsts.stop :], ())
            is_served = risks <= limit_of(found)
            source = [numbers[key] if is_hit and key else -1 for is_hit, key in zip(is_served, keys, strict=True)]
            named = {"way": "llmcache", "gate": name_of(gate), "asked": drop, "limit": choice_of(found)["limit"]}
            yield Way(named, np.array(source))
        cache.unwrap()


def _others(experiment: Pairs, rehearsal: Rehearsal, firsts: range) -> Iterator[Way]:
    """The nearest stored sentence serves above a threshold: of the paper, and of a semantic response cache."""
    recording = Recording(rehearsal.workload, rehearsal.outputs, rehearsal.put_out)
    by_mean = recording.rows(make_fingerprint("mean"), fits_any_length=True).vectors
    by_text = recording.texts().vectors
    for name, vectors, thresholds in (
        ("paper", by_mean, experiment.taus),
        ("semantic_response", by_text, experiment.thresholds),
    ):
        alike = vectors[firsts.stop :] @ vectors[: firsts.stop].T
        nearest, similarity = alike.argmax(axis=1), alike.max(axis=1)
        for tau in thresholds:
            named = {"way": name, "gate": "off", "asked": None, "limit": tau}
            yield Way(named, np.where(similarity >= tau, nearest, -1))


class _Asked:
    """The pairs that are asked, and what became of them each way."""

    def __init__(self, pairs: Sequence[Pair], firsts: range, rehearsal: Rehearsal) -> None:
        """Compare the embeddings of each pair; `firsts` are the numbers of first sentences, second ones follow."""
        self._pairs = pairs
        self._firsts = np.array(firsts)
        self._is_same = np.array([pair.is_same for pair in pairs])
        answers = rehearsal.answers
        self._cosine = np.array([float(answers[i] @ answers[i + len(pairs)]) for i in firsts])

    def facts(self) -> dict[str, Any]:
        """How many pairs say the same, and what the model makes of them and of the others."""
        kinds = {"same": self._is_same, "other": ~self._is_same}
        return {
            "n_same": int(self._is_same.sum()),
            "cosine": {name: float(self._cosine[which].mean()) for name, which in kinds.items()},
            "alike": {name: float((self._cosine[which] >= ALIKE).mean()) for name, which in kinds.items()},
        }

    def figures(self, way: Way) -> dict[str, Any]:
        """Shares of pairs of each label that are served by the first sentence, and by any."""
        by_first = way.source == self._firsts
        figures: dict[str, Any] = {**way.settings, "hit_rate": float((way.source >= 0).mean())}
        for name, which in (("recall", self._is_same), ("false_reuse", ~self._is_same)):
            n, k = int(which.sum()), int(by_first[which].sum())
            figures |= {name: k / n, f"{name}_ci": share_interval(k, n)}
        figures["false_and_changed"] = float((by_first & (self._cosine < ALIKE))[~self._is_same].mean())
        return figures

    def rows(self, way: Way) -> Iterator[dict[str, Any]]:
        """One row a pair."""
        for i, pair in enumerate(self._pairs):
            yield {
                **way.settings,
                "first": pair.first,
                "second": pair.second,
                "is_same": int(pair.is_same),
                "cosine": round(float(self._cosine[i]), 4),
                "is_hit": int(way.source[i] >= 0),
                "by_first": int(way.source[i] == self._firsts[i]),
            }


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "way": row["way"],
        "gate": row["gate"],
        "asked: changed": row["asked"],
        "limit": row["limit"],
        "hit rate": row["hit_rate"],
        "same meaning, served": row["recall"],
        "another, served": row["false_reuse"],
        "and another answer": row["false_and_changed"],
    }
