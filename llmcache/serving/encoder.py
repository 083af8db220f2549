"""Encoder requests: hits are answered as soon as they are tokenised, misses gathered and computed in batches.

    tokens -> looked up, in a thread of its own, at once: a hit never waits for what the model is computing,
              nor for long texts, which another thread tokenises
           -> the same request in flight: its answer is waited for
           -> queue -> a batch of one namespace, with little padding -> the model's thread -> stored by the cache

Lookups and batches run the same wrapped model, which any number of threads may use.

Sizes: B rows of a call, T tokens a row (padding included), O numbers of an output.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from llmcache.cache import LLMCache
from llmcache.errors import NotCachedError
from llmcache.serving.model_thread import ModelThread
from llmcache.serving.refusals import Refusal
from llmcache.serving.settings import ServerSettings
from llmcache.serving.tenants import PUBLIC
from llmcache.serving.tokenizing import Item, Side, Tokenizing, Tokens, is_long
from llmcache.serving.watching import Watcher

_PADDED = 0.25  # of a batch's tokens: so much padding is always allowed
_PADDING = 4  # tokens of padding that are worth one run less, until that is measured
_BATCH_S = (
    0.1  # seconds for which a batch is computed at most, since what comes meanwhile waits; one input may be longer
)
_SHORT, _LONG = 8, 64  # tokens of inputs by which it is measured
_N_RUNS = 5  # of each; the fastest counts

#: The model on padded rows: inputs to outputs (B, O), of which the dialects make answers.
Forward = Callable[[dict[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Output:
    """What the model made of one input.

    Attributes:
        values: float32 (O,): an embedding, or logits.
        n_tokens: Of the input, special ones included.
        rung: What served it, or None where it was computed.
        queue_s: Seconds that it waited.
        compute_s: Seconds that its lookup or its batch took.
    """

    values: NDArray[np.float32]
    n_tokens: int
    rung: str | None
    queue_s: float
    compute_s: float


_Key = tuple[str, Tokens]


@dataclass(slots=True)
class _Miss:
    """An input that waits to be computed."""

    key: _Key
    answer: "asyncio.Future[Output]"
    queued_at: float = field(default_factory=perf_counter)
    asked_at: float = field(default_factory=perf_counter)  # before it was looked up
    n_waiting: int = 0  # who wants it; at 0 nobody does any more
    is_running: bool = False


class Encoder:
    """Serves the inputs of one model. For one event loop."""

    def __init__(
        self,
        cache: LLMCache,
        thread: ModelThread,
        settings: ServerSettings,
        tokenizing: Tokenizing,
        forward: Forward,
        pad_id: int,
        watcher: Watcher | None = None,
        is_caching: Callable[[], bool] = lambda: True,
    ) -> None:
        """Begin with nothing queued.

        Args:
            cache: On the model that `forward` runs.
            thread: Runs what has to be computed.
            settings: Limits.
            tokenizing: The model's tokenizer.
            forward: The model.
            pad_id: Token id of padding.
            watcher: Told what becomes of inputs.
            is_caching: Whether inputs are looked up and stored at all.
        """
        self._cache = cache
        self._thread = thread
        self._settings = settings
        self._tokenizing = tokenizing
        self._forward = forward
        self._pad_id = pad_id
        self._watcher = watcher or Watcher()
        self._is_caching = is_caching
        self._in_flight: dict[_Key, _Miss] = {}
        self._queue: list[_Miss] = []  # oldest first
        self._batching: asyncio.Task[None] | None = None
        self._n_looking = 0
        self._padding = _PADDING
        self._most_tokens = settings.max_batch_tokens
        self._pool = ThreadPoolExecutor(1, "llmcache-lookup")
        self._tokenising = ThreadPoolExecutor(1, "llmcache-tokenise")  # of long texts

    def __len__(self) -> int:
        """Inputs that wait or are being computed."""
        return len(self._in_flight)

    @property
    def n_waiting(self) -> int:
        """Inputs that wait."""
        return len(self._queue)

    async def run(self, items: Sequence[Item], namespace: str, truncate: bool, side: Side) -> list[Output | Refusal]:
        """What the model makes of each input, or why it makes nothing of it; one does not spoil the others.

        Args:
            items: At least one.
            namespace: Where they are looked for and stored; with keys, `public` is looked in as well.
            truncate: Cut what is too long; else it is refused.
            side: Where it is cut.
        """
        asked_at = perf_counter()
        found = await self._found(items, namespace, truncate, side, asked_at)
        waiting = {
            i: self._wanted((namespace, one), asked_at) for i, one in enumerate(found) if isinstance(one, Tokens)
        }
        try:
            answers = await asyncio.gather(*(self._answer(miss) for miss in waiting.values()))
        finally:
            for miss in waiting.values():
                self._leave(miss)
        computed = dict(zip(waiting, answers, strict=True))
        outputs = [computed[i] if isinstance(one, Tokens) else one for i, one in enumerate(found)]
        for one in outputs:
            if isinstance(one, Output):
                self._watcher.served(one.rung, one.n_tokens, 0 if one.rung is None else one.n_tokens)
            self._watcher.finished("stop" if isinstance(one, Output) else "error")
        return outputs

    async def tokens(self, items: Sequence[Item], truncate: bool, side: Side) -> list[Tokens | Refusal]:
        """Tokens of each input, or why it has none; arguments as of `run`."""
        pool = self._tokenising if is_long(items) else self._pool
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, self._tokenised, items, truncate, side)

    async def states(self, tokens: Sequence[Tokens], states_of: Forward) -> list[list[list[float]]]:
        """States of all tokens of inputs, one input at a time, computed as if there were no cache.

        Raises:
            Refusal: The model failed.
        """

        def compute(one: Tokens) -> list[list[float]]:
            with torch.inference_mode(), self._cache.disabled():
                rows: list[list[float]] = states_of(self._padded([one]))[0].float().tolist()
            return rows

        try:
            return [await self._thread.run(lambda one=one: compute(one)) for one in tokens]  # type: ignore[misc]
        except Exception:
            raise _failed() from None

    def close(self) -> None:
        """End the threads of lookups."""
        for pool in (self._tokenising, self._pool):
            pool.shutdown()

    # -- in the threads of lookups and of long texts -----------------------------------------------------------------

    def _tokenised(self, items: Sequence[Item], truncate: bool, side: Side) -> list[Tokens | Refusal]:
        began = perf_counter()
        found = self._tokenizing.encode(items, truncate, side)
        self._watcher.tokenised(perf_counter() - began)
        return found

    # -- in the lookups' thread ----------------------------------------------------------------------------------------

    def _look_up(self, tokens: Sequence[Tokens | Refusal], namespace: str) -> list[Output | Tokens | Refusal]:
        """Outputs of inputs that the cache holds, tokens of those that it does not."""
        found: list[Output | Tokens | Refusal] = list(tokens)
        if not self._is_caching():
            return found
        # Without keys everybody has one namespace.
        for name in dict.fromkeys((namespace, namespace if self._settings.keys is None else PUBLIC)):
            places = {i: one for i, one in enumerate(found) if isinstance(one, Tokens)}
            for part in self._parts(places):
                for i, output in self._served({i: places[i] for i in part}, name).items():
                    found[i] = output
        return found

    def _parts(self, places: dict[int, Tokens]) -> Iterable[list[int]]:
        """Inputs that are looked up in one call: as many tokens as a batch has."""
        part: list[int] = []
        longest = 0
        for i in sorted(places, key=lambda i: len(places[i])):
            longest = max(longest, len(places[i]))
            if part and longest * (len(part) + 1) > self._settings.max_batch_tokens:
                yield part
                part, longest = [], len(places[i])
            part.append(i)
        if part:
            yield part

    def _served(self, places: dict[int, Tokens], namespace: str) -> dict[int, Output]:
        """Outputs of those that the cache holds: all at once or, where some are missing, the others by themselves."""
        numbers = list(places)
        for _ in range(2):
            if not numbers:
                return {}
            try:
                with self._cache.only_if_cached():
                    made = self._run([places[i] for i in numbers], namespace)
            except NotCachedError as error:
                missing = set(range(len(numbers)) if error.rows is None else error.rows)
                numbers = [i for place, i in enumerate(numbers) if place not in missing]
            except Exception:  # of the model: what computes them will tell
                return {}
            else:
                found = dict(zip(numbers, made, strict=True))
                return {i: one for i, one in found.items() if np.isfinite(one.values).all()}
        return {}

    # -- in the event loop ---------------------------------------------------------------------------------------------

    async def _found(
        self, items: Sequence[Item], namespace: str, truncate: bool, side: Side, asked_at: float
    ) -> list[Output | Tokens | Refusal]:
        """See `_look_up`. Short texts are tokenised in the same turn of its thread, long ones before it.

        What has waited for its turn for too long is refused.
        """
        tokens = await self.tokens(items, truncate, side) if is_long(items) else None

        def look_up() -> list[Output | Tokens | Refusal]:
            if perf_counter() - asked_at > self._settings.max_queue_s:
                return [_overloaded()] * len(items)
            known = self._tokenised(items, truncate, side) if tokens is None else tokens
            return self._look_up(known, namespace)

        self._n_looking += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, look_up)
        finally:
            self._n_looking -= 1

    def _wanted(self, key: _Key, asked_at: float) -> _Miss:
        """The input that waits to be computed, which is queued now if it does not yet."""
        if (miss := self._in_flight.get(key)) is None:
            miss = self._in_flight[key] = _Miss(key, asyncio.get_running_loop().create_future(), asked_at=asked_at)
            self._queue.append(miss)
            if self._batching is None or self._batching.done():
                self._batching = asyncio.get_running_loop().create_task(self._compute_all())
        miss.n_waiting += 1
        return miss

    async def _answer(self, miss: _Miss) -> Output | Refusal:
        try:
            return await asyncio.shield(miss.answer)
        except Refusal as refusal:
            return refusal

    def _leave(self, miss: _Miss) -> None:
        """One who waited for it has its answer, or has gone; what nobody waits for is not computed."""
        miss.n_waiting -= 1
        if not miss.n_waiting and not miss.is_running and not miss.answer.done():
            self._queue.remove(miss)
            del self._in_flight[miss.key]
            miss.answer.cancel()
            self._watcher.cancelled()

    async def _compute_all(self) -> None:
        """Compute what is queued, batch by batch, until nothing is."""
        if self._n_looking:  # others are on their way, and may join; later ones have the time that a batch takes
            await asyncio.sleep(self._settings.batch_wait_ms / 1e3)
        while self._queue:
            batch = self._next_batch()
            if not batch:
                continue
            begun = perf_counter()
            for miss in batch:
                miss.is_running = True
                self._watcher.queued(begun - miss.queued_at)
            try:
                outputs = await self._thread.run(lambda batch=batch, begun=begun: self._compute(batch, begun))  # type: ignore[misc]
            except Exception:  # the thread was closed
                outputs = [Refusal("unhealthy", "the server is stopping", retry_after_s=1)] * len(batch)
            for miss, output in zip(batch, outputs, strict=True):
                del self._in_flight[miss.key]
                if isinstance(output, Refusal):
                    miss.answer.set_exception(output)
                    miss.answer.exception()  # seen, should nobody wait for it any more
                else:
                    self._watcher.computed(output.compute_s)
                    miss.answer.set_result(output)

    def _next_batch(self) -> list[_Miss]:
        """What is computed next: the oldest, and others of its namespace, the nearest in length first."""
        self._refuse_overdue()
        if not self._queue:
            return []
        first, settings = self._queue[0], self._settings
        most = settings.max_batch_requests or len(self._queue)
        near = [miss for miss in self._queue if miss.key[0] == first.key[0]]
        near.sort(key=lambda miss: abs(len(miss.key[1]) - len(first.key[1])))
        batch: list[_Miss] = []
        longest = n_tokens = 0
        for miss in near[:most]:
            longest, n_tokens = max(longest, len(miss.key[1])), n_tokens + len(miss.key[1])
            n_padded = longest * (len(batch) + 1)
            if batch and n_padded > min(self._most_tokens, n_tokens + max(_PADDED * n_tokens, self._padding)):
                break
            batch.append(miss)
        chosen = set(map(id, batch))
        self._queue = [miss for miss in self._queue if id(miss) not in chosen]
        return batch

    def _refuse_overdue(self) -> None:
        """Refuse what has waited for too long; the oldest come first."""
        now = perf_counter()
        while self._queue and now - self._queue[0].asked_at > self._settings.max_queue_s:
            miss = self._queue.pop(0)
            del self._in_flight[miss.key]
            miss.answer.set_exception(_overloaded())
            miss.answer.exception()

    # -- in the model's thread -----------------------------------------------------------------------------------------

    def _compute(self, batch: Sequence[_Miss], begun: float) -> list[Output | Refusal]:
        """Outputs of a batch; where it fails, of each by itself, so that one that fails does not spoil the others."""
        namespace = batch[0].key[0]
        tokens = [miss.key[1] for miss in batch]
        self._watcher.batch(len(batch), sum(map(len, tokens)))
        try:
            made = self._run(tokens, namespace)
        except Exception:
            if len(batch) == 1:
                return [_failed()]
            return [self._compute([miss], begun)[0] for miss in batch]
        return [
            replace(one, queue_s=begun - miss.queued_at) if np.isfinite(one.values).all() else _failed()
            for miss, one in zip(batch, made, strict=True)
        ]

    # -- in either -----------------------------------------------------------------------------------------------------

    def _run(self, tokens: Sequence[Tokens], namespace: str) -> list[Output]:
        begun = perf_counter()
        with torch.inference_mode(), self._cache.namespace(namespace), self._switched():
            values = self._forward(self._padded(tokens)).float().cpu().numpy()
        outcomes = self._cache.last
        took = perf_counter() - begun
        return [
            Output(values[i], len(one), outcomes[i].rung if i < len(outcomes) else None, 0.0, took)
            for i, one in enumerate(tokens)
        ]

    def _switched(self) -> AbstractContextManager[object]:
        return nullcontext() if self._is_caching() else self._cache.disabled()

    def warm_up(self, token: int, n_tokens: int, namespace: str) -> None:
        """Run inputs of up to so many tokens, of one kind, in a namespace, twice each; in the model's thread.

        Then measure what padding is worth: a run has a fixed cost, which a batch of two pays once.
        """

        def tokens(length: int) -> Tokens:
            return Tokens((token,) * length, (0,) * length if self._tokenizing.takes_types else ())

        lengths = [1 << bit for bit in range(3, n_tokens.bit_length())]
        for length in (*lengths, n_tokens):
            for _ in range(2):
                self._run([tokens(length)], namespace)
        if n_tokens >= _LONG:
            with self._cache.disabled():
                short_s, long_s = (
                    min(self._run([tokens(length)], namespace)[0].compute_s for _ in range(_N_RUNS))
                    for length in (_SHORT, _LONG)
                )
            token_s = max(long_s - short_s, 1e-9) / (_LONG - _SHORT)
            self._padding = max(_PADDING, int(short_s / token_s) - _SHORT)
            # Far beyond what fills a run a larger batch computes no more inputs a second.
            self._most_tokens = min(self._settings.max_batch_tokens, max(_LONG, int(_BATCH_S / token_s)))

    def _padded(self, tokens: Sequence[Tokens]) -> dict[str, torch.Tensor]:
        """Rows as the model takes them, padded on the right: ids, mask and, where it takes them, types (B, T)."""
        longest = max(map(len, tokens))

        def rows(values: Iterable[tuple[int, ...]], padding: int) -> torch.Tensor:
            return torch.tensor([[*one, *(padding,) * (longest - len(one))] for one in values])

        made = {
            "input_ids": rows((one.ids for one in tokens), self._pad_id),
            "attention_mask": rows(((1,) * len(one) for one in tokens), 0),
        }
        if tokens[0].types:
            made["token_type_ids"] = rows((one.types for one in tokens), 0)
        return made


def _overloaded() -> Refusal:
    return Refusal("overloaded", "the model is overloaded", retry_after_s=1)


def _failed() -> Refusal:
    return Refusal("backend", "the model failed on this input")
