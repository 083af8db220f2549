"""Generation of one request, token by token.

Sizes: T tokens of the prompt, V vocabulary.
"""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from llmcache.errors import ConfigError, RequestError
from llmcache.generation.kv_caches import Kind, check_room, held_nbytes, make_cache
from llmcache.generation.latency import Latency
from llmcache.generation.results import Generation, StoppedBy, Token
from llmcache.generation.sampling import Chooser, Sampling, score
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
    """Answer one request token by token; each token is computed when it is read.

    Of the model's `generation_config`, only the end-of-text ids are used; `sampling` sets everything else.

    Args:
        model: A causal language model of transformers in eval mode, wrapped or not.
        ids: The prompt, int64 or int32 (1, T), on the model's device.
        sampling: How tokens are chosen; None: greedy.
        cache: Kind of K/V cache; see `llmcache.generation.kv_caches`.
        max_length: Tokens that a `static` K/V cache has room for; None: as many as this request can need.
        clock: Returns seconds. The request begins with this call; the reader's time between tokens counts for the next.

    Returns:
        An iterator over the tokens. Its K/V cache is its own, so it may be closed or dropped at any token.

    Raises:
        RequestError: The prompt is empty, has several rows or ids out of the vocabulary, or exceeds the context or the
            K/V cache together with `max_new_tokens`. While iterating: the model's logits are not finite.
        ConfigError: The sampling or the kind of K/V cache does not suit the model.
        UnsupportedModelError: Not a causal language model.
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
    """Answer one request and return the whole result; arguments and errors are those of `stream`."""
    answer = stream(model, ids, sampling, cache=cache, max_length=max_length, clock=clock)
    for _ in answer:
        pass
    return answer.generation()


class Stream(Iterator[Token]):
    """The tokens of one request; made by `stream`. One thread at a time.

    Attributes:
        model: The model.
        kv_cache: K/V of the tokens run; None: the generation is over, or a `Batch` continues it.
        stopped_by: Why the newest token is the last, `stop` or `length`; None: not finished.
        outcome: How the cache on the model served the prefill; None before the prefill, and without a cache.
        prompt: Tokens of the prompt with their log-probabilities, if the sampling has `n_prompt_logprobs`, without the
            first, which nothing precedes. Empty before the prefill. Their times are that of the prefill.
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
        """Check all arguments, compute nothing; see `stream`."""
        self.model, self._config = model, decoder_config(model)
        self._listener = listener_of(model)  # before the clock starts: the search is slowest in a model without a cache
        self._clock, self._started_s = clock, clock()
        _check(self._config, ids, sampling)
        self._stops, self._max_new_tokens = sampling.stops_of(model), sampling.max_new_tokens
        self._n_prompt = ids.shape[1]
        self._choose = Chooser(sampling, ids.device, self._n_prompt)
        self._tokens: list[Token] = []
        self._n_scores = sampling.n_prompt_logprobs
        self._n_kept = None if self._n_scores is None else self._n_prompt
        self.prompt: tuple[Token, ...] = ()
        self.stopped_by: StoppedBy | None = None
        self.outcome: Outcome | None = None
        self._kv_nbytes = 0
        n_run = self._n_prompt + sampling.max_new_tokens - 1  # the last token is not run
        longest = n_run if cache == "static" and max_length is None else max_length
        kv_cache = make_cache(cache, self._config, longest)
        check_room(kv_cache, self._config, n_run)
        self._ids = ids.to(torch.int64, copy=True)  # the caller may modify its tensor
        self.kv_cache: Any = kv_cache

    def __next__(self) -> Token:
        """Compute and return the next token."""
        if self.kv_cache is None:
            raise StopIteration
        try:
            logits = decode_step(self.model, self.newest, self.kv_cache) if self._tokens else self._run_prompt()
            return self.take(logits, held_nbytes(self.kv_cache))
        except BaseException:
            self.close()
            raise

    def _run_prompt(self) -> Tensor:
        """Run the prompt, and score its tokens if asked; return the logits (1, V) of the next one."""
        logits = run_prompt(self.model, self._config, self._ids, None, self.kv_cache, self._n_kept)
        if self._listener is not None and self._listener.last:
            self.outcome = self._listener.last[0]
        if self._n_scores is not None:
            took_s = self._clock() - self._started_s
            self.prompt = tuple(Token(*scored, took_s) for scored in score(self._ids[0], logits[0], self._n_scores))
            logits = logits[:, -1].clone()
        return logits

    def close(self) -> None:
        """Stop the generation. Repeated calls have no effect."""
        self.kv_cache = None

    @property
    def n_held(self) -> int:
        """Number of tokens whose K/V the stream holds."""
        return 0 if self.kv_cache is None else int(self.kv_cache.get_seq_length())

    @property
    def newest(self) -> Tensor:
        """The newest token, int64 (1,): the next one to run."""
        return self._ids[:, -1]

    def take(self, logits: Tensor, kv_nbytes: int) -> Token:
        """Choose, keep and return the next token by its logits (1, V); `kv_nbytes`: bytes of K/V of the tokens run."""
        token = Token(*self._choose(self._ids, logits), self._clock() - self._started_s)
        self._tokens.append(token)
        self._kv_nbytes = kv_nbytes
        self._ids = torch.cat([self._ids, self._ids.new_tensor([[token.id]])], dim=1)
        if token.id in self._stops:
            self.stopped_by = "stop"
        elif len(self._tokens) == self._max_new_tokens:
            self.stopped_by = "length"
        if self.stopped_by is not None:
            self.close()
        return token

    def generation(self) -> Generation:
        """Return the result so far."""
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


def _check(config: Any, ids: Any, sampling: Sampling) -> None:
    if not isinstance(sampling, Sampling):
        raise ConfigError(f"sampling: give a Sampling (got {type(sampling).__name__})")
    check_prompt(config, ids)
    if len(ids) != 1:
        raise RequestError(f"ids: {len(ids)} rows; one request at a time is supported, give (1, T)")
    check_context(config, ids.shape[1], sampling.max_new_tokens)
    wrong = [one for one in sampling.stop_ids or () if not 0 <= one < config.vocab_size]
    if wrong:
        raise ConfigError(f"stop_ids: {wrong[0]} is not in the vocabulary, 0 to {config.vocab_size - 1}")
    for name in ("n_logprobs", "n_prompt_logprobs"):
        if (n := getattr(sampling, name) or 0) > config.vocab_size:
            raise ConfigError(f"{name}={n}: the vocabulary has {config.vocab_size} tokens")
