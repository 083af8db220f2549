"""Results of a generation: `Token` and `Generation`."""

from dataclasses import dataclass
from typing import Literal

from llmcache.generation.latency import Latency
from llmcache.request.outcome import Outcome

StoppedBy = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer.

    Attributes:
        id: Token id.
        logprob: Natural log-probability by the model's own logits, before temperature, penalties, top_k and top_p, as
            OpenAI's servers and vLLM return it by default.
        top: The `n_logprobs` likeliest tokens by the same logits, (id, logprob), likeliest first.
        time_s: Seconds from the request to this token.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of one request.

    Attributes:
        tokens: Ids of the answer, including the stop id that ended it.
        logprobs: Log-probability of each token; see `Token`.
        top: The likeliest tokens at each, (id, logprob).
        times: Times of the tokens; None before the first.
        stopped_by: `stop`: by a stop id. `length`: by `max_new_tokens`. None: not finished.
        n_prompt: Tokens of the prompt.
        kv_nbytes: Bytes of K/V held at the end: for a dynamic cache 2 L H_kv D_h T itemsize
            (`llmcache.generation.kv_nbytes`), T = tokens of prompt and answer less 1: the last token is not run.
        outcome: How the cache on the model served the prefill; None before the prefill, and without a cache.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]
    times: Latency | None
    stopped_by: StoppedBy | None
    n_prompt: int
    kv_nbytes: int
    outcome: Outcome | None

    @property
    def n_prefix(self) -> int:
        """Prompt tokens served by a stored prefix, as in `Outcome`; 0 for an exact hit, which runs no tokens."""
        return 0 if self.outcome is None else self.outcome.n_prefix

    @property
    def rung(self) -> str | None:
        """Rung that served the prefill, `exact` or `prefix`; None: it was computed."""
        return None if self.outcome is None else self.outcome.rung
