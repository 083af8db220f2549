"""Measure `serve_chat`: conversations over HTTP, and when each turn has its first token.

Some sessions go on at once behind one system prompt. Each asks its next question when the last one was answered, and
sends all that was said before with it, as clients of `/v1/chat/completions` do. Answers are greedy and streamed; time
to first token (TTFT) is from sending to the first piece of text. The server with the cache and the one without get the
same questions, and both have to give the same text.
"""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import numpy as np
from pydantic import Field

from experiments.data.streams.support_desk import support_desk
from experiments.measures.base import Experiment, Outcome
from experiments.measures.over_http.client import Client, post
from experiments.measures.over_http.loops import percentiles
from experiments.measures.over_http.made import order_of
from experiments.measures.over_http.processes import running
from experiments.measures.serve_load import CACHE
from experiments.measures.shared_prompt import SYSTEM
from experiments.models.loading import SMOLLM2, find
from experiments.support.folders import Folders
from experiments.support.progress import tracked

CHAT = "/v1/chat/completions"
NO_CACHE = "no_cache"
#: Without the classifier's calibrated cache; see `processes.SERVERS`. `{name}` is what the model is called in requests.
SERVERS: Mapping[str, str] = {
    CACHE: "{python} -m llmcache serve --model {model} --served-name {name} --port {port}",
    NO_CACHE: "{python} -m llmcache serve --model {model} --served-name {name} --no-cache --port {port}",
}


class ServeChat(Experiment):
    """Settings of the measure.

    Attributes:
        model: A causal language model with a chat template.
        sessions: Conversations at once.
        turns: Questions of each.
        max_tokens: Most tokens of an answer.
        rounds: Each with questions of its own and with servers started anew; the order of the servers alternates.
        servers: Command of each server by its name.
        start_s: Longest time until a server is ready, seconds.
    """

    model: str = SMOLLM2
    sessions: int = Field(default=4, ge=1)
    turns: int = Field(default=8, ge=1)
    max_tokens: int = Field(default=24, ge=1)
    rounds: int = Field(default=2, ge=1)
    servers: dict[str, str] = Field(default_factory=lambda: dict(SERVERS), min_length=1)
    start_s: float = Field(default=180.0, gt=0)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer."""

    session: int
    number: int
    ttft_ms: float
    e2e_ms: float
    text: str
    usage: Mapping[str, Any]  # empty where the server told none


def run(experiment: ServeChat, folders: Folders) -> Outcome:
    """Lead the conversations with every server, in turns."""
    model = find(experiment.model, folders.models)
    found: dict[tuple[int, str], list[Turn]] = {}
    cpu: dict[str, float] = {}
    turns = [(k, server) for k in range(experiment.rounds) for server in order_of(experiment.servers, k)]
    for number, server in tracked(turns, len(turns), "Servers"):
        questions = questions_of(experiment, number)
        with running(
            experiment.servers[server], {"model": model, "name": experiment.model}, start_s=experiment.start_s
        ) as process:
            before, own = process.cpu_s, process_time()
            found[number, server] = asyncio.run(_all(Client(process.port), experiment, questions))
            cpu[server] = cpu.get(server, 0.0) + process.cpu_s - before
            cpu["generator"] = cpu.get("generator", 0.0) + process_time() - own
    points = [_point(experiment, found, server, cpu[server]) for server in experiment.servers]
    plain = next((one["ttft_p50_ms"] for one in points if one["server"] == NO_CACHE), None)
    for one in points:
        one["gain"] = plain / one["ttft_p50_ms"] if plain is not None and one["server"] != NO_CACHE else None
    metrics = {
        "task": "support_desk",
        "model": experiment.model,
        "sessions": experiment.sessions,
        "turns": experiment.turns,
        "max_tokens": experiment.max_tokens,
        "rounds": experiment.rounds,
        "generator_cpu_s": cpu["generator"],
        "points": points,
        "summary": points,
    }
    return Outcome([_row(number, server, one) for (number, server), some in found.items() for one in some], metrics)


def questions_of(experiment: ServeChat, number: int) -> list[list[str]]:
    """Of each session those of its turns, no two alike."""
    n = experiment.sessions * experiment.turns
    texts = list(dict.fromkeys(one.text for one in support_desk(4 * n, experiment.seed + number)))
    random.Random(number).shuffle(texts)
    return [texts[i * experiment.turns : (i + 1) * experiment.turns] for i in range(experiment.sessions)]


async def _all(client: Client, experiment: ServeChat, questions: Sequence[Sequence[str]]) -> list[Turn]:
    talks = (_talk(client, experiment, session, some) for session, some in enumerate(questions))
    return [turn for talk in await asyncio.gather(*talks) for turn in talk]


async def _talk(client: Client, experiment: ServeChat, session: int, questions: Sequence[str]) -> list[Turn]:
    said = [{"role": "system", "content": SYSTEM}]
    turns = []
    for number, question in enumerate(questions):
        said.append({"role": "user", "content": question})
        turns.append(await _turn(client, experiment, session, number, said))
        said.append({"role": "assistant", "content": turns[-1].text})
    return turns


async def _turn(
    client: Client, experiment: ServeChat, session: int, number: int, said: Sequence[Mapping[str, str]]
) -> Turn:
    asked = {
        "model": experiment.model,
        "messages": said,
        "max_tokens": experiment.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first, parts, usage = perf_counter(), None, [], {}
    async for data in client.events(post(CHAT, asked)):
        if data == b"[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            raise OSError(f"{CHAT}: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                first = first or perf_counter()
                parts.append(text)
    ended = perf_counter()
    return Turn(session, number, 1e3 * ((first or ended) - started), 1e3 * (ended - started), "".join(parts), usage)


def _point(
    experiment: ServeChat, found: Mapping[tuple[int, str], Sequence[Turn]], server: str, cpu_s: float
) -> dict[str, Any]:
    turns = [one for (_, who), some in found.items() if who == server for one in some]
    ttft = percentiles(np.array([one.ttft_ms for one in turns]))
    later = percentiles(np.array([one.ttft_ms for one in turns if one.number]))
    total = percentiles(np.array([one.e2e_ms for one in turns]))
    prompt = sum(one.usage.get("prompt_tokens", 0) for one in turns)
    cached = sum((one.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for one in turns)
    return {
        "server": server,
        "n": len(turns),
        **{f"ttft_{name}": value for name, value in ttft.items()},
        "later_ttft_p50_ms": later["p50_ms"],
        "e2e_p50_ms": total["p50_ms"],
        "prompt_tokens": prompt,
        "cached": cached / prompt if prompt else None,
        "n_same": _n_same(found, server),
        "server_cpu_s": cpu_s,
    }


def _n_same(found: Mapping[tuple[int, str], Sequence[Turn]], server: str) -> int | None:
    """Answers that are those of the server without a cache, text and number of tokens; None without such a server."""
    plain = {number: some for (number, who), some in found.items() if who == NO_CACHE}
    if not plain:
        return None
    pairs = [
        (one, other)
        for (number, who), some in found.items()
        if who == server
        for one, other in zip(some, plain[number], strict=True)
    ]
    return sum(_told(one) == _told(other) for one, other in pairs)


def _told(turn: Turn) -> tuple[str, Any]:
    return turn.text, turn.usage.get("completion_tokens")


def _row(number: int, server: str, turn: Turn) -> dict[str, Any]:
    return {
        "round": number,
        "server": server,
        "session": turn.session,
        "turn": turn.number,
        "ttft_ms": round(turn.ttft_ms, 3),
        "e2e_ms": round(turn.e2e_ms, 3),
        "prompt_tokens": turn.usage.get("prompt_tokens"),
        "completion_tokens": turn.usage.get("completion_tokens"),
        "text": turn.text,
    }
