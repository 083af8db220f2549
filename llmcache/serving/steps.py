"""Runs the model for generations: prompts in chunks, in turn, and between two chunks one token of every stream.

A prompt waits for those ahead of it that begin alike: their K/V is stored first, so that a beginning is computed once.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from operator import eq
from time import perf_counter

import torch

from llmcache.generation import Batch, Stream, Token
from llmcache.serving.flights import Flight
from llmcache.serving.keys import PUBLIC
from llmcache.serving.shared import Shared


class Steps:
    """Runs flights of one model. Call it from one event loop, but for `warm_up`."""

    def __init__(self, shared: Shared) -> None:
        self._cache, self._thread, settings, self._metrics, self._is_caching = shared
        self._chunk, self._has_keys = settings.prefill_chunk, settings.keys is not None
        prefix = self._cache.config.prefix
        self._block = prefix.block if prefix else None
        self._threads = ThreadPoolExecutor(settings.max_streams, "llmcache-prefill")
        self._prefilling: list[_Prefilling] = []  # in the order in which they came
        self._decoding: dict[Flight, asyncio.Future[None]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._batch: Batch | None = None  # used by the model thread alone

    def close(self) -> None:
        """Shut the threads down. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def warm_up(self, start: Callable[[], Stream], namespace: str) -> None:
        """Run two streams of at least two tokens from their prompts to their ends. Runs in the model thread."""
        for _ in range(2):
            answer = start()
            with self._where(namespace, is_stored=True):
                next(answer)
            while answer.stopped_by is None:
                self._step([answer])
        self._step([])

    async def run(self, flight: Flight) -> None:
        """Generate to the last token, or until the flight ends. Raises the errors of the model."""
        begun_s, prefill_s = perf_counter(), 0.0
        try:
            if (answer := flight.stream) is None:
                return
            flight.put(await self._prefill(flight, answer), answer)
            self._metrics.generated.inc()
            prefill_s = perf_counter() - begun_s
            if answer.stopped_by is None and flight.stream is not None:
                await self._decode(flight)
        finally:  # also if the readers have left
            if flight.items:
                decode_s = flight.items[-1][0].time_s - flight.items[0][0].time_s
                self._metrics.prefill.observe(prefill_s)
                self._metrics.decode.observe(decode_s)
                self._metrics.inference.observe(prefill_s + decode_s)

    async def _prefill(self, flight: Flight, answer: Stream) -> Token:
        """Return the first token."""
        prefilling = _Prefilling(flight, asyncio.get_running_loop())
        ahead = [*self._prefilling]
        self._prefilling.append(prefilling)
        try:
            for other in ahead:
                if self._block is not None and self._is_caching():
                    await other.wait_for(flight, self._block)
            return await prefilling.loop.run_in_executor(self._threads, self._run_prompt, prefilling, answer)
        finally:
            self._prefilling.remove(prefilling)
            prefilling.end()

    def _run_prompt(self, prefilling: "_Prefilling", answer: Stream) -> Token:
        """Return the first token. Runs in a prefill thread, between steps of the model thread."""
        flight, n_known = prefilling.flight, 0

        def check() -> None:
            if flight.stream is None:
                raise RuntimeError("the generation was cancelled during prefill")

        def give_way() -> None:
            hold.give_way()
            check()

        if self._block is not None:
            with self._where(flight.namespace, flight.is_stored):
                n_known = self._look_up(flight)
            prefilling.loop.call_soon_threadsafe(prefilling.look_up, n_known)
        with self._thread.held(flight.namespace) as hold:
            check()
            in_chunks = self._cache.chunked(self._chunk, give_way) if self._chunk else nullcontext()
            with self._where(flight.namespace, flight.is_stored), in_chunks:  # it may be forgotten while it waits
                token = next(answer)
            if self._chunk:
                hold.share = min(1.0, (len(flight.prompt) - n_known) / self._chunk)
        return token

    def _look_up(self, flight: Flight) -> int:
        """Return how many tokens of a prompt are stored."""
        ids = torch.tensor([flight.prompt], device=next(self._cache.model.parameters()).device)
        outcome = self._cache.explain(input_ids=ids, use_cache=True)[0].outcome
        return len(flight.prompt) if outcome.rung == "exact" else outcome.n_prefix

    @contextmanager
    def _where(self, namespace: str, is_stored: bool) -> Iterator[None]:
        """Serve and store calls within the context as those of a namespace, or not at all."""
        public = PUBLIC if self._has_keys else None  # without keys there is one namespace
        is_cached = self._is_caching() and is_stored
        where = self._cache.namespace(namespace, prefixes_from=public) if is_cached else self._cache.disabled()
        with where, torch.inference_mode():
            yield

    async def _decode(self, flight: Flight) -> None:
        """Generate the tokens after the first one."""
        loop = asyncio.get_running_loop()
        over = self._decoding[flight] = loop.create_future()
        if self._stepping is None or self._stepping.done():
            self._stepping = loop.create_task(self._step_all())
        try:
            await over
        finally:
            self._decoding.pop(flight, None)

    async def _step_all(self) -> None:
        """Run decode steps of all flights until none is left."""
        is_over = False
        try:
            while not is_over:
                flights = {flight: flight.stream for flight in self._decoding if flight.stream is not None}
                taken = await self._thread.run(partial(self._step, [*flights.values()]))  # without any, K/V is freed
                for (flight, answer), token in zip(flights.items(), taken, strict=True):
                    self._put(flight, answer, token)
                is_over = not (flights or self._decoding)
        except Exception as error:
            self._batch = None
            for over in self._decoding.values():
                if not over.done():
                    over.set_exception(error)
            self._decoding.clear()

    def _step(self, answers: Sequence[Stream]) -> list[Token | Exception]:
        """Return the next token of each stream. Runs in the model thread."""
        with torch.inference_mode():
            self._batch = self._batch or Batch(self._cache.model)
            return self._batch.step(answers)

    def _put(self, flight: Flight, answer: Stream, token: Token | Exception) -> None:
        """Pass a token on, or the error that ends the flight, unless its readers have left."""
        over = self._decoding.get(flight)
        if over is None or over.done():
            return
        if isinstance(token, Exception):
            over.set_exception(token)
        else:
            self._metrics.inter_token.observe(token.time_s - flight.items[-1][0].time_s)
            self._metrics.generated.inc()
            flight.put(token, answer)
            if answer.stopped_by is not None:
                over.set_result(None)
        if over.done():
            del self._decoding[flight]


@dataclass(eq=False, slots=True)
class _Prefilling:
    """A flight whose prompt waits or is run."""

    flight: Flight
    loop: asyncio.AbstractEventLoop
    n_known: int = 0  # tokens of the prompt that were stored before; set by `look_up`
    looked_up: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def look_up(self, n_known: int) -> None:
        """Set how many tokens were stored before."""
        self.n_known = n_known
        self.looked_up.set()

    def end(self) -> None:
        """Let all go on that wait."""
        self.looked_up.set()
        self.ended.set()

    async def wait_for(self, flight: Flight, block: int) -> None:
        """Wait while this prompt computes a block of tokens, or more, with which that of `flight` begins."""
        n_shared = self._n_shared(flight)
        if n_shared >= block:
            await self.looked_up.wait()
            if n_shared >= self.n_known + block:
                await self.ended.wait()

    def _n_shared(self, flight: Flight) -> int:
        """Return with how many tokens both prompts begin; 0 in different namespaces."""
        if flight.namespace != self.flight.namespace:
            return 0
        return sum(takewhile(bool, map(eq, self.flight.prompt, flight.prompt)))
