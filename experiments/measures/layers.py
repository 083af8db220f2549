"""Measure `layers`: at which layers a causal model's states could be reused, and what reuse costs.

Three runs of the paper's cache: as written (one fingerprint of the embeddings, one tau); with the fingerprint of the
states that enter each layer and the same tau; and with a separate tau for each layer, chosen on the first half of the
requests. All are counted on the second half. Also measured: the share of requests for which the output of layer l has
a cosine of at least `alike` with that of the nearest earlier request.

Sizes: N requests, L layers, T tokens, D hidden width.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from experiments.measures.base import Outcome, TaskExperiment
from experiments.methods.cached import Cached
from experiments.metrics.metrics import quality
from experiments.replay.recording import Recording
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.tasks import build
from experiments.tasks.workload import Workload
from llmcache import ConfigError, Stats
from llmcache.lab import Floats, locate, unpack

PER_LAYER = {"name": "mean", "per_layer": True}
FEWEST = 4  # fewest requests: the first half, on which tau is chosen, then has a request with an earlier one


class Layers(TaskExperiment):
    tau: float = Field(default=0.85, ge=-1.0, le=1.0)  # threshold of all layers
    alike: float = Field(default=0.95, ge=-1.0, le=1.0)  # least cosine at which two layer outputs count as alike
    # Share of hits that must have alike states, for choosing a layer's tau.
    purity: float = Field(default=0.95, gt=0.0, le=1.0)


def run(experiment: Layers, folders: Folders) -> Outcome:
    workload = build(experiment.task, folders, experiment.seed)
    _check(workload)
    recording, entering, leaving = _record(workload)
    nearest, similarity = _nearest_earlier(entering)
    likeness = np.stack([_cosines(states, nearest[layer]) for layer, states in enumerate(leaving)])
    by_embedding = np.stack([_cosines(states, nearest[0]) for states in leaving])
    taus = choose_taus(similarity, likeness, experiment.alike, experiment.purity)
    runs: dict[str, dict[str, Any]] = {
        "as_written": {"tau": experiment.tau},
        "per_layer": {"tau": experiment.tau, "fingerprint": PER_LAYER},
        "own_tau": {"tau": taus, "fingerprint": PER_LAYER},
    }
    half = len(workload.requests) // 2
    figures = {name: _serve(experiment, recording, options) for name, options in runs.items()}
    rows = [
        {
            "layer": layer,
            **{f"hit_rate_{name}": figures[name]["hit_rate_by_layer"].get(layer, 0.0) for name in runs},
            "own_tau": taus.get(layer),
            "alike_by_embedding": float((by_embedding[layer, half:] >= experiment.alike).mean()),
            "alike_by_layer": float((likeness[layer, half:] >= experiment.alike).mean()),
            "median_cosine": float(np.median(by_embedding[layer, half:])),
        }
        for layer in range(len(leaving))
    ]
    return Outcome(rows, {**experiment.about(workload), "layers": rows, "runs": figures, "summary": rows})


def _check(workload: Workload) -> None:
    """Raise `ConfigError` if states cannot be compared position by position, or if requests are too few."""
    shapes = {tuple(request.inputs["input_ids"].shape) for request in workload.requests}
    if not locate(workload.module).makes_kv or len(shapes) > 1 or shapes.pop()[:-1] != (1,):
        raise ConfigError(
            "task: layers are measured of a causal model and requests of one row and one length: wikitext"
        )
    if (n := len(workload.requests)) < FEWEST:
        raise ConfigError(f"task: {n} requests are too few; give at least {FEWEST}, or a higher task.limit")


def _record(workload: Workload) -> tuple[Recording, list[Floats], list[NDArray[np.float16]]]:
    """Return a recording, and for each layer the means of its input states (N, D) and its outputs (N, T * D)."""
    layers = locate(workload.module).layers
    entering: list[list[Any]] = [[] for _ in layers]
    leaving: list[list[Any]] = [[] for _ in layers]

    def hook(number: int) -> Any:
        def note(layer: Any, args: tuple[Any, ...], output: Any) -> None:
            entering[number].append(args[0][0].mean(dim=0).numpy())
            leaving[number].append(unpack(output)[0].flatten().half().numpy())

        return note

    handles = [layer.register_forward_hook(hook(number)) for number, layer in enumerate(layers)]
    try:  # a recording runs each request once, in order
        recording = Recording(workload)
    finally:
        for handle in handles:
            handle.remove()
    return recording, [np.stack(rows) for rows in entering], [np.stack(rows) for rows in leaving]


def _nearest_earlier(entering: list[Floats]) -> tuple[NDArray[np.int64], Floats]:
    """Return by layer and request (L, N) the earlier request with the nearest input states, and its cosine (or -1)."""
    nearest, similarity = [], []
    for states in entering:
        unit = states / np.linalg.norm(states, axis=1, keepdims=True)
        alike = np.tril(unit @ unit.T + 2, k=-1) - 2  # later requests and the request itself get -2
        nearest.append(alike.argmax(axis=1))
        similarity.append(np.maximum(alike.max(axis=1), -1))
    return np.stack(nearest), np.stack(similarity)


def _cosines(states: NDArray[np.float16], others: NDArray[np.int64]) -> Floats:
    """Return the cosines (N,) between each request's state (N, T * D) and that of request `others[i]`, (N,)."""
    found = [
        float(np.dot(one, two) / max(float(np.linalg.norm(one) * np.linalg.norm(two)), 1e-12))
        for one, two in ((states[i].astype(np.float32), states[j].astype(np.float32)) for i, j in enumerate(others))
    ]
    return np.array(found, dtype=np.float32)


def choose_taus(similarity: Floats, likeness: Floats, alike: float, purity: float) -> dict[int, float]:
    """Return by layer the lowest tau at which a share `purity` of first-half hits has alike states (L, N), else 1."""
    half = similarity.shape[1] // 2
    taus = {}
    for layer in range(len(similarity)):
        order = np.argsort(-similarity[layer, 1:half], kind="stable")
        ranked = similarity[layer, 1:half][order]
        share = np.cumsum(likeness[layer, 1:half][order] >= alike) / np.arange(1, len(order) + 1)
        good = np.flatnonzero(share >= purity)
        taus[layer] = float(np.clip(ranked[good[-1]], -1.0, 1.0)) if len(good) else 1.0
    return taus


def _serve(experiment: Layers, recording: Recording, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return hit rates by layer and answer quality on the second half; the first half fills the banks."""
    workload = recording.workload
    n = len(workload.requests)
    half = n // 2
    method = Cached(workload, {"allow_unsafe": True, **options})
    told, is_hit, filled = [], [], Stats()
    with torch.inference_mode():
        method.begin()
        for number in tracked(range(n), "Serving"):
            if number == half:
                filled = method.stats
            told.append(method.ask(number))
            is_hit.append(method.last().is_hit)
        method.end()
    hits = np.array(is_hit[half:])
    reuses = Counter(method.stats.reuses_by_layer)
    reuses.subtract(filled.reuses_by_layer)
    n_skipped = method.stats.n_layers_skipped - filled.n_layers_skipped
    return {
        "options": {name: value for name, value in options.items() if name != "tau" or not isinstance(value, dict)},
        "n": n - half,
        "hit_rate": float(hits.mean()),
        "hit_rate_by_layer": {layer: count / (n - half) for layer, count in sorted(reuses.items())},
        "layers_skipped": n_skipped / ((n - half) * len(recording.trunk.layers)),
        **quality(workload.after(half), recording.answers[half:], told[half:], hits, experiment.seed),
    }
