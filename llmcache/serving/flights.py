"""Generations in progress, and their clients' views."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from llmcache.generation import Sampling, StoppedBy, Stream, Token
from llmcache.serving.metrics import IN_FLIGHT, Metrics
from llmcache.serving.refusals import Refusal

Ids = tuple[int, ...]
Key = tuple[str, Ids, Sampling]  # namespace, prompt, settings
Item = tuple[Token, StoppedBy | None]
Arrived = asyncio.Queue[tuple["Generating", Item | Refusal]]


@dataclass(eq=False, slots=True)
class Flight:
    """A generation in progress: its tokens so far and its readers."""

    key: Key
    stream: Stream | None  # None: ended
    task: "asyncio.Task[None] | None" = None
    readers: list["Generating"] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    rung: str | None = None
    n_cached: int = 0
    scored: tuple[Token, ...] = ()  # the prompt's tokens but the first
    is_stored: bool = True  # nothing of its namespace was forgotten since it began

    @property
    def namespace(self) -> str:
        return self.key[0]

    @property
    def prompt(self) -> Ids:
        return self.key[1]

    def put(self, token: Token, answer: Stream) -> None:
        """Store the stream's newest token and pass it to all readers."""
        if not self.items and answer.outcome is not None:
            self.rung = answer.outcome.rung
            self.n_cached = len(self.prompt) if self.rung == "exact" else answer.outcome.n_prefix
        self.scored = answer.prompt
        item = token, answer.stopped_by
        self.items.append(item)
        for reader in self.readers:
            reader.put(item)


class Generating:
    """One client's view of a flight. Pass every item from the queue to `take` until `is_over`."""

    def __init__(
        self,
        flight: Flight,
        is_first: bool,
        arrived: Arrived,
        metrics: Metrics,
        leave: Callable[[Flight, "Generating"], None],
    ) -> None:
        """Join a flight; `leave` removes a reader from it."""
        self._flight, self._is_first, self._arrived, self._metrics = flight, is_first, arrived, metrics
        self._leave = leave
        self._has_first_token = False
        self._started_s = perf_counter()
        self.is_over = False
        self.prompt = flight.prompt
        self.n_prompt = len(self.prompt)
        for item in flight.items:
            self.put(item)
        flight.readers.append(self)

    def put(self, item: Item | Refusal) -> None:
        """Queue a token, or the refusal that ends the answer."""
        self._arrived.put_nowait((self, item))

    def take(self, item: Item | Refusal) -> Item:
        """Update the metrics for an item and return it; raise it if it is a refusal."""
        if isinstance(item, Refusal):
            self._finish("error")
            raise item
        if not self._has_first_token:
            self._has_first_token = True
            self._metrics.first_token.observe(perf_counter() - self._started_s)
            self._metrics.served(self.rung, self.n_prompt, self.n_cached)
        if item[1] is not None:
            self._finish(item[1])
        return item

    @property
    def rung(self) -> str | None:
        """Rung that served the prompt, `IN_FLIGHT` if shared, None if computed; valid after the first token."""
        return self._flight.rung if self._is_first else IN_FLIGHT

    @property
    def n_cached(self) -> int:
        """Number of prompt tokens not computed for this request; valid after the first token."""
        return self._flight.n_cached if self._is_first else self.n_prompt

    @property
    def scored(self) -> tuple[Token, ...]:
        """The prompt's tokens but the first, if they are scored (`Stream.prompt`); valid after the first token."""
        return self._flight.scored

    def stop(self) -> None:
        """End the answer at a stop text. Idempotent."""
        if not self.is_over:
            self._finish("stop")

    def close(self) -> None:
        """End the answer because the client disconnected. Idempotent."""
        if not self.is_over:
            self._metrics.cancelled.inc()
            self._finish(None)

    def _finish(self, reason: StoppedBy | Literal["error"] | None) -> None:
        self.is_over = True
        if reason is not None:
            self._metrics.finished(reason)
        self._leave(self._flight, self)
