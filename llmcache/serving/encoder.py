"""Encoder requests: hits are answered as soon as they are tokenised, misses gathered and computed in batches.

    tokens -> looked up at once: a hit never waits for what the model is computing (`lookups`)
           -> the same request in flight: its answer is waited for
           -> queue -> a batch of one namespace, with little padding -> the model's thread -> stored by the cache

Lookups and batches run the same wrapped model, which any number of threads may use.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from llmcache.cache import LLMCache
from llmcache.serving.lookups import Lookups, Missing, overloaded
from llmcache.serving.model_thread import ModelThread
from llmcache.serving.padded_model import Forward, Output, PaddedModel
from llmcache.serving.refusals import Refusal, described, stopping
from llmcache.serving.settings import ServerSettings
from llmcache.serving.tokenizing import Item, Side, Tokenizing, Tokens
from llmcache.serving.watching import Watcher

logger = logging.getLogger("llmcache.serving")

_PADDED = 0.25  # of a batch's tokens: so much padding is always allowed
_PADDING = 4  # tokens of padding that are worth one run less, until that is measured
_BATCH_S = (
    0.1  # seconds for which a batch is computed at most, since what comes meanwhile waits; one input may be longer
)
_SHORT, _LONG = 8, 64  # tokens of inputs by which it is measured
_N_RUNS = 5  # of each; the fastest counts

_Key = tuple[str, Tokens]


@dataclass(slots=True)
class _Miss:
    """An input that waits to be computed."""

    key: _Key
    answer: "asyncio.Future[Output]"
    is_looked_up: bool = False
    queued_at: float = field(default_factory=perf_counter)
    asked_at: float = field(default_factory=perf_counter)  # before it was looked up
    n_waiting: int = 0  # who wants it; at 0 nobody does any more
    is_running: bool = False

    @property
    def kind(self) -> tuple[str, bool, int]:
        """What inputs of one batch have in common."""
        return self.key[0], self.is_looked_up, self.key[1].n_prompt


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
        watcher = watcher or Watcher()
        self._thread = thread
        self._settings = settings
        self._tokenizing = tokenizing
        self._watcher = watcher
        self._model = PaddedModel(cache, forward, pad_id, is_caching)
        self._lookups = Lookups(self._model, settings, tokenizing, watcher, is_caching)
        self._in_flight: dict[_Key, _Miss] = {}
        self._queue: list[_Miss] = []  # oldest first
        self._batching: asyncio.Task[None] | None = None
        self._padding = _PADDING
        self._most_tokens = settings.max_batch_tokens

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
        found = await self._lookups.find(items, namespace, truncate, side, asked_at)
        waiting = {i: self._wanted(namespace, one, asked_at) for i, one in enumerate(found) if isinstance(one, Missing)}
        try:
            answers = await asyncio.gather(*(self._answer(miss) for miss in waiting.values()))
        finally:
            for miss in waiting.values():
                self._leave(miss)
        computed = dict(zip(waiting, answers, strict=True))
        outputs = [computed[i] if isinstance(one, Missing) else one for i, one in enumerate(found)]
        for one in outputs:
            if isinstance(one, Output):
                self._watcher.served(one.rung, one.n_tokens, 0 if one.rung is None else one.n_tokens)
            self._watcher.finished("stop" if isinstance(one, Output) else "error")
        return outputs

    async def tokens(self, items: Sequence[Item], truncate: bool, side: Side) -> list[Tokens | Refusal]:
        """Tokens of each input, or why it has none; arguments as of `run`."""
        return await self._lookups.tokens(items, truncate, side)

    async def states(self, tokens: Sequence[Tokens], states_of: Forward) -> list[list[list[float]]]:
        """States of all tokens of inputs, one input at a time, computed as if there were no cache.

        Raises:
            Refusal: The model failed.
        """

        try:
            return [await self._thread.run(lambda one=one: self._model.states(one, states_of)) for one in tokens]  # type: ignore[misc]
        except Exception as error:
            raise self._failed(described(error)) from None

    def close(self) -> None:
        """End the threads of lookups."""
        self._lookups.close()

    # -- in the event loop ---------------------------------------------------------------------------------------------

    def _wanted(self, namespace: str, missing: Missing, asked_at: float) -> _Miss:
        """The input that waits to be computed, which is queued now if it does not yet."""
        key = namespace, missing.tokens
        if (miss := self._in_flight.get(key)) is None:
            answer = asyncio.get_running_loop().create_future()
            miss = self._in_flight[key] = _Miss(key, answer, missing.is_looked_up, asked_at=asked_at)
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
        if len(self._lookups):  # others are on their way, and may join; later ones have the time that a batch takes
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
            except Exception as error:  # the thread was closed
                logger.warning("a batch was not computed: %s", described(error))
                outputs = [stopping()] * len(batch)
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
        near = [miss for miss in self._queue if miss.kind == first.kind]
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
            miss.answer.set_exception(overloaded())
            miss.answer.exception()

    # -- in the model's thread -----------------------------------------------------------------------------------------

    def _compute(self, batch: Sequence[_Miss], begun: float) -> list[Output | Refusal]:
        """Outputs of a batch; where it fails, of each by itself, so that one that fails does not spoil the others."""
        namespace = batch[0].key[0]
        tokens = [miss.key[1] for miss in batch]
        self._watcher.batch(len(batch), sum(map(len, tokens)))
        try:
            made = self._model.run(tokens, namespace, batch[0].is_looked_up)
        except Exception as error:
            if len(batch) == 1:
                return [self._failed(described(error))]
            return [self._compute([miss], begun)[0] for miss in batch]
        return [
            replace(one, queue_s=begun - miss.queued_at) if one.is_finite else self._failed("its output is not finite")
            for miss, one in zip(batch, made, strict=True)
        ]

    def warm_up(self, token: int, n_tokens: int, namespace: str) -> None:
        """Run inputs of up to so many tokens, of one kind, in a namespace, twice each; in the model's thread.

        Then measure what padding is worth: a run has a fixed cost, which a batch of two pays once.
        """

        def tokens(length: int) -> Tokens:
            return Tokens((token,) * length, (0,) * length if self._tokenizing.takes_types else ())

        lengths = [1 << bit for bit in range(3, n_tokens.bit_length())]
        for length in (*lengths, n_tokens):
            for _ in range(2):
                self._model.run([tokens(length)], namespace)
        if n_tokens >= _LONG:
            short_s, long_s = (self._model.plain_s(tokens(length), _N_RUNS) for length in (_SHORT, _LONG))
            token_s = max(long_s - short_s, 1e-9) / (_LONG - _SHORT)
            self._padding = max(_PADDING, int(short_s / token_s) - _SHORT)
            # Far beyond what fills a run a larger batch computes no more inputs a second.
            self._most_tokens = min(self._settings.max_batch_tokens, max(_LONG, int(_BATCH_S / token_s)))

    def _failed(self, why: str) -> Refusal:
        """Count and log that an input could not be computed; returns what the client is told."""
        self._watcher.failed()
        logger.error("the model failed on an input: %s", why)
        return Refusal("backend", "the model failed on this input")
