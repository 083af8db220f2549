"""Sampling of the next token: settings, and transformers' own logits processors in the order of its `generate()`.

Sizes: T tokens so far, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from llmcache.errors import ConfigError, RequestError


def _is_over_zero(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # False for NaN


def _is_penalty(value: Any) -> bool:
    return type(value) in (int, float) and -2 <= value <= 2  # False for NaN


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


# A check of each setting, and its description in errors.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "do_sample": (lambda x: type(x) is bool, "True or False"),
    "temperature": (_is_over_zero, "a number over 0; for the likeliest token, leave do_sample out"),
    "top_k": (lambda x: x is None or _is_count(x), "a whole number of tokens, 1 or more, or None for all"),
    "top_p": (
        lambda x: x is None or (_is_over_zero(x) and x <= 1),
        "a share of probability over 0, at most 1, or None",
    ),
    "repetition_penalty": (_is_over_zero, "a number over 0; 1 penalises nothing, and over 1 repeats less"),
    "presence_penalty": (_is_penalty, "a number from -2 to 2; 0 penalises nothing"),
    "frequency_penalty": (_is_penalty, "a number from -2 to 2; 0 penalises nothing"),
    "seed": (lambda x: type(x) is int and 0 <= x < 2**63, "a whole number, 0 or more, under 2 ** 63"),
    "max_new_tokens": (_is_count, "a whole number of tokens, 1 or more"),
    "stop_ids": (
        lambda x: x is None or (isinstance(x, Sequence) and all(type(one) is int for one in x)),
        "a sequence of token ids, () for none, or None for the model's own",
    ),
    "n_logprobs": (lambda x: type(x) is int and x >= 0, "a whole number of tokens, 0 or more"),
    "n_prompt_logprobs": (
        lambda x: x is None or (type(x) is int and x >= 0),
        "a whole number of tokens, 0 or more, or None to leave the prompt unscored",
    ),
}
_N_SCORED = 128  # tokens scored at once: as many rows of log-probabilities in float32 are held
_WARPERS = ("temperature", "top_k", "top_p")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of a generation. The default is greedy.

    Attributes:
        do_sample: Draw each token from the distribution; else take the likeliest.
        temperature: Divides the logits; over 0. Needs `do_sample`, as do `top_k` and `top_p`.
        top_k: Draw from the `top_k` likeliest tokens, 1 or more; None: from all.
        top_p: Draw from the likeliest tokens whose probabilities add up to `top_p`, over 0 to 1; None: from all.
        repetition_penalty: Divides positive logits and multiplies negative logits of tokens in prompt or answer; over
            0; 1 changes nothing.
        presence_penalty: Subtracted from the logits of tokens in the answer, -2 to 2; below 0 it favours repeats.
            Tokens of the prompt do not count, here and for `frequency_penalty`, as OpenAI defines both.
        frequency_penalty: Subtracted once per occurrence of the token in the answer, -2 to 2.
        seed: Seed of the draws, 0 or more, under 2 ** 63. The same seed and prompt give the same tokens.
        max_new_tokens: Largest number of tokens of the answer; 20 is the default of transformers.
        stop_ids: Tokens that end the answer, as its last token; None: the model's end-of-text tokens; (): none.
        n_logprobs: Number of likeliest tokens returned with each token, with their log-probabilities by the model's own
            logits, which no setting above changes.
        n_prompt_logprobs: The same for each token of the prompt, in `Stream.prompt`; None: the prompt is not scored.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_new_tokens: int = 20
    stop_ids: Sequence[int] | None = None
    n_logprobs: int = 0
    n_prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a setting that is out of range or has no effect, with its value and what to give."""
        for name, (is_right, wanted) in _RULES.items():
            if not is_right(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r}: give {wanted}")
        defaults = {field.name: field.default for field in fields(self)}
        for name in _WARPERS:
            if not self.do_sample and getattr(self, name) != defaults[name]:
                raise ConfigError(f"{name}={getattr(self, name)!r} has no effect on greedy tokens: set do_sample=True")

    def processors(self, n_prompt: int = 0) -> Any:
        """Return the `LogitsProcessorList` of these settings, in the order of transformers' `generate()`.

        Args:
            n_prompt: Number of prompt tokens, which presence and frequency penalties skip.
        """
        import transformers as tf

        found = tf.LogitsProcessorList()
        if self.repetition_penalty != 1:
            found.append(tf.RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.presence_penalty or self.frequency_penalty:
            found.append(CountPenalty(float(self.presence_penalty), float(self.frequency_penalty), n_prompt))
        if self.temperature != 1:
            found.append(tf.TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            found.append(tf.TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            found.append(tf.TopPLogitsWarper(float(self.top_p)))
        return found

    def stops_of(self, model: Any) -> frozenset[int]:
        """Return the ids that end a generation of this model."""
        if self.stop_ids is not None:
            return frozenset(self.stop_ids)
        settings = getattr(model, "generation_config", None) or model.config
        own = getattr(settings, "eos_token_id", None)
        return frozenset() if own is None else frozenset([own] if isinstance(own, int) else own)


@dataclass(frozen=True, slots=True)
class CountPenalty:
    """A logits processor for presence and frequency penalties over the answer, which transformers lacks."""

    presence: float
    frequency: float
    n_prompt: int

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (B, V) of the next token less the penalties; `ids`: prompt and answer, int64 (B, T)."""
        made = ids[:, self.n_prompt :]
        counts = torch.zeros_like(scores).scatter_add(1, made, torch.ones_like(made, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Chooser:
    """Chooses the tokens of one request."""

    def __init__(self, sampling: Sampling, device: torch.device, n_prompt: int) -> None:
        """Begin a request on a device; a seed draws other tokens on another kind of device."""
        self._sampling = sampling
        self._processors = sampling.processors(n_prompt)
        self._rng = torch.Generator(device).manual_seed(sampling.seed)

    def __call__(self, ids: Tensor, logits: Tensor) -> tuple[int, float, tuple[tuple[int, float], ...]]:
        """Return `id`, `logprob` and `top` of the next `Token`, after prompt and answer so far, int64 (1, T).

        Raises `RequestError` if its logits (1, V) are not finite.
        """
        own = logits.to(torch.float32)  # as transformers does: in half precision ties are frequent
        logprobs = torch.log_softmax(own, dim=-1)[0]
        scores = self._processors(ids, own)
        if bool(logprobs.isnan().any() or (scores is not own and torch.softmax(scores, dim=-1).isnan().any())):
            raise RequestError("the model's logits are not finite, so no token can be chosen: run it in a wider dtype")
        if self._sampling.do_sample:
            chosen = int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._rng))
        else:
            chosen = int(scores.argmax(dim=-1))
        return chosen, float(logprobs[chosen]), _likeliest(logprobs, self._sampling.n_logprobs)


def score(ids: Tensor, logits: Tensor, n_top: int) -> Iterator[tuple[int, float, tuple[tuple[int, float], ...]]]:
    """Yield `id`, `logprob` and `top` of the `Token`s of a prompt, int64 (T,), but the first.

    Args:
        ids: The prompt.
        logits: The model's at each of its positions (T, V).
        n_top: Number of likeliest tokens of each.

    Raises:
        RequestError: A log-probability is not a number.
    """
    for first in range(0, len(ids) - 1, _N_SCORED):
        next_ids = ids[first + 1 : first + 1 + _N_SCORED].tolist()
        logprobs = torch.log_softmax(logits[first : first + len(next_ids)].to(torch.float32), dim=-1)
        if bool(logprobs.isnan().any()):
            raise RequestError("the model's logits are not finite, so nothing can be scored: run it in a wider dtype")
        for token, row in zip(next_ids, logprobs, strict=True):
            yield token, float(row[token]), _likeliest(row, n_top)


def _likeliest(logprobs: Tensor, n: int) -> tuple[tuple[int, float], ...]:
    """Return the ids and log-probabilities of the likeliest of tokens (V,), those of probability 0 left out."""
    top = logprobs.topk(n)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return tuple(pair for pair in pairs if pair[1] > -math.inf)
