"""Several generations at once on one model, a token each in turn.

    start -> waits, in order, for one of `max_streams` places
          -> a step of the model's thread for each token, in turn with the others -> its readers
             (a long prompt: in a thread of its own, which holds the model for a chunk of tokens a turn)

Requests that are equal in namespace, tokens and sampling are computed once while they are in flight. What nobody reads
any more is not computed further.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Literal, cast

import torch
from jinja2.exceptions import TemplateError, UndefinedError

from llmcache.cache import LLMCache
from llmcache.errors import ConfigError, RequestError
from llmcache.generation import PromptCache, Sampling, StoppedBy, Stream, Token, stream
from llmcache.generation.kv_caches import context_length
from llmcache.generation.validation import decoder_config
from llmcache.serving.keys import PUBLIC
from llmcache.serving.metrics import IN_FLIGHT, Metrics
from llmcache.serving.model_thread import ModelThread
from llmcache.serving.refusals import Refusal, described, overloaded, stopping
from llmcache.serving.settings import ServerSettings

logger = logging.getLogger("llmcache.serving")

Ids = tuple[int, ...]
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # a text, token ids, or messages

_N_ENCODING = 4  # texts that are tokenised at once
_PROMPTS_KNOWN = 64  # of each namespace: a prompt's tokens take 0.3 MB at a context of 8,192
_OF_MESSAGES = (TemplateError, UndefinedError)  # a template raised the first, or looks for what messages lack
_MOST_NEW = 4096  # tokens of an answer where neither request nor model says


class Decoder:
    """Serves the requests of one model. For one event loop, from which its methods are called."""

    def __init__(
        self,
        cache: LLMCache,
        thread: ModelThread,
        settings: ServerSettings,
        tokenizer: Any,
        metrics: Metrics,
        is_caching: Callable[[], bool],
    ) -> None:
        """Begin with nothing to do; `is_caching` tells whether requests are looked up and stored."""
        config = decoder_config(cache.model)
        self.context = context_length(config)
        self.vocabulary = int(config.vocab_size)
        self.eos_ids = tuple(sorted(Sampling().stops_of(cache.model)))
        self.metrics = metrics
        self._cache = cache
        self._thread = thread
        self._settings = settings
        self._tokenizer = tokenizer
        self._is_caching = is_caching
        self._prompts: dict[str, PromptCache] = {}
        self._encoding = ThreadPoolExecutor(_N_ENCODING, "llmcache-encode")
        self._prefilling = ThreadPoolExecutor(settings.max_streams, "llmcache-prefill")
        self._places = asyncio.Semaphore(settings.max_streams)
        self._flights: dict[_Key, _Flight] = {}  # that others may join
        self._open: set[_Flight] = set()  # all that have not ended
        self._waiting: set[_Flight] = set()
        self._is_stopping = False

    @property
    def n_waiting(self) -> int:
        """Generations that wait for a place."""
        return len(self._waiting)

    def refuse_waiting(self) -> None:
        """Refuse generations without a place, now and from now on; those that have one go on."""
        self._is_stopping = True
        for flight in list(self._waiting):
            self._end(flight, stopping())

    def refuse_all(self) -> None:
        """End all generations; their readers are refused."""
        for flight in list(self._open):
            self._end(flight, stopping())

    def close(self) -> None:
        """End all generations and the threads. Twice does nothing."""
        self.refuse_all()
        for pool in (self._encoding, self._prefilling):
            pool.shutdown(wait=False, cancel_futures=True)

    def forget(self, namespace: str | None = None) -> None:
        """Forget the prompts of a namespace, or of all; no later request joins what is in flight."""
        self._prompts = {name: one for name, one in self._prompts.items() if namespace not in (None, name)}
        self._flights = {key: one for key, one in self._flights.items() if namespace not in (None, key[0])}

    async def encode(self, prompt: Prompt, namespace: str) -> Ids:
        """Return the token ids of a prompt, or refuse it: it has none, or others than the vocabulary's."""
        param = "messages" if prompt and isinstance(prompt[0], Mapping) else "prompt"
        if not prompt:
            raise Refusal("invalid", "the prompt is empty: give at least one token", param=param)
        if isinstance(prompt[0], int):
            ids = cast(Ids, tuple(prompt))
        else:
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self._encoding, self._encode, prompt, param, namespace)
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            raise Refusal("invalid", f"{param}: token ids are from 0 to {self.vocabulary - 1}", param=param)
        return ids

    def n_new(self, n_prompt: int, asked: int | None, otherwise: int | None, params: tuple[str, str]) -> int:
        """Return how many tokens an answer may have: `asked`, else `otherwise`, else all that the context holds.

        The fields of prompt and `asked` are named in errors as `params`.
        """
        if self.context is None:
            return asked or otherwise or _MOST_NEW
        room = self.context - n_prompt
        if (asked or 1) > room:
            fewer, param = (f", or set {params[1]} to {room} at most", params[1]) if room > 0 else ("", params[0])
            raise Refusal(
                "invalid",
                f"the prompt has {n_prompt} tokens, and the model's context of {self.context} holds prompt and answer: "
                f"shorten it{fewer}",
                param=param,
            )
        return asked or min(room, otherwise or room)

    def start(self, ids: Ids, sampling: Sampling, namespace: str, arrived: "Arrived") -> "Generating":
        """Begin to answer a prompt from `encode`, or join a request of the namespace that is the same.

        Tokens are put into `arrived`, which answers may share; nothing is computed before the loop goes on.
        """
        key = (namespace, ids, sampling)
        flight = self._flights.get(key)
        is_first = flight is None
        if flight is None:
            flight = self._flights[key] = _Flight(key, self._stream(ids, sampling))
            self._open.add(flight)
            flight.task = asyncio.get_running_loop().create_task(self._drive(flight))
        return Generating(self, flight, is_first, arrived)

    def warm_up(self, n_tokens: int, namespace: str) -> None:
        """Answer a prompt of `n_tokens` tokens twice, with two tokens, in the model's thread."""
        most = n_tokens if self.context is None else min(n_tokens, self.context - 2)
        ids = tuple(i % self.vocabulary for i in range(most))
        for _ in range(2):
            answer = self._stream(ids, Sampling(max_new_tokens=2, stop_ids=()))
            for _ in range(2):
                self._step(answer, namespace)

    def leave(self, flight: "_Flight", reader: "Generating") -> None:
        """Take a reader off a flight, and end it if nobody reads it any more."""
        flight.readers.remove(reader)
        if not flight.readers:
            self._end(flight)

    def _encode(self, prompt: Any, param: str, namespace: str) -> Ids:
        """Return the token ids of a prompt, in a thread of its own."""
        known = self._prompts.get(namespace)
        if known is None:
            # Each namespace has its own: times would tell what was asked in another one.
            known = self._prompts[namespace] = PromptCache(self._tokenizer, max_entries=_PROMPTS_KNOWN)
        began = perf_counter()
        try:
            ids = known.encode(prompt).ids
        except RequestError as error:
            raise _refused(prompt, error, param) from None  # its text may quote the prompt
        self.metrics.tokenisation.observe(perf_counter() - began)
        return ids

    def _stream(self, ids: Ids, sampling: Sampling) -> Stream:
        model = self._cache.model
        try:
            return stream(model, torch.tensor([ids], device=next(model.parameters()).device), sampling)
        except (RequestError, ConfigError):  # whose text may quote the request
            raise Refusal("invalid", "the model cannot take this prompt with these settings") from None

    async def _drive(self, flight: "_Flight") -> None:
        """Compute a flight, from its place in the queue to its last token."""
        if not await self._has_place(flight):
            return
        try:
            await self._run(flight)
        except Exception as error:
            self.metrics.failed.inc()
            logger.error("a generation failed: %s", described(error))
            self._end(flight, Refusal("backend", "the model failed on this request"))
        finally:
            self._places.release()
            self._end(flight)

    async def _has_place(self, flight: "_Flight") -> bool:
        """Wait for a place; False if that takes too long, and the readers are refused."""
        began, longest_s = perf_counter(), self._settings.max_queue_s
        if self._is_stopping and self._places.locked():
            self._end(flight, stopping())
            return False
        self._waiting.add(flight)
        try:
            async with asyncio.timeout(longest_s):
                await self._places.acquire()
        except TimeoutError:
            why = f"the model is answering {self._settings.max_streams} requests already"
            self._end(flight, overloaded(why, math.ceil(longest_s)))
            return False
        finally:
            self._waiting.discard(flight)
        self.metrics.queue.observe(perf_counter() - began)
        return True

    async def _run(self, flight: "_Flight") -> None:
        begun_s, first_s, last_s, prefill_s = perf_counter(), None, 0.0, 0.0
        try:
            while (answer := flight.stream) is not None:
                token, stopped_by = await self._next(flight, answer)
                flight.put(token, stopped_by, answer)
                self.metrics.generated.inc()
                if first_s is None:
                    first_s, prefill_s = token.time_s, perf_counter() - begun_s
                else:
                    self.metrics.inter_token.observe(token.time_s - last_s)
                last_s = token.time_s
                if stopped_by is not None:
                    return
        finally:  # whoever read it may have had enough
            if first_s is not None:
                self.metrics.prefill.observe(prefill_s)
                self.metrics.decode.observe(last_s - first_s)
                self.metrics.inference.observe(prefill_s + last_s - first_s)

    async def _next(self, flight: "_Flight", answer: Stream) -> "_Item":
        """Return the next token. A long prompt is run in chunks, before the first one."""
        _, ids, _ = flight.key
        if flight.items or not 0 < self._settings.prefill_chunk < len(ids):
            return await self._thread.run(partial(self._step, answer, flight.key[0]))
        return await asyncio.get_running_loop().run_in_executor(self._prefilling, self._prefill, flight, answer)

    def _prefill(self, flight: "_Flight", answer: Stream) -> "_Item":
        """Return the first token, in a thread of its own, which takes turns with the model's."""

        def check() -> None:
            if flight.stream is None:
                raise RuntimeError("nobody waits for this answer any more")

        def give_way() -> None:
            turn()
            check()

        with self._thread.held() as turn, self._cache.chunked(self._settings.prefill_chunk, give_way):
            check()
            return self._step(answer, flight.key[0])

    def _step(self, answer: Stream, namespace: str) -> "_Item":
        """Return the next token, in the model's thread, or in one that holds the model."""
        public = None if self._settings.keys is None else PUBLIC  # without keys everybody has one namespace
        cache = self._cache
        where = cache.namespace(namespace, prefixes_from=public) if self._is_caching() else cache.disabled()
        with where, torch.inference_mode():
            return next(answer), answer.stopped_by

    def _end(self, flight: "_Flight", error: Refusal | None = None) -> None:
        """Let go of a flight, whose K/V is freed as soon as no step of it runs. Twice does nothing."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        self._open.discard(flight)
        if flight.stream is None:
            return
        flight.stream = None
        if error is not None:
            for reader in flight.readers:
                reader.put(error)
        if flight.task is not None and flight.task is not asyncio.current_task():
            flight.task.cancel()


_Key = tuple[str, Ids, Sampling]
_Item = tuple[Token, StoppedBy | None]
Arrived = asyncio.Queue[tuple["Generating", _Item | Refusal]]


@dataclass(eq=False, slots=True)
class _Flight:
    """A generation that is computed, its tokens so far, and its readers."""

    key: _Key
    stream: Stream | None
    task: "asyncio.Task[None] | None" = None
    readers: list["Generating"] = field(default_factory=list)
    items: list[_Item] = field(default_factory=list)
    rung: str | None = None
    n_cached: int = 0

    def put(self, token: Token, stopped_by: StoppedBy | None, answer: Stream) -> None:
        """Hand a token to all readers."""
        if not self.items and answer.outcome is not None:
            self.rung = answer.outcome.rung
            self.n_cached = len(self.key[1]) if self.rung == "exact" else answer.outcome.n_prefix
        self.items.append((token, stopped_by))
        for reader in self.readers:
            reader.put((token, stopped_by))


class Generating:
    """One answer. What arrives of it goes through `take`, until it `is_over`."""

    def __init__(self, decoder: Decoder, flight: _Flight, is_first: bool, arrived: "Arrived") -> None:
        self._decoder = decoder
        self._flight = flight
        self._is_first = is_first
        self._arrived = arrived
        self._is_begun = False
        self._started_s = perf_counter()
        self.is_over = False
        self.prompt = flight.key[1]
        self.n_prompt = len(self.prompt)
        for item in flight.items:
            self.put(item)
        flight.readers.append(self)

    def put(self, item: _Item | Refusal) -> None:
        """Hand on a token, or why there are no more."""
        self._arrived.put_nowait((self, item))

    def take(self, item: _Item | Refusal) -> _Item:
        """Count what arrived; a refusal is raised."""
        if isinstance(item, Refusal):
            self._finish("error")
            raise item
        if not self._is_begun:
            self._is_begun = True
            self._decoder.metrics.first_token.observe(perf_counter() - self._started_s)
            self._decoder.metrics.served(self.rung, self.n_prompt, self.n_cached)
        if item[1] is not None:
            self._finish(item[1])
        return item

    @property
    def rung(self) -> str | None:
        """What served the prompt: a rung, `IN_FLIGHT`, or None if it was computed; known with the first token."""
        return self._flight.rung if self._is_first else IN_FLIGHT

    @property
    def n_cached(self) -> int:
        """Tokens of the prompt that were not computed for this request; known with the first token."""
        return self._flight.n_cached if self._is_first else self.n_prompt

    def stop(self) -> None:
        """End the answer: a stop text was found. After the end it does nothing."""
        if not self.is_over:
            self._finish("stop")

    def close(self) -> None:
        """End the answer: its client has gone. After the end it does nothing."""
        if not self.is_over:
            self._decoder.metrics.cancelled.inc()
            self._finish(None)

    def _finish(self, reason: StoppedBy | Literal["error"] | None) -> None:
        self.is_over = True
        if reason is not None:
            self._decoder.metrics.finished(reason)
        self._decoder.leave(self._flight, self)


def _refused(prompt: Any, error: RequestError, param: str) -> Refusal:
    """Say why a prompt has no tokens, in words that quote nothing of it. A template that fails is logged."""
    cause, text = error.__cause__, "the prompt is empty: give at least one token"
    if isinstance(cause, UnicodeEncodeError):
        text = "the prompt is no valid Unicode text (a lone surrogate)"
    elif type(cause) in _OF_MESSAGES:
        text = "the model's chat template does not take these messages: it may want their roles in another order"
    elif cause is not None:
        logger.error("the model's chat template failed: %s", described(cause))
        kind = type(cause).__name__
        return Refusal("backend", f"the model's chat template failed ({kind}): the server's log says where")
    elif not isinstance(prompt, str) and "no chat template" in str(error):
        text = "the model has no chat template: use /v1/completions"
    return Refusal("tokenizer", text, param=param)
