"""Measure `ray_replicas`: replicas on Ray Serve that share a Redis; some are killed under load, with SIGKILL.

Texts, new ones and repeats, are requested in bursts at a steady rate, by a number of sessions; each session goes to one
replica. After `span_s`, during a burst, a random replica is killed; Ray starts another one; after `span_s` with all of
them the next kill follows. At the end, a new version of the application replaces all replicas. A client retries at most
twice, the default of OpenAI's clients. Every answer is compared with the model alone. First tries that failed are
counted as `in hands` if they were sent before a kill and not answered by then; of the others none should fail.
"""

import asyncio
import json
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field

from experiments.measures.base import Experiment, Outcome
from experiments.measures.over_http.client import OK, Client, Reply
from experiments.measures.over_http.replicas import Replicas, running_replicas
from experiments.measures.over_http.traffic import EQUAL, embed, texts_of
from experiments.models.loading import MINILM, encode, find
from experiments.support.files import Folders
from experiments.support.progress import tracked
from experiments.support.redis_server import check_installed, redis_server
from llmcache.lab import quiet

if TYPE_CHECKING:
    from llmcache.serving.ray import ReplicaSettings

BEFORE, MISSING, AFTER, UPDATE = PHASES = (
    "before the first kill",
    "a replica is missing",
    "all are there again",
    "a new version replaces all",
)
TRIES = 3
_LOOK_S = 0.001
_REACH_S = 0.05  # time for a burst to reach the replicas and be answered in part
_PAUSE_S = 0.5  # delay before a retry
_TIMEOUT_S = 30.0


class RayReplicas(Experiment):
    model: str = MINILM  # an embedding model
    replicas: int = Field(default=2, ge=2)  # replicas at a time
    # Settings of llmcache besides the store. By default, no call is bypassed and every entry may be read from Redis.
    cache: dict[str, Any] = Field(default_factory=lambda: {"auto_bypass": False})
    kills: int = Field(default=10, ge=1)  # one after the other
    rate: float = Field(default=20.0, gt=0)  # requests due per second
    # Requests due at the same time. A replica is killed within 50 ms after half of them are under way.
    at_once: int = Field(default=8, ge=1)
    texts: int = Field(default=500, ge=1)  # distinct texts; each request draws one
    sessions: int = Field(default=32, ge=1)  # client sessions; each request draws one
    span_s: float = Field(default=10.0, gt=0)  # with all replicas, before each kill and after the last one
    start_s: float = Field(default=180.0, gt=0)  # longest time until a replica is replaced


@dataclass(slots=True)
class Asked:
    """A request and its tries; times in seconds from the start."""

    text: str
    is_repeat: bool  # of a text already answered
    sent_s: float
    tries: list[tuple[float, Reply]] = field(default_factory=list)  # end and reply of each try

    @property
    def reply(self) -> Reply:
        return self.tries[-1][1]


@dataclass(frozen=True, slots=True)
class Span:
    """Time from a kill, or from a new version's deployment, until all replicas are ready; seconds from the start."""

    at_s: float
    ready_s: float
    phase: str

    def has(self, one: Asked) -> bool:
        return self.at_s <= one.sent_s < self.ready_s

    def had(self, one: Asked) -> bool:
        """Whether a request was under way at a kill, possibly in the killed replica."""
        return self.phase == MISSING and one.sent_s <= self.at_s <= one.tries[0][0]


class Killing:
    def __init__(self, experiment: RayReplicas, replicas: Replicas) -> None:
        self.asked: list[Asked] = []
        self._experiment, self._replicas = experiment, replicas
        self._rng = random.Random(experiment.seed)
        self._texts = list(islice(texts_of(experiment.seed), experiment.texts))
        self._answered: set[str] = set()
        self._n_under_way = 0
        self._client = Client(replicas.port)
        self._started = perf_counter()

    async def run(self) -> list[Span]:
        killing = asyncio.create_task(self._kill())
        asking: list[asyncio.Task[None]] = []
        while not killing.done():
            if (early := len(asking) / self._experiment.rate - self._now_s) > 0:
                await asyncio.wait([killing], timeout=early)
            asking += [asyncio.create_task(self._ask()) for _ in range(self._experiment.at_once)]
        await asyncio.gather(*asking)
        self._client.close()
        return await killing

    @property
    def _now_s(self) -> float:
        return perf_counter() - self._started

    async def _kill(self) -> list[Span]:
        spans = []
        await asyncio.sleep(self._experiment.span_s)
        for _ in range(self._experiment.kills):
            pids = await asyncio.to_thread(self._replicas.pids)
            while self._n_under_way < self._experiment.at_once / 2:
                await asyncio.sleep(_LOOK_S)
            await asyncio.sleep(self._rng.random() * _REACH_S)
            at_s, pid = self._now_s, self._rng.choice(pids)
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(self._replicas.replaced, pid, self._experiment.start_s)
            spans.append(Span(at_s, self._now_s, MISSING))
            await asyncio.sleep(self._experiment.span_s)
        at_s = self._now_s
        await asyncio.to_thread(self._replicas.deploy)
        spans.append(Span(at_s, self._now_s, UPDATE))
        return spans

    async def _ask(self) -> None:
        text = self._rng.choice(self._texts)
        request = embed(text, session=f"session-{self._rng.randrange(self._experiment.sessions)}")
        one = Asked(text, text in self._answered, self._now_s)
        self.asked.append(one)
        for number in range(TRIES):
            if number:
                await asyncio.sleep(_PAUSE_S)
            self._n_under_way += 1
            reply = await self._client.attempt(request, _TIMEOUT_S)
            self._n_under_way -= 1
            one.tries.append((self._now_s, reply))
            if one.reply.status == OK:
                self._answered.add(text)
                return


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
