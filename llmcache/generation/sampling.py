"""How the next token is chosen: settings, and transformers' own logits processors in the order of its `generate()`.

Sizes: T tokens so far, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from llmcache.errors import ConfigError, RequestError


def _is_over_zero(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # NaN is not


def _is_penalty(value: Any) -> bool:
    return type(value) in (int, float) and -2 <= value <= 2  # NaN is not


# What each setting may be, and how an error says it.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "do_sample": (lambda x: type(x) is bool, "True or False"),
    "temperature": (_is_over_zero, "a number over 0; for the likeliest token, leave do_sample out"),
    "top_k": (
        lambda x: x is None or (type(x) is int and x > 0),
        "a whole number of tokens, 1 or more, or None for all",
    ),
    "top_p": (
        lambda x: x is None or (_is_over_zero(x) and x <= 1),
        "a share of probability over 0, at most 1, or None",
    ),
    "repetition_penalty": (_is_over_zero, "a number over 0; 1 penalises nothing, and over 1 repeats less"),
    "presence_penalty": (_is_penalty, "a number from -2 to 2; 0 penalises nothing"),
    "frequency_penalty": (_is_penalty, "a number from -2 to 2; 0 penalises nothing"),
    "seed": (lambda x: type(x) is int and 0 <= x < 2**63, "a whole number, 0 or more, under 2 ** 63"),
    "max_new_tokens": (lambda x: type(x) is int and x > 0, "a whole number of tokens, 1 or more"),
    "stop_ids": (
        lambda x: x is None or (isinstance(x, Sequence) and all(type(one) is int for one in x)),
        "a sequence of token ids, () for none, or None for the model's own",
    ),
    "n_logprobs": (lambda x: type(x) is int and x >= 0, "a whole number of tokens, 0 or more"),
}
_WARPERS = ("temperature", "top_k", "top_p")


@dataclass(frozen=True, slots=True)
class Sampling:
    """What is asked of a generation. The default is greedy.

    Attributes:
        do_sample: Draw each token from the distribution; else the likeliest is taken.
        temperature: Logits are divided by it, over 0. Needs `do_sample`, as do the next two.
        top_k: Draw from that many tokens; None: from all.
        top_p: Draw from the likeliest tokens that have this much probability together, over 0 to 1; None: from all.
        repetition_penalty: Logits of tokens that prompt or answer hold are divided by it where positive, else
            multiplied, over 0; 1 changes nothing.
        presence_penalty: Subtracted from the logits of tokens that the answer holds, -2 to 2. Those of the prompt do
            not count, here and in the next, as OpenAI defines both; under 0 repeats are made likelier.
        frequency_penalty: Subtracted as often as the answer holds the token, -2 to 2.
        seed: Of the draw. The same seed and prompt give the same tokens.
        max_new_tokens: Tokens at most; 20 is what transformers gives by default.
        stop_ids: Tokens that end a generation, and are its last; None: the model's end-of-text tokens; (): none.
        n_logprobs: How many of the likeliest tokens are told with each, with their log-probabilities, which are the
            model's own: no setting above changes them.
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

    def __post_init__(self) -> None:
        """Refuse what is out of range, or would have no effect.

        Raises:
            ConfigError: Naming the setting, its value and what would be accepted.
        """
        for name, (is_right, wanted) in _RULES.items():
            if not is_right(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r}: give {wanted}")
        defaults = {field.name: field.default for field in fields(self)}
        for name in _WARPERS:
            if not self.do_sample and getattr(self, name) != defaults[name]:
                raise ConfigError(f"{name}={getattr(self, name)!r} has no effect on greedy tokens: set do_sample=True")

    def processors(self, n_prompt: int = 0) -> Any:
        """Processors for these settings (`LogitsProcessorList`), in the order of transformers' `generate()`.

        Args:
            n_prompt: Tokens of the prompt, which presence and frequency penalties pass over.
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
        """The ids that end a generation of this model."""
        if self.stop_ids is not None:
            return frozenset(self.stop_ids)
        settings = getattr(model, "generation_config", None) or model.config
        own = getattr(settings, "eos_token_id", None)
        return frozenset() if own is None else frozenset([own] if isinstance(own, int) else own)


@dataclass(frozen=True, slots=True)
class CountPenalty:
    """A logits processor: presence and frequency penalties over the answer, which transformers has no processor for."""

    presence: float
    frequency: float
    n_prompt: int

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) of what follows prompt and answer so far, int64 (B, T), with the penalties subtracted."""
        made = ids[:, self.n_prompt :]
        counts = torch.zeros_like(scores).scatter_add(1, made, torch.ones_like(made, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Chooser:
    """Chooses the tokens of one request."""

    def __init__(self, sampling: Sampling, device: torch.device, n_prompt: int) -> None:
        """Begin a request on a device: seeds mean something else on another kind."""
        self._sampling = sampling
        self._processors = sampling.processors(n_prompt)
        self._rng = torch.Generator(device).manual_seed(sampling.seed)

    def __call__(self, ids: Tensor, logits: Tensor) -> tuple[int, float, tuple[tuple[int, float], ...]]:
        """Choose what follows prompt and answer so far, int64 (1, T), by its logits (1, V), which must be finite.

        Returns:
            `id`, `logprob` and `top` of a `Token`.
        """
        own = logits.to(torch.float32)  # as transformers: in half precision ties are many
        logprobs = torch.log_softmax(own, dim=-1)[0]
        scores = self._processors(ids, own)
        if bool(logprobs.isnan().any() or (scores is not own and torch.softmax(scores, dim=-1).isnan().any())):
            raise RequestError("the model's logits are not finite, so no token follows: run it in a wider dtype")
        if self._sampling.do_sample:
            chosen = int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._rng))
        else:
            chosen = int(scores.argmax(dim=-1))
        top = logprobs.topk(self._sampling.n_logprobs)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return chosen, float(logprobs[chosen]), tuple(pair for pair in pairs if pair[1] > -math.inf)
