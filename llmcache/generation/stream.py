"""One request, token by token.

Sizes: T tokens of the prompt, V vocabulary.
"""

from collections.abc import Callable, Generator, Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from llmcache.errors import ConfigError, RequestError
from llmcache.generation.kv_caches import Kind, check_room, held_nbytes, make_cache
from llmcache.generation.latency import Latency
from llmcache.generation.results import Generation, StoppedBy, Token
from llmcache.generation.sampling import Chooser, Sampling
from llmcache.generation.steps import decode_step, run_prompt
from llmcache.generation.validation import check_context, check_prompt, decoder_config
from llmcache.models.hooks import listener_of
from llmcache.request.outcome import Outcome


def stream(
    model: Any,
    ids: Tensor,
    sampling: Sampling | None = None,
    *,
    cache: Kind = "dynamic",
    max_length: int | None = None,
    clock: Callable[[], float] = perf_counter,
) -> "Stream":
    """Answer one request token by token, each computed when it is asked for.

    Tokens are chosen as `sampling` says: of the model's `generation_config` only the ids that end an answer count.

    Args:
        model: A causal language model of transformers in eval mode, wrapped or not.
        ids: The prompt, int64 (1, T), on the model's device.
        sampling: How tokens are chosen; None: greedy.
        cache: What keeps the K/V; see `llmcache.generation.kv_caches`.
        max_length: Tokens that a `static` one has room for; None: as many as this request can take.
        clock: Seconds. The request begins with this call; what its reader does between tokens counts to the next one.

    Returns:
        The tokens. Closed or interrupted, it leaves nothing behind: its K/V cache was its own.

    Raises:
        RequestError: The prompt is no single row, empty, not of the vocabulary; or with `max_new_tokens` over the
            context or the cache. In its course: the model's logits are not finite.
        ConfigError: Sampling or cache do not suit the model.
        UnsupportedModelError: The model is no causal language model.
    """
    return Stream(model, ids, sampling or Sampling(), cache, max_length, clock)


def generate(
    model: Any,
    ids: Tensor,
    sampling: Sampling | None = None,
    *,
    cache: Kind = "dynamic",
    max_length: int | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Generation:
    """Answer one request as a whole; arguments and errors are those of `stream`."""
    answer = stream(model, ids, sampling, cache=cache, max_length=max_length, clock=clock)
    for _ in answer:
        pass
    return answer.generation()


class Stream(Iterator[Token]):
    """The tokens of one request; made by `stream`. One thread at a time.

    Attributes:
        stopped_by: Why the newest token is the last; None: more follow.
        outcome: What the cache on the model made of the prefill; None before it, and without a cache.
    """

    def __init__(
        self,
        model: Any,
        ids: Tensor,
        sampling: Sampling,
        cache: Kind,
        max_length: int | None,
        clock: Callable[[], float],
    ) -> None:
        """Check everything, compute nothing; see `stream`."""
        self._config = decoder_config(model)
        self._listener = listener_of(model)  # found before the clock runs: a model without a cache is searched longest
        self._clock = clock
        self._started_s = clock()
        self._model = model
        _check(self._config, ids, sampling)
        self._stops = sampling.stops_of(model)
        self._max_new_tokens = sampling.max_new_tokens
        self._n_prompt = ids.shape[1]
        self._choose = Chooser(sampling, ids.device, self._n_prompt)
        self._tokens: list[Token] = []
        self.stopped_by: StoppedBy | None = None
        self.outcome: Outcome | None = None
        self._kv_nbytes = 0
        n_run = self._n_prompt + sampling.max_new_tokens - 1  # the last token is not run
        if cache == "static" and max_length is None:
            max_length = n_run
        kv_cache = make_cache(cache, self._config, max_length)
        check_room(kv_cache, self._config, n_run)
        self._steps = self._run(ids.to(torch.int64, copy=True), kv_cache)  # the caller may go on with its own

    def __next__(self) -> Token:
        """The next token, computed now."""
        return next(self._steps)

    def close(self) -> None:
        """End it before its end. Twice does nothing."""
        self._steps.close()

    def generation(self) -> Generation:
        """What became of the request so far."""
        return Generation(
            tokens=tuple(token.id for token in self._tokens),
            logprobs=tuple(token.logprob for token in self._tokens),
            top=tuple(token.top for token in self._tokens),
            times=Latency(tuple(token.time_s for token in self._tokens)) if self._tokens else None,
            stopped_by=self.stopped_by,
            n_prompt=self._n_prompt,
            kv_nbytes=self._kv_nbytes,
            outcome=self.outcome,
        )

    def _run(self, ids: Tensor, kv_cache: Any) -> Generator[Token, None, None]:
        logits = run_prompt(self._model, self._config, ids, None, kv_cache)
        if self._listener is not None and self._listener.last:
            self.outcome = self._listener.last[0]
        while True:
            token = Token(*self._choose(ids, logits), self._clock() - self._started_s)
            self._tokens.append(token)
            self._kv_nbytes = held_nbytes(kv_cache)
            if token.id in self._stops:
                self.stopped_by = "stop"
            elif len(self._tokens) == self._max_new_tokens:
                self.stopped_by = "length"
            yield token
            if self.stopped_by is not None:
                return
            newest = torch.tensor([token.id], dtype=ids.dtype, device=ids.device)
            ids = torch.cat([ids, newest[None]], dim=1)
            logits = decode_step(self._model, newest, kv_cache)


def _check(config: Any, ids: Any, sampling: Sampling) -> None:
    if not isinstance(sampling, Sampling):
        raise ConfigError(f"sampling: give a Sampling (got {type(sampling).__name__})")
    check_prompt(config, ids)
    if len(ids) != 1:
        raise RequestError(f"ids: {len(ids)} rows; one request at a time is answered, give (1, T)")
    check_context(config, ids.shape[1], sampling.max_new_tokens)
    wrong = [one for one in sampling.stop_ids or () if not 0 <= one < config.vocab_size]
    if wrong:
        raise ConfigError(f"stop_ids: {wrong[0]} is not in the vocabulary, 0 to {config.vocab_size - 1}")
    if sampling.n_logprobs > config.vocab_size:
        raise ConfigError(f"n_logprobs={sampling.n_logprobs}: the vocabulary has {config.vocab_size} tokens")
