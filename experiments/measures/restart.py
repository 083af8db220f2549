"""Measure `restart`: time to first token of conversations that a process had before it was killed, in the next one.

| way | what the new process begins with |
|---|---|
| `cold` | nothing: it computes |
| `restarted` | the disk store that the killed one wrote to, its files in the memory of the operating system |
| `rebooted` | likewise, the files read from the disk |

Each way has processes of its own, which load the model, make one unrelated generation, keep Python from looking through
all of that again (a third of a second, in whichever request), as the server does before it is ready, and are then asked
each conversation once more as it was (`repeated`), and another with a new question at its end (`next_turn`). Ways take
turns, round by round. Prompts are made of random tokens: time does not hang on what they say.
"""

import gc
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from experiments.measures.base import Experiment, Outcome
from experiments.measures.bench.latency import rotated
from experiments.models.architectures import build, check
from experiments.models.loading import find
from experiments.support.folders import Folders
from experiments.support.processes import begin
from llmcache import LLMCache
from llmcache.generation import Sampling, generate

WAYS = ("cold", "restarted", "rebooted")
KINDS = ("repeated", "next_turn")
NEW_TOKENS = 4


class Restart(Experiment):
    """Settings of the measure."""

    # Causal architectures of the benchmark, with random weights, or prepared models and folders.
    models: tuple[str, ...] = Field(min_length=1)
    # Tokens of each conversation.
    conversations: tuple[PositiveInt, ...] = Field(default=(128, 512), min_length=1)
    question: int = Field(default=32, ge=1)  # tokens of the new question
    rounds: int = Field(default=3, ge=1)  # processes of each way
    store_least_tokens: int | None = Field(default=None, ge=0)  # of llmcache


def run(experiment: Restart, folders: Folders) -> Outcome:
    """Measure every model."""
    rows = [row for model in experiment.models for row in _measure(experiment, model, folders)]
    summary = []
    for model in experiment.models:
        for kind in KINDS:
            for length in experiment.conversations:
                asked = [row for row in rows if (row["model"], row["kind"], row["length"]) == (model, kind, length)]
                ms = {way: median(row["ttft_ms"] for row in asked if row["way"] == way) for way in WAYS}
                summary.append(
                    {
                        "model": model,
                        "kind": kind,
                        "length": length,
                        **{f"{way}_ms": ms[way] for way in WAYS},
                        "speedup": ms["cold"] / ms["restarted"],
                        "n_other_tokens": sum(not row["is_same"] for row in asked),
                    }
                )
    return Outcome(rows, {"summary": summary, "threads": torch.get_num_threads()})


def _measure(experiment: Restart, model: str, folders: Folders) -> Iterator[dict[str, Any]]:
    """One row a process and prompt."""
    name = find(model, folders.models)
    check(name, max(experiment.conversations) + experiment.question + NEW_TOKENS, head="token")
    task = name, experiment.seed, experiment.conversations, experiment.question
    first: dict[tuple[str, int], Any] = {}
    with TemporaryDirectory() as folder:
        left = Path(folder) / "left"
        _in_process(_fill, *task, _stored(experiment, left))
        for number in range(experiment.rounds):
            for way in rotated(WAYS, number):
                told = _in_process(_ask, *task, _begin(way, experiment, left))
                for row in told.pop("rows"):
                    tokens = row.pop("tokens")
                    is_same = tokens == first.setdefault((row["kind"], row["length"]), tokens)
                    yield {"model": model, "way": way, "round": number, **row, "is_same": is_same, **told}


def _stored(experiment: Restart, folder: Path) -> dict[str, Any]:
    """Settings of a cache with a store."""
    return {
        "store": {"name": "disk", "folder": str(folder)},
        "store_least_tokens": experiment.store_least_tokens,
    }


def _begin(way: str, experiment: Restart, left: Path) -> dict[str, Any]:
    """Settings of a cache that begins so: with a copy of the store, which another way has not added to."""
    if way == "cold":
        return {}
    copy = left.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(left, copy)
    if way == "rebooted":
        _forget_pages(copy)
    return _stored(experiment, copy)


def _conversations(vocabulary: int, lengths: Sequence[int], seed: int) -> dict[tuple[str, int], Tensor]:
    """Prompts (1, T) by kind and length: those that the first process was asked."""
    draw = torch.Generator().manual_seed(seed)
    asked = ((kind, length) for kind in KINDS for length in lengths)
    return {one: torch.randint(5, vocabulary, (1, one[1]), generator=draw) for one in asked}


def _build(name: str, seed: int) -> Any:
    model: Any = build(name, seed, "cpu", head="token").model
    model.config.use_cache = True
    return model


def _fill(
    say: Connection, name: str, seed: int, lengths: Sequence[int], question: int, settings: Mapping[str, Any]
) -> None:
    """Have the conversations, see them written, and be killed."""
    model = _build(name, seed)
    cache = LLMCache.wrap(model, **settings)
    for ids in _conversations(model.config.vocab_size, lengths, seed).values():
        generate(model, ids, Sampling(max_new_tokens=NEW_TOKENS))
    cache.drain()
    say.send({})
    os.kill(os.getpid(), signal.SIGKILL)


def _ask(
    say: Connection,
    name: str,
    seed: int,
    lengths: Sequence[int],
    question: int,
    settings: Mapping[str, Any],
) -> None:
    """Be asked again; tell of each prompt when the first token was there."""
    model = _build(name, seed)
    vocabulary = model.config.vocab_size
    started = perf_counter()
    cache = LLMCache.wrap(model, **settings)
    wrap_ms = 1e3 * (perf_counter() - started)
    with cache.disabled():  # the first call of all makes room for itself
        generate(model, torch.arange(16)[None] + 5, Sampling(max_new_tokens=2))
    gc.collect()
    gc.freeze()
    rows = []
    added = torch.randint(5, vocabulary, (1, question), generator=torch.Generator().manual_seed(seed + 1))
    for (kind, length), known in _conversations(vocabulary, lengths, seed).items():
        ids = known if kind == "repeated" else torch.cat([known, added], dim=1)
        made = generate(model, ids, Sampling(max_new_tokens=NEW_TOKENS))
        assert made.times is not None
        rows.append(
            {
                "kind": kind,
                "length": length,
                "n_prompt": made.n_prompt,
                "rung": cache.last[0].rung,
                "ttft_ms": 1e3 * made.times.ttft_s,
                "tokens": list(made.tokens),
            }
        )
    store = cache.stats().store
    told = {"least_tokens": None, "store_bytes": None}
    if store is not None:
        told = {"least_tokens": store.least_tokens, "store_bytes": store.nbytes}
    cache.unwrap()
    say.send({"rows": rows, "wrap_ms": wrap_ms, **told})


def _in_process(work: Any, *args: Any) -> dict[str, Any]:
    """What a process of its own tells."""
    process, listen = begin(work, *args)
    try:
        told: dict[str, Any] = listen.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process ended with exit code {process.exitcode}, and told nothing") from None
    process.join()
    return told


def _forget_pages(folder: Path) -> None:
    """Have the operating system read the files of a folder from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            number = os.open(path, os.O_RDONLY)
            try:
                os.fsync(number)
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(number)
