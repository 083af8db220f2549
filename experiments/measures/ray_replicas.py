"""Measure `ray_replicas`: replicas on Ray Serve that share a Redis; some are killed under load, with SIGKILL.

Texts, new ones and repeats, are requested in bursts at a steady rate, by a number of sessions; each session goes to one
replica. After `span_s`, during a burst, a random replica is killed; Ray starts another one; after `span_s` with all of
them the next kill follows. At the end, a new version of the application replaces all replicas. A client retries at most
twice, the default of OpenAI's clients. Every answer is compared with the model alone.

| first tries that failed | |
|---|---|
| in its hands | sent before a kill, and not answered by then |
| others | all others: none should fail |
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field

from experiments.measures.base import Outcome
from experiments.measures.over_http.client import OK
from experiments.measures.over_http.killing import (
    AFTER,
    BEFORE,
    MISSING,
    PHASES,
    Asked,
    Killing,
    KillingExperiment,
    Span,
)
from experiments.measures.over_http.replicas import running_replicas
from experiments.measures.over_http.traffic import EQUAL
from experiments.models.loading import MINILM, encode, find
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.support.redis_server import check_installed, redis_server
from llmcache.lab import quiet

if TYPE_CHECKING:
    from llmcache.serving.ray import ReplicaSettings


class RayReplicas(KillingExperiment):
    model: str = MINILM  # an embedding model
    replicas: int = Field(default=2, ge=2)  # replicas at a time
    # Settings of llmcache besides the store. By default, no call is bypassed and every entry may be read from Redis.
    cache: dict[str, Any] = Field(default_factory=lambda: {"auto_bypass": False})


def run(experiment: RayReplicas, folders: Folders) -> Outcome:
    check_installed()
    from llmcache.serving.ray import ReplicaSettings

    source = find(experiment.model, folders.models)
    with TemporaryDirectory() as place, redis_server(Path(place)) as redis, quiet():
        cache = {**experiment.cache, "store": {"name": "redis", "url": redis.url, "least_tokens": 0}}
        server = {"reveal_hits": True, "warmup_tokens": 8}
        settings = ReplicaSettings.make({"model": source, "cache": cache, "server": server})
        with running_replicas(settings, experiment.replicas) as replicas:
            load = Killing(experiment, replicas)
            spans = asyncio.run(load.run())
        are_wrong = wrong(load.asked, settings)
    rows = [row_of(one, spans, is_wrong) for one, is_wrong in zip(load.asked, are_wrong, strict=True)]
    points = [point(rows, phase) for phase in PHASES]
    missing_s = [span.ready_s - span.at_s for span in spans if span.phase == MISSING]
    metrics = {"model": experiment.model, "n": len(rows), "n_kills": len(missing_s), "points": points}
    return Outcome(rows, metrics | {"summary": points, "missing_s": float(np.median(missing_s))})


def wrong(asked: Sequence[Asked], settings: "ReplicaSettings") -> list[bool]:
    """Return for each request whether it was answered, and differently from the model alone."""
    from llmcache.lab import load_served

    served = load_served(settings.model)
    alone = {}
    with torch.inference_mode():
        for text in tracked(dict.fromkeys(one.text for one in asked), "The model alone"):
            alone[text] = served.forward(encode(served.tokenizer, text, served.max_length))[0].numpy()
    return [
        one.reply.status == OK and not np.allclose(json.loads(one.reply.body)[0], alone[one.text], rtol=0, atol=EQUAL)
        for one in asked
    ]


def row_of(one: Asked, spans: Sequence[Span], is_wrong: bool) -> dict[str, Any]:
    phase = BEFORE if one.sent_s < spans[0].at_s else AFTER
    phase = next((span.phase for span in spans if span.has(one)), phase)
    return {
        "phase": phase,
        "sent_s": one.sent_s,
        "ms": 1e3 * (one.tries[-1][0] - one.sent_s),
        "n_tries": len(one.tries),
        "first_status": one.tries[0][1].status,
        "status": one.reply.status,
        "is_in_hands": any(span.had(one) for span in spans),
        "is_repeat": one.is_repeat,
        "is_hit": bool(one.reply.rung) and one.reply.rung != "none",
        "is_wrong": is_wrong,
    }


def point(rows: Sequence[dict[str, Any]], phase: str) -> dict[str, Any]:
    found = [row for row in rows if row["phase"] == phase]
    failed = [row for row in found if row["first_status"] != OK]
    repeats = [row for row in found if row["is_repeat"]]
    return {
        "phase": phase,
        "n": len(found),
        "n_failed_in_hands": sum(row["is_in_hands"] for row in failed),
        "n_failed_others": sum(not row["is_in_hands"] for row in failed),
        "n_lost": sum(row["status"] != OK for row in found),
        "n_repeats": len(repeats),
        "hit_rate": sum(row["is_hit"] for row in repeats) / len(repeats) if repeats else None,
        "n_wrong": sum(row["is_wrong"] for row in found),
    }
