"""Concurrent generations on one model.

    start -> waits for one of `max_streams` slots, which namespaces are given in turn
          -> its prompt is run in chunks -> its tokens are computed in steps with those of all others -> its readers

Requests with the same namespace, tokens and sampling share one flight: they are computed once while it is in progress.
A flight without readers is cancelled.
"""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, cast

import torch
from jinja2.exceptions import TemplateError, UndefinedError

from llmcache.errors import ConfigError, RequestError
from llmcache.generation import PromptCache, Sampling, Stream, stream
from llmcache.generation.kv_caches import context_length
from llmcache.generation.validation import decoder_config
from llmcache.serving.fair_queue import Slots
from llmcache.serving.flights import Arrived, Flight, Generating, Ids, Key
from llmcache.serving.refusals import Refusal, described, overloaded, stopping
from llmcache.serving.shared import Shared
from llmcache.serving.steps import Steps

logger = logging.getLogger("llmcache.serving")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # a text, token ids, or messages

_N_ENCODE_THREADS = 4
_MAX_PROMPTS = 64  # tokenised prompts kept per namespace; one takes 0.3 MB at a context of 8,192 tokens
_DEFAULT_MAX_NEW = 4096  # tokens of an answer if neither the request nor the model sets a limit


class Decoder:
    """Serves generation requests of one model. All methods must be called from one event loop."""

    def __init__(self, shared: Shared, tokenizer: Any) -> None:
        self._cache, _, self._settings, self.metrics, _ = shared
        config = decoder_config(self._cache.model)
        self.context, self.vocabulary = context_length(config), int(config.vocab_size)
        self.eos_ids = tuple(sorted(Sampling().stops_of(self._cache.model)))
        self._tokenizer = tokenizer
        self._steps = Steps(shared)
        self._prompts: dict[str, PromptCache] = {}
        self._encoding = ThreadPoolExecutor(_N_ENCODE_THREADS, "llmcache-encode")
        self._slots = Slots(self._settings.max_streams)
        self._flights: dict[Key, Flight] = {}  # flights that new requests may join
        self._active: set[Flight] = set()  # all unfinished flights
        self._waiting: set[Flight] = set()
        self._is_stopping = False

    @property
    def n_waiting(self) -> int:
        """Number of generations waiting for a slot."""
        return len(self._waiting)

    def refuse_waiting(self) -> None:
        """Refuse all waiting generations, and later ones that would have to wait; running ones continue."""
        self._is_stopping = True
        for flight in list(self._waiting):
            self._end(flight, stopping())

    def refuse_all(self) -> None:
        """End all generations; their readers get a `Refusal`."""
        for flight in list(self._active):
            self._end(flight, stopping())

    def close(self) -> None:
        """End all generations and shut the threads down. Idempotent."""
        self.refuse_all()
        self._encoding.shutdown(wait=False, cancel_futures=True)
        self._steps.close()

    def forget(self, namespace: str | None = None) -> None:
        """Drop tokenised prompts of a namespace, or of all; its current flights store nothing, none joins them."""
        for flight in self._active:
            flight.is_stored &= bool(flight.items) or namespace not in (None, flight.namespace)
        self._prompts = {name: one for name, one in self._prompts.items() if namespace not in (None, name)}
        self._flights = {key: one for key, one in self._flights.items() if namespace not in (None, key[0])}

    async def encode(self, prompt: Prompt, namespace: str | None) -> Ids:
        """Return a prompt's token ids, and keep them for the namespace, if any. Raises `Refusal` if they are wrong."""
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
        """Return the maximum number of new tokens: `asked`, else `otherwise`, else the rest of the context.

        Raises `Refusal` if prompt and answer do not fit the context; `params` names their fields in the request.
        """
        if self.context is None:
            return asked or otherwise or _DEFAULT_MAX_NEW
        room = self.context - n_prompt
        if (asked or 1) > room:
            fewer, param = (f", or set {params[1]} to {room} at most", params[1]) if room > 0 else ("", params[0])
            held = f"the model's context of {self.context} holds prompt and answer: shorten it{fewer}"
            raise Refusal("invalid", f"the prompt has {n_prompt} tokens, and {held}", param=param)
        return asked or min(room, otherwise or room)

    def start(self, ids: Ids, sampling: Sampling, namespace: str, arrived: Arrived) -> Generating:
        """Start generating from the ids of `encode`, or join an equal request of this namespace in flight.

        Tokens are put into the queue `arrived`, which several answers may share.
        """
        key = (namespace, ids, sampling)
        flight = self._flights.get(key)
        is_first = flight is None
        if flight is None:
            flight = self._flights[key] = Flight(key, self._stream(ids, sampling))
            self._active.add(flight)
            flight.task = asyncio.get_running_loop().create_task(self._drive(flight))
        return Generating(flight, is_first, arrived, self.metrics, self._leave)

    def warm_up(self, n_tokens: int, namespace: str) -> None:
        """Generate two tokens from a prompt of `n_tokens` tokens, twice. Runs in the model thread."""
        most = n_tokens if self.context is None else min(n_tokens, self.context - 2)
        ids = tuple(i % self.vocabulary for i in range(most))
        self._steps.warm_up(lambda: self._stream(ids, Sampling(max_new_tokens=2, stop_ids=())), namespace)

    def _encode(self, prompt: Any, param: str, namespace: str | None) -> Ids:
        """Return a prompt's token ids. Runs in a tokenising thread."""
        known = None if namespace is None else self._prompts.get(namespace)
        if known is None:
            known = PromptCache(self._tokenizer, max_entries=_MAX_PROMPTS)
            if namespace is not None:
                # One per namespace: a shared one would reveal by its timing which prompts other namespaces sent.
                self._prompts[namespace] = known
        began = perf_counter()
        try:
            ids = known.encode(prompt).ids
        except RequestError as error:
            raise _prompt_refusal(prompt, error, param) from None  # the error's text may quote the prompt
        self.metrics.tokenisation.observe(perf_counter() - began)
        return ids

    def _stream(self, ids: Ids, sampling: Sampling) -> Stream:
        model = self._cache.model
        try:
            return stream(model, torch.tensor([ids], device=next(model.parameters()).device), sampling)
        except (RequestError, ConfigError):  # their text may quote the request
            raise Refusal("invalid", "the model cannot take this prompt with these settings") from None

    async def _drive(self, flight: Flight) -> None:
        """Run a flight: wait for a slot, then generate to the last token."""
        try:
            await self._acquire_slot(flight)
        except Refusal as refusal:
            self._end(flight, refusal)
            return
        try:
            await self._steps.run(flight)
        except Exception as error:
            self.metrics.failed.inc()
            logger.error("a generation failed: %s", described(error))
            self._end(flight, Refusal("backend", "the model failed on this request"))
        finally:
            self._slots.release()
            self._end(flight)

    async def _acquire_slot(self, flight: Flight) -> None:
        """Wait for a slot. Raises `Refusal` after `max_queue_s`, or when stopping."""
        began, longest_s = perf_counter(), self._settings.max_queue_s
        if self._is_stopping and self._slots.are_taken():
            raise stopping()
        self._waiting.add(flight)
        try:
            async with asyncio.timeout(longest_s):
                await self._slots.acquire(flight.namespace)
        except TimeoutError:
            why = f"the model is answering {self._settings.max_streams} requests already"
            raise overloaded(why, math.ceil(longest_s)) from None
        finally:
            self._waiting.discard(flight)
        self.metrics.queue.observe(perf_counter() - began)

    def _leave(self, flight: Flight, reader: Generating) -> None:
        """Remove a reader from a flight, and end the flight if it was the last one."""
        flight.readers.remove(reader)
        if not flight.readers:
            self._end(flight)

    def _end(self, flight: Flight, error: Refusal | None = None) -> None:
        """End a flight; its K/V is freed once none of its steps runs. Idempotent."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        self._active.discard(flight)
        if flight.stream is None:
            return
        flight.stream = None
        if error is not None:
            for reader in flight.readers:
                reader.put(error)
        if flight.task is not None and flight.task is not asyncio.current_task():
            flight.task.cancel()


def _prompt_refusal(prompt: Any, error: RequestError, param: str) -> Refusal:
    """Return a refusal for a prompt that could not be tokenised, without quoting it; log a failing chat template."""
    cause, text = error.__cause__, "the prompt is empty: give at least one token"
    if isinstance(cause, UnicodeEncodeError):
        text = "the prompt is not valid Unicode text (a lone surrogate)"
    elif type(cause) in (TemplateError, UndefinedError):  # raised by the template; a field that it reads is missing
        text = "the model's chat template does not take these messages: it may want their roles in another order"
    elif cause is not None:
        logger.error("the model's chat template failed: %s", described(cause))
        text = f"the model's chat template failed ({type(cause).__name__}): the server's log says where"
        return Refusal("backend", text)
    elif not isinstance(prompt, str) and "no chat template" in str(error):
        text = "the model has no chat template: use /v1/completions"
    return Refusal("tokenizer", text, param=param)
