"""What a generation puts out: a token, and the whole."""

from dataclasses import dataclass
from typing import Literal

from llmcache.generation.latency import Latency
from llmcache.request.outcome import Outcome

StoppedBy = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer.

    Attributes:
        id: Its id.
        logprob: Its natural log-probability by the model's own logits, before temperature, penalties, top_k and top_p,
            as OpenAI's servers and vLLM tell it by default.
        top: The `n_logprobs` tokens that are likeliest by these, (id, logprob), likeliest first.
        time_s: When it came, in seconds since the request.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class Generation:
    """What became of one request.

    Attributes:
        tokens: Ids of the answer, a stop id that ended it included.
        logprobs: The log-probability of each.
        top: The likeliest tokens at each, (id, logprob).
        times: When they came; None before the first.
        stopped_by: `stop`: a stop id. `length`: `max_new_tokens`. None: it was not at its end.
        n_prompt: Tokens of the prompt.
        kv_nbytes: Bytes of K/V that it held at its end: of a dynamic cache 2 L H_kv D_h T itemsize
            (`llmcache.generation.kv_nbytes`) with T = prompt and answer without its last token, which is not run.
        outcome: What the cache on the model made of the prefill; None before it, and without a cache.
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
        """Prompt tokens that a stored prefix served, as in `Outcome`: 0 for an exact hit, which ran none at all."""
        return 0 if self.outcome is None else self.outcome.n_prefix

    @property
    def rung(self) -> str | None:
        """What served the prefill, `exact` or `prefix`; None: it was computed."""
        return None if self.outcome is None else self.outcome.rung
