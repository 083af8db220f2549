"""Recalled layers and fits equal computed ones."""

from typing import Any

import numpy as np
import pytest
import torch

from experiments.measures.trust import Trust
from experiments.methods.base import twin
from experiments.replay.recall import Fits, Outputs, recall_fits, recall_layers
from experiments.replay.rehearsal import Rehearsal
from experiments.runs.grid import make_experiment
from experiments.support.files import Folders
from llmcache.models.adapters import locate
from llmcache.reuse.calibration.observer import targets
from llmcache.reuse.fingerprint import Learned
from tests.experiments.measuring import TASK, learning

LEARN = 120
VALUES = learning("trust", task=TASK | {"limit": 200}, learn=LEARN, taus=[0.9])


@pytest.fixture(scope="module")
def experiment() -> Trust:
    made = make_experiment(VALUES)
    assert isinstance(made, Trust)
    return made


@pytest.fixture(scope="module")
def rehearsal(experiment: Trust) -> Rehearsal:
    return experiment.rehearse(Folders())


def counted(module: Any) -> list[int]:
    """Record the number of rows each time the first layer is computed from now on."""
    layer, rows = locate(module).layers[0], []
    layer.attention.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    return rows


def test_layers_compute_each_single_request_once_for_all_copies_and_batches_each_time(rehearsal: Rehearsal) -> None:
    workload, known = rehearsal.workload, Outputs()
    copies = [recall_layers(twin(workload.module), known) for _ in range(2)]
    rows = [counted(module) for module in copies]
    inputs = [request.inputs for request in workload.requests[:5]]
    batch = {name: one.repeat(2, 1) for name, one in inputs[0].items()}
    with torch.inference_mode():
        plain = [workload.module(**one) for one in inputs]
        for module in copies:
            again = [module(**one) for one in inputs]
            assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
        assert torch.equal(copies[0](**batch), copies[0](**batch))
    assert rows == [[1] * 5 + [2] * 2, []] and len(known) == 5


def test_what_was_learned_is_taken_over_from_the_same_requests_alone(rehearsal: Rehearsal) -> None:
    fitter: Any = rehearsal.calibrated.fitter
    fits, first, second = Fits(), Learned(), Learned()
    cases = rehearsal.observed[:LEARN]

    def fit(fingerprint: Learned, cases: Any) -> None:
        answers = targets(cases, fitter.answers)
        fingerprint.fit([case.tokens for case in cases], answers, np.stack([case.output for case in cases]))

    for fingerprint in (first, second):
        fingerprint.bind(fitter.tokens.embed, fitter.tokens.think)
        recall_fits(fingerprint, fits)
        fit(fingerprint, cases)
    assert len(fits.known) == 1 and fits.saved_s > 0
    assert all(np.array_equal(array, second.state()[name]) for name, array in first.state().items())
    fit(second, cases[1:])
    assert len(fits.known) == 2


def test_caches_on_one_model_tell_what_caches_on_their_own_do(experiment: Trust, rehearsal: Rehearsal) -> None:
    """The separate cache learns by itself; both must serve the same."""
    claim = experiment.risk_target(0.2)
    cache, calibrated = rehearsal.beside(experiment.cache)
    alone = Rehearsal(rehearsal.workload, experiment.cache)
    made, other = rehearsal.calibrate(calibrated, LEARN, claim), alone.calibrate(alone.calibrated, LEARN, claim)
    assert made.curve == other.curve and made.chosen == other.chosen and made.seconds > 0
    for request in rehearsal.workload.requests[LEARN:]:
        assert torch.equal(cache(**request.inputs), alone.cache(**request.inputs))
        assert [one.rung for one in cache.last] == [one.rung for one in alone.cache.last]
    cache.unwrap()
