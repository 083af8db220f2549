"""Encoder requests before the queue: texts to tokens, and tokens to answers that the cache holds.

    short texts -> one thread tokenises and looks up all that wait, so many inputs in a turn
    long texts  -> another one tokenises them first: nobody waits for them

A turn looks up the inputs of one namespace in one call, which takes hardly longer than that of one input.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

from llmcache.serving.padded_model import Output, PaddedModel
from llmcache.serving.refusals import Refusal, described, stopping
from llmcache.serving.settings import ServerSettings
from llmcache.serving.tenants import PUBLIC
from llmcache.serving.tokenizing import Item, Side, Tokenizing, Tokens, is_long
from llmcache.serving.watching import Watcher

logger = logging.getLogger("llmcache.serving")

_TURN = 32  # inputs of a turn, unless one request has more: the first of them waits for the last
_SHORT = 64  # tokens to which all that are shorter may be padded


@dataclass(frozen=True, slots=True)
class Missing:
    """An input that the cache does not hold; or that was not looked for, since that is not worthwhile."""

    tokens: Tokens
    is_looked_up: bool


#: Of one input: its answer, its tokens where there is none, or why there are none either.
Found = Output | Missing | Refusal


@dataclass(frozen=True, slots=True)
class _Request:
    """Inputs that wait for their turn.

    Attributes:
        read: Their tokens, made in that turn or before it.
        n_inputs: How many they are.
        namespace: Where they are looked for.
        asked_at: When they came.
        found: What comes of them.
    """

    read: Callable[[], Sequence[Tokens | Refusal]]
    n_inputs: int
    namespace: str
    asked_at: float
    found: "asyncio.Future[list[Found]]"


class Lookups:
    """Looks inputs up in one cache. For one event loop."""

    def __init__(
        self,
        model: PaddedModel,
        settings: ServerSettings,
        tokenizing: Tokenizing,
        watcher: Watcher,
        is_caching: Callable[[], bool],
    ) -> None:
        """Begin with nothing waiting.

        Args:
            model: Serves what its cache holds.
            settings: Limits.
            tokenizing: The model's tokenizer.
            watcher: Told how long tokenising takes.
            is_caching: Whether inputs are looked up at all.
        """
        self._model = model
        self._settings = settings
        self._tokenizing = tokenizing
        self._watcher = watcher
        self._is_caching = is_caching
        self._waiting: list[_Request] = []  # oldest first
        self._n_under_way = 0  # requests that were taken out of it
        self._turns: asyncio.Task[None] | None = None
        self._is_closed = False
        self._pool = ThreadPoolExecutor(1, "llmcache-lookup")
        self._tokenising = ThreadPoolExecutor(1, "llmcache-tokenise")  # of long texts

    def __len__(self) -> int:
        """Requests that wait or are being looked up."""
        return len(self._waiting) + self._n_under_way

    async def find(
        self, items: Sequence[Item], namespace: str, truncate: bool, side: Side, asked_at: float
    ) -> list[Found]:
        """What there is of each input; what has waited for its turn for too long is refused.

        Args:
            items: At least one.
            namespace: Where they are looked for; with keys, `public` is looked in as well.
            truncate: Cut what is too long; else it is refused.
            side: Where it is cut.
            asked_at: When they came.
        """
        loop = asyncio.get_running_loop()
        tokens = await self.tokens(items, truncate, side) if is_long(items) else None

        def read() -> Sequence[Tokens | Refusal]:
            return self._tokenised(items, truncate, side) if tokens is None else tokens

        request = _Request(read, len(items), namespace, asked_at, loop.create_future())
        self._waiting.append(request)
        if self._turns is None or self._turns.done():
            self._turns = loop.create_task(self._take_turns())
        return await request.found

    async def tokens(self, items: Sequence[Item], truncate: bool, side: Side) -> list[Tokens | Refusal]:
        """Tokens of each input, or why it has none; arguments as of `find`."""
        pool = self._tokenising if is_long(items) else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, self._tokenised, items, truncate, side)

    def close(self) -> None:
        """End the threads."""
        self._is_closed = True
        for pool in (self._tokenising, self._pool):
            pool.shutdown()

    # -- in the event loop ---------------------------------------------------------------------------------------------

    async def _take_turns(self) -> None:
        """Look up what waits, turn by turn, until nothing does."""
        loop = asyncio.get_running_loop()
        while turn := self._next_turn():
            self._n_under_way = len(turn)
            try:
                found: Sequence[list[Found]] = await loop.run_in_executor(self._pool, self._look_up, turn)
            except Exception as error:
                if not self._is_closed:
                    logger.error("a lookup failed: %s", described(error))
                refusal = stopping() if self._is_closed else Refusal("backend", "the lookup failed")
                found = [[refusal] * request.n_inputs for request in turn]
            self._n_under_way = 0
            for request, one in zip(turn, found, strict=True):
                if not request.found.done():  # else who asked has gone
                    request.found.set_result(one)

    def _next_turn(self) -> list[_Request]:
        """The oldest requests, without those of clients that have gone."""
        turn: list[_Request] = []
        n_inputs = 0
        waiting = [request for request in self._waiting if not request.found.done()]
        for request in waiting:
            n_inputs += request.n_inputs
            if turn and n_inputs > _TURN:
                break
            turn.append(request)
        self._waiting = waiting[len(turn) :]
        return turn

    # -- in the threads ------------------------------------------------------------------------------------------------

    def _tokenised(self, items: Sequence[Item], truncate: bool, side: Side) -> list[Tokens | Refusal]:
        began = perf_counter()
        found = self._tokenizing.encode(items, truncate, side)
        self._watcher.tokenised(perf_counter() - began)
        return found

    def _look_up(self, turn: Sequence[_Request]) -> list[list[Found]]:
        """What there is of the inputs of each request."""
        now, most_s = perf_counter(), self._settings.max_queue_s
        found: list[list[Found]] = [
            [overloaded()] * request.n_inputs
            if now - request.asked_at > most_s
            else [Missing(one, False) if isinstance(one, Tokens) else one for one in request.read()]
            for request in turn
        ]
        if not self._is_caching():
            return found
        for namespace in dict.fromkeys(request.namespace for request in turn):
            asked = [
                of_request for request, of_request in zip(turn, found, strict=True) if request.namespace == namespace
            ]
            self._search(asked, namespace, is_stored_there=True)
            if self._settings.keys is not None and namespace != PUBLIC:  # without keys everybody has one namespace
                self._search(asked, PUBLIC, is_stored_there=False)
        return found

    def _search(self, asked: Sequence[list[Found]], namespace: str, is_stored_there: bool) -> None:
        """Put in the place of inputs that are missing what a namespace holds of them."""
        missing = [
            (of_request, i, one) for of_request in asked for i, one in enumerate(of_request) if isinstance(one, Missing)
        ]
        for part in self._parts([one.tokens for *_, one in missing]):
            tokens = [missing[number][2].tokens for number in part]
            served, is_looked_up = self._model.served(tokens, namespace, are_looked_up=not is_stored_there)
            for place, number in enumerate(part):
                of_request, i, one = missing[number]
                if place in served:
                    of_request[i] = served[place]
                elif is_stored_there:
                    of_request[i] = Missing(one.tokens, is_looked_up)

    def _parts(self, tokens: Sequence[Tokens]) -> Iterable[list[int]]:
        """Numbers of inputs that are looked up in one call: as many tokens as a batch has, and of about one length.

        Pooling leaves out as many tokens of each.
        """
        part: list[int] = []
        # So that the latest is the longest.
        for i in sorted(range(len(tokens)), key=lambda i: (tokens[i].n_prompt, len(tokens[i]))):
            first = tokens[part[0]] if part else tokens[i]
            is_other = tokens[i].n_prompt != first.n_prompt or len(tokens[i]) > max(_SHORT, 2 * len(first))
            if part and (is_other or len(tokens[i]) * (len(part) + 1) > self._settings.max_batch_tokens):
                yield part
                part = []
            part.append(i)
        if part:
            yield part


def overloaded() -> Refusal:
    """Of an input that has waited for too long."""
    return Refusal("overloaded", "the model is overloaded", retry_after_s=1)
