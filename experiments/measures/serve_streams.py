"""Measure `serve_streams`: what servers of a decoder take to stream answers to several clients at once, over HTTP.

A round starts each server anew and sends it three loads of streamed chat requests, one after the other:

| load | requests |
|---|---|
| `cold` | `streams` questions at once, all after the same system prompt of `rules` sentences |
| `warm` | as many other questions at once, after the same system prompt |
| `beside` | an answer of `long_tokens`; from its 8th token on, beside a system prompt of `long_rules` new sentences |

TTFT and gaps between tokens are those that a client sees: of pieces of text, as they arrive. CPU seconds are the
server's. The order of servers is reversed in every other round.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from pydantic import Field

from experiments.measures.base import Experiment, Outcome
from experiments.measures.over_http.client import Client, post
from experiments.measures.over_http.servers import Running, running
from experiments.models.loading import find
from experiments.support.files import Folders
from experiments.support.progress import tracked

_PATH = "/v1/chat/completions"
_RULES = (
    "You are the assistant of a bank.",
    "Answer briefly and politely.",
    "Cards are blocked in the app, under settings.",
    "A transfer abroad takes two working days.",
    "Never reveal a password.",
    "Fees are listed on the page of prices.",
    "A lost card is replaced within five days.",
    "Disputes are opened by telephone.",
)
_COLD = ("Where is my card?", "How long does a transfer take?", "I lost my password.", "What does a payment cost?")
_WARM = (
    "Tell me a story about a card.",
    "How do I open a dispute?",
    "Write a letter about fees.",
    "List all transfers.",
)
_N_BEFORE = 8  # tokens of the long answer before a long prompt arrives


class ServeStreams(Experiment):
    model: str = Field(min_length=1)  # a prepared causal language model with a chat template, or a folder
    # Commands by name; `{python}`, `{model}` and `{port}` are filled in.
    servers: dict[str, str] = Field(min_length=1)
    streams: int = Field(default=4, ge=1)
    rules: int = Field(default=50, ge=0)  # sentences of the shared system prompt
    new_tokens: int = Field(default=24, ge=2)  # most tokens of an answer
    long_rules: int = Field(default=100, ge=0)
    long_tokens: int = Field(default=100, ge=_N_BEFORE + 1)  # most tokens of the answer beside it
    rounds: int = Field(default=3, ge=1)
    start_s: float = Field(default=180.0, gt=0)  # longest time until a server is ready


@dataclass(slots=True)
class Answer:
    """One streamed answer, as its client sees it."""

    sent_s: float
    times_s: list[float] = field(default_factory=list)  # of each piece of text
    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    @property
    def n_tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)

    @property
    def n_cached(self) -> int | None:
        """Tokens of the prompt that were not computed; None if the server does not tell."""
        found = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return None if found is None else int(found)


def run(experiment: ServeStreams, folders: Folders) -> Outcome:
    model = str(find(experiment.model, folders.models))
    rows, texts = list[dict[str, Any]](), dict[str, set[str]]()
    for number in tracked(range(experiment.rounds), "rounds"):
        for name in list(experiment.servers)[:: -1 if number % 2 else 1]:
            values = {"model": model}
            with running(experiment.servers[name], values, start_s=experiment.start_s) as server:
                for load, figures in asyncio.run(_loads(experiment, server, model, number, texts)).items():
                    rows.append({"round": number, "server": name, "load": load, **figures})
    summary = [_middle(rows, name, load) for name in experiment.servers for load in ("cold", "warm", "beside")]
    metrics = {
        "model": experiment.model,
        **{name: getattr(experiment, name) for name in ("streams", "new_tokens", "rounds")},
        "threads": torch.get_num_threads(),
        # Whether each prompt had one answer in all rounds and by all servers.
        "same_answers": sum(len(some) == 1 for some in texts.values()),
        "prompts": len(texts),
        "summary": summary,
    }
    return Outcome(rows, metrics)


def _middle(rows: Sequence[Mapping[str, Any]], server: str, load: str) -> dict[str, Any]:
    """Return the medians of all rounds."""
    own = [row for row in rows if (row["server"], row["load"]) == (server, load)]
    names = [name for name, value in own[0].items() if name != "round" and not isinstance(value, str)]
    middle = {name: None if own[0][name] is None else median(row[name] for row in own) for name in names}
    spread = {f"tokens_per_s_{of.__name__}": of(row["tokens_per_s"] for row in own) for of in (min, max)}
    return {"server": server, "load": load, **middle, **spread}


async def _loads(
    experiment: ServeStreams, server: Running, model: str, number: int, texts: dict[str, set[str]]
) -> dict[str, dict[str, Any]]:
    """Send all loads; return the figures of each. Texts of answers are added to `texts`, by prompt."""
    with closing(Client(server.port)) as client:

        async def ask(salt: str, n_rules: int, question: str, most: int, told: asyncio.Event | None = None) -> Answer:
            rules = " ".join(f"Rule {i}: {_RULES[i % len(_RULES)]}" for i in range(n_rules))
            messages = [{"role": "system", "content": f"{salt}{rules}"}, {"role": "user", "content": question}]
            answer = await _ask(client, model, messages, most, told)
            texts.setdefault(json.dumps([messages, most]), set()).add(answer.text)
            return answer

        await ask("Hello.", 0, "Who are you?", 4)  # some servers start their generation with the first request
        found = {}
        for load, questions in (("cold", _COLD), ("warm", _WARM)):
            begun, cpu_s = perf_counter(), server.cpu_s
            asked = [f"{questions[i % len(questions)]} {i}" for i in range(experiment.streams)]
            tasks = [ask("", experiment.rules, question, experiment.new_tokens) for question in asked]
            answers = await asyncio.gather(*tasks)
            found[load] = _figures(answers, perf_counter() - begun, server.cpu_s - cpu_s, answers)
        begun, cpu_s, is_under_way = perf_counter(), server.cpu_s, asyncio.Event()
        long = asyncio.create_task(ask("", 0, "Tell me a long story.", experiment.long_tokens, is_under_way))
        await asyncio.wait([long, asyncio.create_task(is_under_way.wait())], return_when=asyncio.FIRST_COMPLETED)
        other = await ask("Another bank. ", experiment.long_rules, "Say yes.", 4)
        answers = [await long, other]
        found["beside"] = _figures(answers, perf_counter() - begun, server.cpu_s - cpu_s, [answers[0]], other)
    return found


def _figures(
    answers: Sequence[Answer], wall_s: float, cpu_s: float, followed: Sequence[Answer], prompt: Answer | None = None
) -> dict[str, Any]:
    """Return the figures of a load: gaps of the answers in `followed`, TTFT of `prompt`, or of all."""
    n_tokens, told = sum(one.n_tokens for one in answers), [one.n_cached for one in answers]
    waited = [one.ttft_s for one in ([prompt] if prompt else answers)]
    return {
        "prompt_tokens": (prompt or answers[0]).usage["prompt_tokens"],
        "tokens": n_tokens,
        "tokens_per_s": n_tokens / wall_s,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "ttft_s": median(waited),
        "ttft_max_s": max(waited),
        "longest_gap_s": max(one.longest_gap_s for one in followed),
        "cached_tokens": None if None in told else sum(one for one in told if one),
    }


async def _ask(
    client: Client, model: str, messages: Sequence[Mapping[str, str]], most: int, is_under_way: asyncio.Event | None
) -> Answer:
    body = {"model": model, "messages": messages, "max_tokens": most, "temperature": 0, "stream": True}
    answer = Answer(perf_counter())
    async for event in client.events(post(_PATH, {**body, "stream_options": {"include_usage": True}})):
        answer.usage = event.get("usage") or answer.usage
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                answer.times_s.append(perf_counter())
                answer.text += text
        if is_under_way is not None and len(answer.times_s) >= _N_BEFORE:
            is_under_way.set()
    return answer
