"""Encoder requests: hits are answered right after tokenising; misses are queued and computed in batches.

    texts -> the lookup thread tokenises and looks up all waiting inputs, some per turn, and computes the hits' outputs
             (long texts are tokenised in a separate thread first, so that other requests do not wait for them)
          -> a miss equal to an input in flight waits for that answer
          -> queue -> a batch of one namespace with little padding -> the model thread -> stored by the cache

Sizes: B rows per call, T tokens per row (padding included), O values per output.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from llmcache.errors import NotCachedError
from llmcache.serving.keys import PUBLIC
from llmcache.serving.loading import Served
from llmcache.serving.refusals import Refusal, described, overloaded, stopping
from llmcache.serving.shared import Shared
from llmcache.serving.tokenizing import Item, Side, Tokenizing, Tokens, is_long

logger = logging.getLogger("llmcache.serving")

_TURN_INPUTS: Final = 64  # inputs looked up per turn, and in each part of a request with more
# Lengths in tokens of the inputs that the warm-up times. A lookup pads no input beyond _SHORT or twice its own length.
_SHORT, _LONG = 8, 64
_PADDING_SHARE = 0.25  # padding that is always allowed, as a share of a batch's tokens
_PADDING_TOKENS = 4  # padding tokens that cost as much as one more run; replaced by the warm-up's measurement
_BATCH_S = 0.1  # longest time of a batch, in which later requests wait; a single input may take longer
_N_RUNS = 5  # runs per measurement; the fastest counts


@dataclass(frozen=True, slots=True)
class Output:
    """The model's output for one input."""

    values: NDArray[np.float32]  # (O,): an embedding, or logits
    n_tokens: int  # tokens of the input, special tokens included
    rung: str | None  # rung that served it; None: computed
    queue_s: float  # seconds in the queue
    compute_s: float  # seconds of its lookup or batch

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.values).all())


_Lookup = Output | Refusal | Tokens  # a hit's output, a refusal, or the tokens of a miss


class _Request(NamedTuple):
    """Inputs waiting for the lookup."""

    items: Sequence[Item]
    tokens: Sequence[Tokens | Refusal] | None  # given for long texts, which are tokenised in advance
    namespace: str
    truncate: bool
    side: Side
    asked_at: float
    found: "asyncio.Future[list[_Lookup]]"


@dataclass(eq=False, slots=True)
class _Miss:
    """An input waiting to be computed."""

    namespace: str
    tokens: Tokens
    asked_at: float  # when the request arrived, before the lookup
    answer: "asyncio.Future[Output | Refusal]"
    queued_at: float = field(default_factory=perf_counter)
    n_waiting: int = 0  # requests waiting for it
    is_running: bool = False


class Encoder:
    """Serves the inputs of one encoder model. All public methods must be called from one event loop."""

    def __init__(self, shared: Shared, served: Served, tokenizing: Tokenizing) -> None:
        self._cache, self._thread, self._settings, self._metrics, self._is_caching = shared
        self._served, self._tokenizing = served, tokenizing
        self._device = next(self._cache.model.parameters()).device
        self._pad_id = getattr(served.tokenizer, "pad_token_id", None) or 0
        self._waiting: deque[_Request] = deque()  # requests to look up, oldest first
        self._n_looked_up = 0  # requests that wait for a lookup or are being looked up
        self._in_flight: dict[tuple[str, Tokens], _Miss] = {}
        self._queue: list[_Miss] = []  # oldest first
        self._batching: asyncio.Task[None] | None = None
        self._padding_tokens = _PADDING_TOKENS
        self._most_tokens = self._settings.max_batch_tokens
        self._forgot_at = 0.0  # what was asked before is not stored
        self._lookups = ThreadPoolExecutor(1, "llmcache-lookup")
        self._tokenising = ThreadPoolExecutor(1, "llmcache-tokenise")  # for long texts

    def __len__(self) -> int:
        """Return the number of inputs that are queued or being computed."""
        return len(self._in_flight)

    @property
    def n_waiting(self) -> int:
        return len(self._queue)

    def forget(self, namespace: str | None = None) -> None:
        """Store nothing of the inputs that have arrived so far, in whichever namespace."""
        self._forgot_at = perf_counter()

    async def run(self, items: Sequence[Item], namespace: str, truncate: bool, side: Side) -> list[Output | Refusal]:
        """Return the model's output or a refusal for each input; a refused input does not affect those before it.

        A long list is run in parts, so that other requests wait for one part only; one with a refusal is the last.
        If the server has keys, inputs are also looked up in the namespace `public`. See `Tokenizing.encode`.
        """
        outputs: list[Output | Refusal] = []
        for first in range(0, len(items), _TURN_INPUTS):
            part = await self._run_part(items[first : first + _TURN_INPUTS], namespace, truncate, side)
            outputs += part
            if any(isinstance(one, Refusal) for one in part):
                break
        return outputs

    async def _run_part(
        self, items: Sequence[Item], namespace: str, truncate: bool, side: Side
    ) -> list[Output | Refusal]:
        asked_at, loop = perf_counter(), asyncio.get_running_loop()
        tokens = await self.tokens(items, truncate, side) if is_long(items) else None
        request = _Request(items, tokens, namespace, truncate, side, asked_at, loop.create_future())
        self._n_looked_up += 1
        try:
            self._waiting.append(request)
            self._lookups.submit(self._look_up_waiting, loop)
            found = await request.found
        finally:
            self._n_looked_up -= 1
        awaited = [self._join_or_queue(request, one) if isinstance(one, Tokens) else one for one in found]
        try:
            outputs = [await asyncio.shield(one.answer) if isinstance(one, _Miss) else one for one in awaited]
        finally:
            for one in awaited:
                if isinstance(one, _Miss):
                    self._leave(one)
        for output in outputs:
            if isinstance(output, Output):
                self._metrics.served(output.rung, output.n_tokens, 0 if output.rung is None else output.n_tokens)
            self._metrics.finished("stop" if isinstance(output, Output) else "error")
        return outputs

    async def tokens(self, items: Sequence[Item], truncate: bool, side: Side) -> list[Tokens | Refusal]:
        """Return the tokens or a refusal for each input; arguments as for `run`."""
        pool = self._tokenising if is_long(items) else self._lookups
        return await asyncio.get_running_loop().run_in_executor(pool, self._tokenise, items, truncate, side)

    async def states(self, tokens: Sequence[Tokens]) -> list[list[list[float]]]:
        """Return the last hidden states (T, D) of each input, computed without the cache."""

        def compute(one: Tokens) -> list[list[float]]:
            with torch.inference_mode(), self._cache.disabled():
                rows: list[list[float]] = self._served.states(self.padded([one]))[0].float().tolist()
            return rows

        try:
            return [await self._thread.run(partial(compute, one)) for one in tokens]
        except Exception as error:
            raise self._model_failure(described(error)) from None

    def close(self) -> None:
        """Shut the threads down after their current work."""
        self._tokenising.shutdown()
        self._lookups.shutdown()

    # -- in the event loop ---------------------------------------------------------------------------------------------

    def _join_or_queue(self, request: _Request, tokens: Tokens) -> _Miss:
        """Return the equal input in flight if there is one; else queue this one."""
        loop, key = asyncio.get_running_loop(), (request.namespace, tokens)
        if (miss := self._in_flight.get(key)) is None:
            miss = self._in_flight[key] = _Miss(*key, request.asked_at, loop.create_future())
            self._queue.append(miss)
            if self._batching is None or self._batching.done():
                self._batching = loop.create_task(self._compute_all())
        miss.n_waiting += 1
        return miss

    def _leave(self, miss: _Miss) -> None:
        """Remove a request from an input's waiters; cancel an input without waiters unless it is running."""
        miss.n_waiting -= 1
        if not miss.n_waiting and not miss.is_running and not miss.answer.done():
            self._queue.remove(miss)
            del self._in_flight[miss.namespace, miss.tokens]
            miss.answer.cancel()
            self._metrics.cancelled.inc()

    async def _compute_all(self) -> None:
        """Compute batches until the queue is empty."""
        if self._n_looked_up:  # wait for misses of current lookups; later ones gather while a batch is computed
            await asyncio.sleep(self._settings.batch_wait_ms / 1e3)
        while self._queue:
            batch = self._next_batch()
            begun = perf_counter()
            for miss in batch:
                miss.is_running = True
                self._metrics.queue.observe(begun - miss.queued_at)
            try:
                outputs = await self._thread.run(partial(self._compute, batch)) if batch else []
            except Exception as error:  # the model thread is shut down
                logger.warning("a batch was not computed: %s", described(error))
                outputs = [stopping()] * len(batch)
            for miss, output in zip(batch, outputs, strict=True):
                if isinstance(output, Output):
                    self._metrics.inference.observe(output.compute_s)
                    output = replace(output, queue_s=begun - miss.queued_at)
                self._end(miss, output)

    def _end(self, miss: _Miss, output: Output | Refusal) -> None:
        """Give the output to all requests waiting for an input."""
        del self._in_flight[miss.namespace, miss.tokens]
        miss.answer.set_result(output)

    def _next_batch(self) -> list[_Miss]:
        """Remove a batch from the queue: the oldest miss, then those nearest in length of its namespace and prompt.

        Refuses misses that have waited longer than `max_queue_s`.
        """
        now = perf_counter()
        while self._queue and now - self._queue[0].asked_at > self._settings.max_queue_s:
            self._end(self._queue.pop(0), overloaded("the model is overloaded"))
        if not self._queue:
            return []
        first = self._queue[0]
        kind = first.namespace, first.tokens.n_prompt
        near = [one for one in self._queue if (one.namespace, one.tokens.n_prompt) == kind]
        near.sort(key=lambda one: abs(len(one.tokens) - len(first.tokens)))
        batch: list[_Miss] = []
        longest = n_tokens = 0
        for miss in near[: self._settings.max_batch_requests]:
            longest, n_tokens = max(longest, len(miss.tokens)), n_tokens + len(miss.tokens)
            allowed = n_tokens + max(_PADDING_SHARE * n_tokens, self._padding_tokens)
            if batch and longest * (len(batch) + 1) > min(self._most_tokens, allowed):
                break
            batch.append(miss)
        self._queue = [miss for miss in self._queue if miss not in batch]
        return batch

    # -- in the lookup thread ------------------------------------------------------------------------------------------

    def _tokenise(self, items: Sequence[Item], truncate: bool, side: Side) -> list[Tokens | Refusal]:
        began = perf_counter()
        found = self._tokenizing.encode(items, truncate, side)
        self._metrics.tokenisation.observe(perf_counter() - began)
        return found

    def _look_up_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look up waiting requests, several at once: a call with many inputs takes hardly longer than with one."""
        turn: list[_Request] = []
        while self._waiting and sum(len(one.items) for one in turn) < _TURN_INPUTS:
            request = self._waiting.popleft()
            if not request.found.done():  # else the client has disconnected
                turn.append(request)
        try:
            found = self._look_up(turn)
        except Exception as error:
            logger.error("a lookup failed: %s", described(error))
            found = [[Refusal("backend", "the lookup failed")] * len(request.items) for request in turn]

        def deliver() -> None:
            for request, one in zip(turn, found, strict=True):
                if not request.found.done():
                    request.found.set_result(one)

        loop.call_soon_threadsafe(deliver)

    def _look_up(self, turn: Sequence[_Request]) -> list[list[_Lookup]]:
        """Return the output of a hit, the tokens of a miss or a refusal, for each input of each request."""
        now = perf_counter()
        found: list[list[_Lookup]] = []
        for request in turn:
            if now - request.asked_at > self._settings.max_queue_s:
                found.append([overloaded("the model is overloaded")] * len(request.items))
            else:
                found.append([*(request.tokens or self._tokenise(request.items, request.truncate, request.side))])
        if not self._is_caching():
            return found
        for namespace in dict.fromkeys(request.namespace for request in turn):
            asked = [one for request, one in zip(turn, found, strict=True) if request.namespace == namespace]
            self._search(asked, namespace)
            if self._settings.keys is not None and namespace != PUBLIC:  # without keys there is one namespace
                self._search(asked, PUBLIC)
        return found

    def _search(self, asked: Sequence[list[_Lookup]], namespace: str) -> None:
        """Replace tokens in `asked` by outputs, in place, where the namespace has a hit."""
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
        """Return the outputs of hits, by index in `tokens`. A call serves all rows or none, so retry without misses."""
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
        """Yield the indices of inputs for one lookup call: of similar length, with equal `n_prompt`, within a batch."""
        part: list[int] = []
        # Sorted by length, so that the latest input is the longest of its part.
        for i in sorted(range(len(tokens)), key=lambda i: (tokens[i].n_prompt, len(tokens[i]))):
            first = tokens[part[0]] if part else tokens[i]
            is_other = tokens[i].n_prompt != first.n_prompt or len(tokens[i]) > max(_SHORT, 2 * len(first))
            if part and (is_other or len(tokens[i]) * (len(part) + 1) > self._settings.max_batch_tokens):
                yield part
                part = []
            part.append(i)
        if part:
            yield part

    # -- in the model thread and in the lookup thread ------------------------------------------------------------------

    def _compute(self, batch: Sequence[_Miss]) -> list[Output | Refusal]:
        """Compute a batch. If it fails, compute each input alone, so that only the failing inputs are refused."""
        tokens = [miss.tokens for miss in batch]
        self._metrics.batch_size.observe(len(batch))
        self._metrics.batch_tokens.observe(sum(map(len, tokens)))
        try:
            made = self._run(tokens, batch[0].namespace, min(miss.asked_at for miss in batch) > self._forgot_at)
        except Exception as error:
            if len(batch) == 1:
                return [self._model_failure(described(error))]
            return [self._compute([miss])[0] for miss in batch]
        return [one if one.is_finite else self._model_failure("its output is not finite") for one in made]

    def _run(self, tokens: Sequence[Tokens], namespace: str, is_stored: bool = True) -> list[Output]:
        """Return the model's outputs through the cache, or without it unless `is_stored` and `is_caching`."""
        begun, is_cached = perf_counter(), is_stored and self._is_caching()
        with torch.inference_mode(), self._cache.namespace(namespace) if is_cached else self._cache.disabled():
            values = self._served.forward(self.padded(tokens)).float().cpu().numpy()
        outcomes, took = self._cache.last, perf_counter() - begun
        rungs = [one.rung for one in outcomes] if len(outcomes) == len(values) else [None] * len(values)
        return [Output(values[i], len(one), rungs[i], 0.0, took) for i, one in enumerate(tokens)]

    def padded(self, tokens: Sequence[Tokens]) -> dict[str, torch.Tensor]:
        """Return the model's arguments, padded on the right: ids, mask and, if used, token types, each (B, T)."""
        longest, device = max(map(len, tokens)), self._device

        def rows(values: Iterable[tuple[int, ...]], padding: int = 0) -> torch.Tensor:
            return torch.tensor([[*one, *(padding,) * (longest - len(one))] for one in values], device=device)

        made = {"input_ids": rows((one.ids for one in tokens), self._pad_id)}
        made["attention_mask"] = rows((1,) * len(one) for one in tokens)
        if tokens[0].types:
            made["token_type_ids"] = rows(one.types for one in tokens)
        if tokens[0].n_prompt:  # sentence-transformers' name
            made["prompt_length"] = torch.tensor([tokens[0].n_prompt], device=device)
        return made

    def warm_up(self, n_tokens: int, namespace: str) -> None:
        """Run inputs of up to `n_tokens` tokens twice each. Runs in the model thread.

        Then measure how many padding tokens cost as much as a run's fixed cost, which a batch pays once.
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
            self._padding_tokens = max(_PADDING_TOKENS, int(short_s / token_s) - _SHORT)
            # Larger batches than this compute no more inputs per second.
            self._most_tokens = min(self._settings.max_batch_tokens, max(_LONG, int(_BATCH_S / token_s)))

    def _model_failure(self, why: str) -> Refusal:
        """Count and log a failure of the model on an input; return the refusal for the client."""
        self._metrics.failed.inc()
        logger.error("the model failed on an input: %s", why)
        return Refusal("backend", "the model failed on this input")
