"""The other ways of the measure `trust`: the paper's, DocCache and the response caches, replayed alike."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from experiments.measures.sweep import SAME
from experiments.measures.trust_figures import figures, in_advance, named
from experiments.methods.responses import Encoder
from experiments.replay.advance import choose_threshold, serve
from experiments.replay.recording import Recording, make_fingerprint
from experiments.replay.rehearsal import Rehearsal
from experiments.replay.replay import Replay, Units, by_request, replay
from experiments.tasks.workload import Answer

if TYPE_CHECKING:
    from experiments.measures.trust import Trust

_N_TIMED = 200  # lookups of the semantic response cache

Reading = Callable[[Units, Replay], list[Answer]]


def others(experiment: "Trust", rehearsal: Rehearsal) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The other ways, which store what llmcache learns from: curves, and calibrations where there is a threshold."""
    recording = Recording(rehearsal.workload, rehearsal.outputs, rehearsal.put_out)
    points: list[dict[str, Any]] = []
    calibrated: list[dict[str, Any]] = []
    for name in experiment.baselines:
        units, answers_of = _way(name, experiment, recording)
        units = replace(units, first_searched=experiment.learn)
        points += _points_of_another(experiment, rehearsal, name, units, answers_of)
        if name != "exact_response":
            timed = {"lookup_ms": _encoder_ms(experiment, rehearsal) if name == "semantic_response" else None}
            calibrated += [row | timed for row in _calibrated_other(experiment, rehearsal, name, units, answers_of)]
    return points, calibrated


def _points_of_another(
    experiment: "Trust", rehearsal: Rehearsal, name: str, units: Units, answers_of: Reading
) -> Iterator[dict[str, Any]]:
    """The curve of one of the other ways."""
    taus = (math.inf,) if name == "exact_response" else (SAME, *experiment.taus)
    for tau, again in zip(taus, replay(units, taus), strict=True):
        served, told = by_request(units, again), answers_of(units, again)
        at = named((name, None), None, None if math.isinf(tau) else tau)
        yield at | figures(experiment, rehearsal, told[experiment.learn :], served[experiment.learn :])


def _calibrated_other(
    experiment: "Trust", rehearsal: Rehearsal, name: str, units: Units, answers_of: Reading
) -> Iterator[dict[str, Any]]:
    """Its threshold, chosen as a calibration of llmcache chooses its limit, and what the later requests get."""
    answers, is_changed, learn = rehearsal.answers, rehearsal.workload.is_changed, experiment.learn
    for claim in experiment.claims:
        setting, stored = choose_threshold(
            units, learn, claim, lambda one, other: is_changed(answers[one], answers[other])
        )
        again = serve(units, learn, setting, stored, grows=claim.sources == "growing")
        served, told = by_request(units, again), answers_of(units, again)
        row = in_advance(name, claim, setting, len(stored), learn - len(stored))
        yield row | figures(experiment, rehearsal, told[learn:], served[learn:])


def _encoder_ms(experiment: "Trust", rehearsal: Rehearsal) -> float:
    """Median time in which the sentence encoder embeds one text: what each lookup of the semantic cache costs."""
    encode, times = Encoder(experiment.encoder), []
    with torch.inference_mode():
        for request in rehearsal.workload.requests[:_N_TIMED]:
            started = perf_counter()
            encode(request.text)
            times.append(perf_counter() - started)
    return float(np.median(times)) * 1e3


def _way(name: str, experiment: "Trust", recording: Recording) -> tuple[Units, Reading]:
    """What a way looks up, and how its answers are read."""
    if name == "doccache":
        return recording.documents(), recording.handed
    if name == "semantic_response":
        return recording.texts(experiment.encoder), recording.borrowed
    mean = recording.rows(make_fingerprint("mean"), fits_any_length=True)
    return mean, recording.reread if name == "paper" else recording.borrowed
