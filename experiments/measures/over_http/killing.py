"""Sends requests to replicas at a steady rate, and kills the replicas one after the other."""

import asyncio
import os
import random
import signal
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter

from pydantic import Field

from experiments.measures.base import Experiment
from experiments.measures.over_http.client import OK, Client, Reply
from experiments.measures.over_http.replicas import Replicas
from experiments.measures.over_http.traffic import embed, texts_of

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


class KillingExperiment(Experiment):
    """Settings of the load, and of the kills under it."""

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
    """Sends requests and kills replicas concurrently."""

    def __init__(self, experiment: KillingExperiment, replicas: Replicas) -> None:
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
