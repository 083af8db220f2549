"""Encoder requests: hits are answered as soon as they are tokenised, misses gathered and computed in batches.

    texts -> the look-up thread tokenises and looks up all that wait, some inputs a turn, and runs the hits
             (long texts are tokenised in a thread of their own first: nobody waits for them)
          -> the same input in flight: its answer is waited for
          -> queue -> a batch of one namespace, with little padding -> the model's thread -> stored by the cache

Sizes: B rows of a call, T tokens a row (padding included), O numbers of an output.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from llmcache.cache import LLMCache
from llmcache.errors import NotCachedError
from llmcache.serving.keys import PUBLIC
from llmcache.serving.loading import Served
from llmcache.serving.metrics import Metrics
from llmcache.serving.model_thread import ModelThread
from llmcache.serving.refusals import Refusal, described, overloaded, stopping
from llmcache.serving.settings import ServerSettings
from llmcache.serving.tokenizing import Item, Side, Tokenizing, Tokens, is_long

logger = logging.getLogger("llmcache.serving")

_TURN: Final = 64  # inputs that are looked up in a turn; a request may have more
_SHORT, _LONG = 8, 64  # tokens of inputs by which runs are measured; no input is padded beyond twice its own or _SHORT
_PADDED = 0.25  # of a batch's tokens: so much padding is always allowed
_PADDING = 4  # tokens of padding that are worth one run less, until that is measured
_BATCH_S = 0.1  # a batch is computed for so long at most, since what comes meanwhile waits; one input may be longer
_N_RUNS = 5  # of a measurement; the fastest counts


@dataclass(frozen=True, slots=True)
class Output:
    """What the model made of one input."""

    values: NDArray[np.float32]  # (O,): an embedding, or logits
    n_tokens: int  # of the input, special ones included
    rung: str | None  # that served it; None: it was computed
    queue_s: float  # seconds that it waited
    compute_s: float  # seconds that its lookup or its batch took

    @property
    def is_finite(self) -> bool:
        """Whether all values are numbers."""
        return bool(np.isfinite(self.values).all())


_Found = Output | Refusal | Tokens  # tokens of an input that the cache does not hold


class _Request(NamedTuple):
    """Inputs that wait to be looked up."""

    items: Sequence[Item]
    tokens: Sequence[Tokens | Refusal] | None  # of long texts, which were tokenised before
    namespace: str
    truncate: bool
    side: Side
    asked_at: float
    found: "asyncio.Future[list[_Found]]"


@dataclass(eq=False, slots=True)
class _Miss:
    """An input that waits to be computed."""

    namespace: str
    tokens: Tokens
    asked_at: float  # before it was looked up
    answer: "asyncio.Future[Output | Refusal]"
    queued_at: float = field(default_factory=perf_counter)
    n_waiting: int = 0  # requests that want it
    is_running: bool = False


class Encoder:
    """Serves the inputs of one model. For one event loop."""

    def __init__(
        self,
        cache: LLMCache,
        thread: ModelThread,
        settings: ServerSettings,
        tokenizing: Tokenizing,
        served: Served,
        metrics: Metrics,
        is_caching: Callable[[], bool],
    ) -> None:
        """Begin with nothing queued; `is_caching` tells whether inputs are looked up and stored."""
        self._cache, self._thread, self._settings, self._tokenizing = cache, thread, settings, tokenizing
        self._served, self._metrics, self._is_caching = served, metrics, is_caching
        self._device = next(cache.model.parameters()).device
        self._pad_id = getattr(served.tokenizer, "pad_token_id", None) or 0
        self._waiting: deque[_Request] = deque()  # to be looked up, oldest first
        self._n_looked_up = 0  # requests that wait for it, or are
        self._in_flight: dict[tuple[str, Tokens], _Miss] = {}
        self._queue: list[_Miss] = []  # oldest first
        self._batching: asyncio.Task[None] | None = None
        self._padding = _PADDING
        self._most_tokens = settings.max_batch_tokens
        self._lookups = ThreadPoolExecutor(1, "llmcache-lookup")
        self._tokenising = ThreadPoolExecutor(1, "llmcache-tokenise")  # of long texts

    def __len__(self) -> int:
        """Inputs that wait or are being computed."""
        return len(self._in_flight)

    @property
    def n_waiting(self) -> int:
        """Inputs that wait to be computed."""
        return len(self._queue)

    async def run(self, items: Sequence[Item], namespace: str, truncate: bool, side: Side) -> list[Output | Refusal]:
        """Return the model's output for each input, or why there is none; one does not spoil the others.

        With keys, inputs are looked for in `public` as well. What is too long is refused, unless `truncate`.
        """
        asked_at, loop = perf_counter(), asyncio.get_running_loop()
        tokens = await self.tokens(items, truncate, side) if is_long(items) else None
        request = _Request(items, tokens, namespace, truncate, side, asked_at, loop.create_future())
        self._n_looked_up += 1
        try:
            self._waiting.append(request)
            self._lookups.submit(self._take_turn, loop)
            found = await request.found
        except RuntimeError:  # the threads were closed
            raise stopping() from None
        finally:
            self._n_looked_up -= 1
        wanted = [self._wanted(request, one) if isinstance(one, Tokens) else one for one in found]
        try:
            outputs = [await asyncio.shield(one.answer) if isinstance(one, _Miss) else one for one in wanted]
        finally:
            for one in wanted:
                if isinstance(one, _Miss):
                    self._leave(one)
        for output in outputs:
            if isinstance(output, Output):
                self._metrics.served(output.rung, output.n_tokens, 0 if output.rung is None else output.n_tokens)
            self._metrics.finished("stop" if isinstance(output, Output) else "error")
        return outputs

    async def tokens(self, items: Sequence[Item], truncate: bool, side: Side) -> list[Tokens | Refusal]:
        """Return the tokens of each input, or why it has none; arguments as of `run`."""
        pool = self._tokenising if is_long(items) else self._lookups
        return await asyncio.get_running_loop().run_in_executor(pool, self._tokenised, items, truncate, side)

    async def states(self, tokens: Sequence[Tokens]) -> list[list[list[float]]]:
        """Compute the states of all tokens of each input (T, D), as if there were no cache."""

        def compute(one: Tokens) -> list[list[float]]:
            with torch.inference_mode(), self._cache.disabled():
                rows: list[list[float]] = self._served.states(self.padded([one]))[0].float().tolist()
            return rows

        try:
            return [await self._thread.run(partial(compute, one)) for one in tokens]
        except Exception as error:
            raise self._failed(described(error)) from None

    def close(self) -> None:
        """End the threads, after what they do now."""
        for pool in (self._tokenising, self._lookups):
            pool.shutdown()

    # -- in the event loop ---------------------------------------------------------------------------------------------

    def _wanted(self, request: _Request, tokens: Tokens) -> _Miss:
        """Return the input in flight that is the same, or queue it."""
        loop, key = asyncio.get_running_loop(), (request.namespace, tokens)
        if (miss := self._in_flight.get(key)) is None:
            miss = self._in_flight[key] = _Miss(*key, request.asked_at, loop.create_future())
            self._queue.append(miss)
            if self._batching is None or self._batching.done():
                self._batching = loop.create_task(self._compute_all())
        miss.n_waiting += 1
        return miss

    def _leave(self, miss: _Miss) -> None:
        """Note that a request waits no longer; an input that nobody waits for is not computed."""
        miss.n_waiting -= 1
        if not miss.n_waiting and not miss.is_running and not miss.answer.done():
            self._queue.remove(miss)
            del self._in_flight[miss.namespace, miss.tokens]
            miss.answer.cancel()
            self._metrics.cancelled.inc()

    async def _compute_all(self) -> None:
        """Compute what is queued, batch by batch, until nothing is."""
        if self._n_looked_up:  # others are on their way, and may join; later ones have the time that a batch takes
            await asyncio.sleep(self._settings.batch_wait_ms / 1e3)
        while self._queue:
            batch = self._next_batch()
            begun = perf_counter()
            for miss in batch:
                miss.is_running = True
                self._metrics.queue.observe(begun - miss.queued_at)
            try:
                outputs = await self._thread.run(partial(self._compute, batch)) if batch else []
            except Exception as error:  # the thread was closed
                logger.warning("a batch was not computed: %s", described(error))
                outputs = [stopping()] * len(batch)
            for miss, output in zip(batch, outputs, strict=True):
                if isinstance(output, Output):
                    self._metrics.inference.observe(output.compute_s)
                    output = replace(output, queue_s=begun - miss.queued_at)
                self._end(miss, output)

    def _end(self, miss: _Miss, output: Output | Refusal) -> None:
        """Answer all requests that wait for an input."""
        del self._in_flight[miss.namespace, miss.tokens]
        miss.answer.set_result(output)

    def _next_batch(self) -> list[_Miss]:
        """Take the oldest of the queue, and others of its namespace and prompt, the nearest in length first."""
        now = perf_counter()
        while self._queue and now - self._queue[0].asked_at > self._settings.max_queue_s:
            self._end(self._queue.pop(0), overloaded("the model is overloaded"))
        if not self._queue:
            return []
        first = self._queue[0]
        near = [
            one
            for one in self._queue
            if one.namespace == first.namespace and one.tokens.n_prompt == first.tokens.n_prompt
        ]
        near.sort(key=lambda one: abs(len(one.tokens) - len(first.tokens)))
        batch: list[_Miss] = []
        longest = n_tokens = 0
        for miss in near[: self._settings.max_batch_requests]:
            longest, n_tokens = max(longest, len(miss.tokens)), n_tokens + len(miss.tokens)
            n_padded = longest * (len(batch) + 1)
            if batch and n_padded > min(self._most_tokens, n_tokens + max(_PADDED * n_tokens, self._padding)):
                break
            batch.append(miss)
        self._queue = [miss for miss in self._queue if miss not in batch]
        return batch

    # -- in the thread of look-ups -------------------------------------------------------------------------------------

    def _tokenised(self, items: Sequence[Item], truncate: bool, side: Side) -> list[Tokens | Refusal]:
        began = perf_counter()
        found = self._tokenizing.encode(items, truncate, side)
        self._metrics.tokenisation.observe(perf_counter() - began)
        return found

    def _take_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look up what waits, some inputs at once: one call takes hardly longer than that of one input."""
        turn: list[_Request] = []
        while self._waiting and sum(len(one.items) for one in turn) < _TURN:
            request = self._waiting.popleft()
            if not request.found.done():  # else its client has gone
                turn.append(request)
        try:
            found = self._look_up(turn)
        except Exception as error:
            logger.error("a lookup failed: %s", described(error))
            found = [[Refusal("backend", "the lookup failed")] * len(request.items) for request in turn]

        def tell() -> None:
            for request, one in zip(turn, found, strict=True):
                if not request.found.done():
                    request.found.set_result(one)

        loop.call_soon_threadsafe(tell)

    def _look_up(self, turn: Sequence[_Request]) -> list[list[_Found]]:
        """Return an output, a refusal or tokens for each input of each request."""
        now = perf_counter()
        found: list[list[_Found]] = []
        for request in turn:
            if now - request.asked_at > self._settings.max_queue_s:
                found.append([overloaded("the model is overloaded")] * len(request.items))
            else:
                found.append([*(request.tokens or self._tokenised(request.items, request.truncate, request.side))])
        if not self._is_caching():
            return found
        for namespace in dict.fromkeys(request.namespace for request in turn):
            asked = [one for request, one in zip(turn, found, strict=True) if request.namespace == namespace]
            self._search(asked, namespace)
            if self._settings.keys is not None and namespace != PUBLIC:  # without keys everybody has one namespace
                self._search(asked, PUBLIC)
        return found

    def _search(self, asked: Sequence[list[_Found]], namespace: str) -> None:
        """Put outputs in the place of inputs that a namespace holds."""
        missing = [(found, i, one) for found in asked for i, one in enumerate(found) if isinstance(one, Tokens)]
        for numbers in self._parts([tokens for *_, tokens in missing]):
            part = [missing[number] for number in numbers]
            try:
                served = self._look_up_part([tokens for *_, tokens in part], namespace)
            except Exception as error:
                logger.error("inputs could not be looked up, and are computed: %s", described(error))
                continue
            for number, output in served.items():
                found, i, _ = part[number]
                if output.is_finite:
                    found[i] = output

    def _look_up_part(self, tokens: Sequence[Tokens], namespace: str) -> dict[int, Output]:
        """Return outputs of inputs that a namespace holds, by number. A call serves all of its rows or none."""
        held = list(range(len(tokens)))
        while held:
            try:
                with self._cache.only_if_cached():
                    return dict(zip(held, self._run([tokens[i] for i in held], namespace), strict=True))
            except NotCachedError as error:
                missing = range(len(held)) if error.rows is None else error.rows
                held = [i for row, i in enumerate(held) if row not in missing]
        return {}

    def _parts(self, tokens: Sequence[Tokens]) -> Iterable[list[int]]:
        """Yield numbers of inputs that are looked up in one call: no more tokens than a batch, of about one length.

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

    # -- in the model's thread, and in that of look-ups ----------------------------------------------------------------

    def _compute(self, batch: Sequence[_Miss]) -> list[Output | Refusal]:
        """Compute a batch; where it fails, each input by itself, so that one that fails does not spoil the others."""
        tokens = [miss.tokens for miss in batch]
        self._metrics.batch(len(batch), sum(map(len, tokens)))
        try:
            made = self._run(tokens, batch[0].namespace)
        except Exception as error:
            if len(batch) == 1:
                return [self._failed(described(error))]
            return [self._compute([miss])[0] for miss in batch]
        return [one if one.is_finite else self._failed("its output is not finite") for one in made]

    def _run(self, tokens: Sequence[Tokens], namespace: str) -> list[Output]:
        """Run the model on inputs; the cache serves and stores."""
        begun = perf_counter()
        with torch.inference_mode(), self._cache.namespace(namespace) if self._is_caching() else self._cache.disabled():
            values = self._served.forward(self.padded(tokens)).float().cpu().numpy()
        outcomes, took = self._cache.last, perf_counter() - begun
        rungs = [one.rung for one in outcomes] if len(outcomes) == len(values) else [None] * len(values)
        return [Output(values[i], len(one), rungs[i], 0.0, took) for i, one in enumerate(tokens)]

    def padded(self, tokens: Sequence[Tokens]) -> dict[str, torch.Tensor]:
        """Return inputs of the model, padded on the right: ids, mask and, where it takes them, types (B, T)."""
        longest = max(map(len, tokens))

        def rows(values: Iterable[tuple[int, ...]], padding: int) -> torch.Tensor:
            return torch.tensor([[*one, *(padding,) * (longest - len(one))] for one in values], device=self._device)

        made = {
            "input_ids": rows((one.ids for one in tokens), self._pad_id),
            "attention_mask": rows(((1,) * len(one) for one in tokens), 0),
        }
        if tokens[0].types:
            made["token_type_ids"] = rows((one.types for one in tokens), 0)
        if tokens[0].n_prompt:  # as sentence-transformers names it
            made["prompt_length"] = torch.tensor([tokens[0].n_prompt], device=self._device)
        return made

    def warm_up(self, n_tokens: int, namespace: str) -> None:
        """Run inputs of up to `n_tokens` tokens twice each, in the model's thread.

        Then measure what padding is worth: a run has a fixed cost, which a batch of two pays once.
        """
        special = set(self._served.tokenizer.all_special_ids)
        token = next(i for i in range(len(special) + 1) if i not in special)

        def tokens(length: int) -> Tokens:
            return Tokens((token,) * length, (0,) * length if self._tokenizing.takes_types else ())

        def plain_s(length: int) -> float:
            with self._cache.disabled():
                return min(self._run([tokens(length)], "")[0].compute_s for _ in range(_N_RUNS))

        lengths = [1 << bit for bit in range(3, n_tokens.bit_length())]
        for length in (*lengths, n_tokens):
            for _ in range(2):
                self._run([tokens(length)], namespace)
        if n_tokens >= _LONG:
            short_s, long_s = plain_s(_SHORT), plain_s(_LONG)
            token_s = max(long_s - short_s, 1e-9) / (_LONG - _SHORT)
            self._padding = max(_PADDING, int(short_s / token_s) - _SHORT)
            # Far beyond what fills a run a larger batch computes no more inputs a second.
            self._most_tokens = min(self._settings.max_batch_tokens, max(_LONG, int(_BATCH_S / token_s)))

    def _failed(self, why: str) -> Refusal:
        """Count and log that an input could not be computed; returns what the client is told."""
        self._metrics.failed.inc()
        logger.error("the model failed on an input: %s", why)
        return Refusal("backend", "the model failed on this input")
