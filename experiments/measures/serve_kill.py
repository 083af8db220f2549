"""Measure `serve_kill`: `llmcache serve` is killed at any moment, with SIGKILL, and started again on what it left.

A life: the server starts on the folder that the last one left, and is asked for all that the last finished save holds:
each text has to be an exact hit. Then it is asked for new texts, one after the other, and saves meanwhile. It is killed
while it starts, answers, saves or stops, which is a save as well; when exactly is drawn. What the folder holds then, a
cache of this process finds that loads it. Every answer is held against the model alone.

Lost is a text that is missing there though the save has to hold it: an earlier one did, or it was answered before the
last save but one was finished, and the last one began after that.
"""

import asyncio
import json
import random
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from pydantic import Field

from experiments.data.streams.support_desk import support_desk
from experiments.measures.base import Experiment, Outcome
from experiments.measures.over_http.client import Client, Reply, post
from experiments.measures.over_http.loops import OK
from experiments.measures.over_http.processes import Running, started
from experiments.models.loading import MINILM, encode, find
from experiments.support.folders import Folders
from experiments.support.progress import tracked
from llmcache import LLMCache, NotCachedError
from llmcache.folder import JOURNAL, MANIFEST
from llmcache.models.loading import quiet

STARTING, ANSWERING, SAVING, STOPPING = MOMENTS = ("starting", "answering", "saving", "stopping")
COMMAND = (
    "{python} -m llmcache serve --model {model} --config {config} --save {save} --save-every {save_every} "
    "--warmup-tokens 8 --reveal-hits --port {port}"
)
STOP_S = 0.5  # after SIGTERM, within which it is killed
LOOK_S = 0.0005
EQUAL = 1e-5  # of a number of an embedding

Version = tuple[int, int]  # of a save


class ServeKill(Experiment):
    """Settings of the measure.

    Attributes:
        model: An embedding model.
        kills: At each of the moments.
        texts: New ones of a life, at most.
        span_s: Seconds in which they are asked for, and after some of which the server is killed.
        save_every_s: Seconds between saves.
        start_s: Longest time until a server is ready, seconds.
        cache: Settings of llmcache. By default nothing is bypassed: all that is asked for is stored.
    """

    model: str = MINILM
    kills: int = Field(default=25, ge=1)
    texts: int = Field(default=50, ge=1)
    span_s: float = Field(default=2.0, gt=0)
    save_every_s: float = Field(default=0.2, gt=0)
    start_s: float = Field(default=180.0, gt=0)
    cache: dict[str, Any] = Field(default_factory=lambda: {"auto_bypass": False})


@dataclass(frozen=True, slots=True)
class Answered:
    """A text, its answer, and which save was the last one by then."""

    text: str
    reply: Reply
    version: Version | None


def run(experiment: ServeKill, folders: Folders) -> Outcome:
    """Let the server live and be killed."""
    moments = [moment for moment in MOMENTS for _ in range(experiment.kills)]
    random.Random(experiment.seed).shuffle(moments)
    with TemporaryDirectory() as place, quiet():
        lives = _Lives(experiment, folders, Path(place))
        for moment in tracked(moments, len(moments), "Lives"):
            lives.live(moment)
        with lives.started() as server:
            lives.check(server)
    points = [_point(lives.rows, moment) for moment in MOMENTS]
    metrics = {"task": "support_desk", "model": experiment.model, "n": len(moments), "points": points}
    return Outcome(lives.rows, metrics | {"summary": points})


class _Lives:
    """The folder, what it has to hold, and what became of each life."""

    def __init__(self, experiment: ServeKill, folders: Folders, place: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self._experiment, self._save, self._config = experiment, place / "save", place / "cache.yaml"
        self._config.write_text(yaml.safe_dump(experiment.cache), encoding="utf-8")
        self._plain = _Plain(experiment.model, folders)
        self._rng = random.Random(experiment.seed)
        self._texts = texts_of(experiment.seed)
        self._held: set[str] = set()
        self._start_s = 1.0  # what the last start took
        self._n_checked = 0  # lives whose folder a server was started on since

    def started(self) -> AbstractContextManager[Running]:
        """A server on the folder."""
        values = {
            "model": self._plain.source,
            "config": str(self._config),
            "save": str(self._save),
            "save_every": str(self._experiment.save_every_s),
        }
        return started(COMMAND, values)

    def live(self, moment: str) -> None:
        """Start the server, and kill it at this moment."""
        answered: list[Answered] = []
        with self.started() as server:
            if moment == STARTING:
                sleep(self._rng.random() * self._start_s)
                server.signal(signal.SIGKILL)
            else:
                self.check(server)
                answered = asyncio.run(self._life(server, moment))
        must = self._held | surely_saved(answered, _version(self._save))
        self._held = self._plain.held(self._save, self._held | {one.text for one in answered})
        self.rows.append(
            {
                "moment": moment,
                "n_answered": len(answered),
                "is_half_written": (self._save / JOURNAL).is_file(),
                "n_held": len(self._held),
                "n_lost": len(must - self._held),
                "n_missed": 0,
                "n_wrong": sum(not self._plain.agrees(one.text, one.reply) for one in answered),
            }
        )

    def check(self, server: Running) -> None:
        """Once it is ready, have it serve what the folder held when it was started."""
        began = monotonic()
        server.wait(self._experiment.start_s)
        self._start_s = monotonic() - began
        replies = asyncio.run(_ask(server, sorted(self._held)))
        n_missed = sum(reply.rung != "exact" for reply in replies.values())
        n_wrong = sum(not self._plain.agrees(text, reply) for text, reply in replies.items())
        for row in self.rows[self._n_checked :]:
            row["n_missed"] += n_missed
            row["n_wrong"] += n_wrong
        self._n_checked = len(self.rows)

    async def _life(self, server: Running, moment: str) -> list[Answered]:
        """Ask for new texts until the server is killed."""
        asking = asyncio.create_task(self._ask_new(server))
        await asyncio.sleep(self._rng.random() * self._experiment.span_s)
        if moment == SAVING:
            async with asyncio.timeout(self._experiment.start_s):
                await self._save_begins()
                began = monotonic()
                await self._save_ends()
                took_s = monotonic() - began
                await self._save_begins()
            await asyncio.sleep(self._rng.random() * took_s)
        elif moment == STOPPING:
            server.signal(signal.SIGTERM)
            await asyncio.sleep(self._rng.random() * STOP_S)
        server.signal(signal.SIGKILL)
        return await asking

    async def _ask_new(self, server: Running) -> list[Answered]:
        client, answered = Client(server.port), []
        for text in islice(self._texts, self._experiment.texts):
            try:
                reply = await client.ask(embed(text))
            except OSError:
                break
            if reply.status != OK:  # it stops
                break
            answered.append(Answered(text, reply, _version(self._save)))
            await asyncio.sleep(self._experiment.span_s / self._experiment.texts)
        client.close()
        return answered

    async def _save_begins(self) -> None:
        while not (self._save / JOURNAL).exists():
            await asyncio.sleep(LOOK_S)

    async def _save_ends(self) -> None:
        while (self._save / JOURNAL).exists():
            await asyncio.sleep(LOOK_S)


class _Plain:
    """The model in this process: what it answers by itself, and what a saved cache holds."""

    def __init__(self, model: str, folders: Folders) -> None:
        from llmcache.serving.loading import load_served

        self.source = find(model, folders.models)
        self._served = load_served(self.source)
        self._answers: dict[str, NDArray[np.float32]] = {}

    def agrees(self, text: str, reply: Reply) -> bool:
        """Whether the model alone answers the same."""
        if text not in self._answers:
            self._answers[text] = self._run(text)
        return reply.status == OK and np.allclose(json.loads(reply.body)[0], self._answers[text], rtol=0, atol=EQUAL)

    def held(self, save: Path, texts: Iterable[str]) -> set[str]:
        """Those of the texts that the save in a folder holds."""
        if _version(save) is None:
            return set()
        served = self._served
        with LLMCache.load(served.model, save, tokenizer=served.tokenizer, answer_of=served.answer_of) as cache:
            with cache.namespace("warm-up"):  # before its first call a cache answers none early
                self._run("a text")
            return {text for text in texts if self._is_held(cache, text)}

    def _is_held(self, cache: LLMCache, text: str) -> bool:
        try:
            with cache.only_if_cached():
                self._run(text)
        except NotCachedError:
            return False
        return True

    def _run(self, text: str) -> NDArray[np.float32]:
        with torch.inference_mode():
            made = self._served.forward(encode(self._served.tokenizer, text, self._served.max_length))
        return made[0].numpy()


async def _ask(server: Running, texts: Sequence[str]) -> dict[str, Reply]:
    client = Client(server.port)
    replies = {text: await client.ask(embed(text)) for text in texts}
    client.close()
    return replies


def embed(text: str, session: str | None = None) -> bytes:
    """The request for the embedding of a text."""
    return post("/embed", {"inputs": text, "normalize": False, "truncate": True}, session=session)


def texts_of(seed: int) -> Iterator[str]:
    """Different texts, without an end."""
    seen: set[str] = set()
    for number in count(seed):
        new = dict.fromkeys(one.text for one in support_desk(1000, number))
        yield from (text for text in new if text not in seen)
        seen |= new.keys()


def _version(save: Path) -> Version | None:
    """What tells one save in a folder from another; None: it holds none."""
    try:
        found = (save / MANIFEST).stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def surely_saved(answered: Sequence[Answered], last: Version | None) -> set[str]:
    """Texts that were answered before the last save but one was finished."""
    seen = list(dict.fromkeys([*(one.version for one in answered), last]))
    return {one.text for one in answered if one.version in seen[:-2]}


def _point(rows: Sequence[dict[str, Any]], moment: str) -> dict[str, Any]:
    found = [row for row in rows if row["moment"] == moment]
    return {
        "moment": moment,
        "n": len(found),
        "n_half_written": sum(row["is_half_written"] for row in found),
        **{name: sum(row[name] for row in found) for name in ("n_answered", "n_held", "n_missed", "n_wrong", "n_lost")},
    }
