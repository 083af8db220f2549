"""Measure `serve_timing`: can a tenant tell from latencies what another tenant has asked?

A server with two keys of two namespaces. The first tenant asks texts; the second probes, in random order, as many of
these and as many that nobody asked, each once. What separates them best is a threshold on latency: the area under its
ROC curve (AUC) is 0.5 where nothing can be told. The same of texts that the prober asked itself shows that a hit, where
one is allowed, can be told.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from sklearn.metrics import roc_auc_score

from experiments.measures.base import Outcome
from experiments.measures.over_http.client import Client, post
from experiments.measures.over_http.loops import closed_loop, run_loop
from experiments.measures.over_http.made import Made, ServingExperiment, made, serving
from experiments.measures.over_http.processes import SERVERS
from experiments.measures.serve_load import CACHE, PREDICT
from experiments.support.folders import Folders
from llmcache.errors import ConfigError

_RESAMPLES = 2000
OTHERS, OWN = "another tenant's", "its own"


class ServeTiming(ServingExperiment):
    """Settings of the measure.

    Attributes:
        probes: How many requests the prober makes of each kind of comparison; half of them were asked before.
    """

    probes: int = Field(default=2000, ge=20)
    servers: dict[str, str] = Field(default_factory=lambda: {CACHE: SERVERS[CACHE] + " --keys {keys}"})


def run(experiment: ServeTiming, folders: Folders) -> Outcome:
    """Ask, probe, and compare."""
    with made(experiment, folders) as found, TemporaryDirectory() as place:
        keys = _keys(Path(place, "keys.yaml"))
        with serving(experiment, CACHE, found, keys=str(Path(place, "keys.yaml"))) as process:
            rows = _probe(experiment, process.port, found, keys)
    points = [_point(rows, kind, experiment.seed) for kind in (OTHERS, OWN)]
    metrics = {"task": experiment.task.title, "model": experiment.task.model, "points": points, "summary": points}
    return Outcome(rows, metrics)


def _keys(path: Path) -> tuple[str, str]:
    """A file with the keys of two tenants; returns these."""
    from llmcache.serving.keys import add_key

    path.write_text("[]\n", encoding="utf-8")
    path.chmod(0o600)
    return add_key(path, "asks", "asks", ("infer",)), add_key(path, "probes", "probes", ("infer",))


def _probe(experiment: ServeTiming, port: int, made: Made, keys: tuple[str, str]) -> list[dict[str, Any]]:
    half, rng = experiment.probes // 2, random.Random(experiment.seed)
    texts = list(dict.fromkeys(request.text for request in made.stream))
    if len(texts) < 4 * half:
        raise ConfigError(f"probes={experiment.probes}: {len(texts)} different texts; give fewer")
    rng.shuffle(texts)
    rows = []
    for kind, asker, asked, new in (
        (OTHERS, keys[0], texts[:half], texts[half : 2 * half]),
        (OWN, keys[1], texts[2 * half : 3 * half], texts[3 * half : 4 * half]),
    ):
        _latencies(port, asked, asker)
        order = [(text, True) for text in asked] + [(text, False) for text in new]
        rng.shuffle(order)
        took = _latencies(port, [text for text, _ in order], keys[1])
        rows += [
            {"kind": kind, "was_asked": was_asked, "ms": float(ms)}
            for (_, was_asked), ms in zip(order, took, strict=True)
        ]
    return rows


def _latencies(port: int, texts: Sequence[str], key: str) -> NDArray[np.float64]:
    """Milliseconds of each request, one after the other."""
    client = Client(port)
    load = run_loop(closed_loop(client, [post(PREDICT, {"inputs": text}, key) for text in texts], 1), client)
    if load.figures()["n_ok"] != len(texts):
        raise ConfigError("a probe was not answered; see the server's log")
    return load.latency_ms


def _point(rows: Sequence[dict[str, Any]], kind: str, seed: int) -> dict[str, Any]:
    """AUC of the quicker being those that were asked, with the middle 95 % of resamples."""
    found = [row for row in rows if row["kind"] == kind]
    was_asked = np.array([row["was_asked"] for row in found])
    ms = np.array([row["ms"] for row in found])
    rng = np.random.default_rng(seed)
    drawn = (rng.integers(0, len(ms), len(ms)) for _ in range(_RESAMPLES))
    areas = [roc_auc_score(was_asked[i], -ms[i]) for i in drawn]
    low, high = np.quantile(areas, (0.025, 0.975))
    return {
        "kind": kind,
        "n": len(found),
        "auc": float(roc_auc_score(was_asked, -ms)),
        "auc_low": float(low),
        "auc_high": float(high),
        "asked_p50_ms": float(np.median(ms[was_asked])),
        "new_p50_ms": float(np.median(ms[~was_asked])),
    }
