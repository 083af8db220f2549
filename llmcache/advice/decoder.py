"""The ways to run a decoder's prompts: alone and with the cache, one by one and in batches."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmcache.advice.advice import Way
from llmcache.advice.encoder import ALONE
from llmcache.advice.trial import Run, Trial
from llmcache.errors import ConfigError
from llmcache.models.adapters import device_of
from llmcache.reuse.calibration.inputs import longest_input, prompts_of

PREFIXES, BATCHES, TREE = "llmcache, prefixes", "the model alone, batches of 8", "llmcache, batches of 8"
_ROWS = 8


class DecoderTrial(Trial):
    """A causal language model: the time to the first token of each prompt, alone and in batches."""

    n_ways = 4
    least_served = 3 * _ROWS  # no bound rests on them
    learns = False

    def _ways(self) -> Iterator[Way]:
        batches = [self._padded(self._served[i : i + _ROWS]) for i in range(0, len(self._served), _ROWS)]
        code = "cache = LLMCache.wrap(model, tokenizer=tokenizer)"
        for plain, cached, calls, how, n_rows in (
            (ALONE, PREFIXES, self._served, "model.generate(**inputs)", 1),
            (BATCHES, TREE, batches, "model.generate(**batch)", _ROWS),
        ):
            told: dict[str, Any] = {"nbytes": self._nbytes, "bound": 0.0, "n_rows": n_rows}
            yield self._replay(plain, how, self._prefill(self._alone()), calls, **told)
            with self._cached() as (core, run):
                yield self._replay(cached, f"{code}; {how}", self._prefill(run), calls, core, **told)

    @property
    def _names(self) -> Collection[str]:
        """Names of the arguments of the model's forward."""
        return inspect.signature(self._wrapped.model.forward).parameters

    def _prepare(self, requests: Sequence[Any]) -> list[Mapping[str, Any]]:
        """Return token ids (1, T) of each prompt; `ConfigError` if one is no prompt, or too long."""
        device, longest = device_of(self._wrapped.trunk.module), longest_input(self._wrapped.trunk)
        prompts: list[Mapping[str, Any]] = []
        for number, request in enumerate(requests):
            if not isinstance(request, str | list | tuple | Tensor) or not len(request):
                raise ConfigError(
                    f"request {number} is a {type(request).__name__}: for a decoder give texts, token ids or messages"
                )
            (ids,) = prompts_of([request], self._wrapped.tokenizer)
            if longest is not None and len(ids) > longest:
                raise ConfigError(f"request {number} has {len(ids):,} tokens, and the model takes {longest:,}")
            prompts.append({"input_ids": torch.tensor([ids], device=device)})
        return prompts

    def _answer(self, output: Any) -> list[int]:
        """Return the likeliest next token of each row."""
        found: list[int] = output.logits[:, -1].argmax(dim=-1).tolist()
        return found

    def _n_changed(self, answers: Sequence[int]) -> int:
        return sum(one != other for one, other in zip(answers, self._expected, strict=True))

    def _prefill(self, run: Run) -> Run:
        """Return the call that makes a first token, and the K/V for the next, as `generate` does."""
        last = {"logits_to_keep": 1} if "logits_to_keep" in self._names else {}
        return lambda inputs: run({**inputs, "use_cache": True, **last})

    def _padded(self, prompts: Sequence[Mapping[str, Any]]) -> Mapping[str, Tensor]:
        """Return a batch, padded on the left, with positions as `generate` counts them."""
        rows = [one["input_ids"][0] for one in prompts]
        longest, pad = max(map(len, rows)), getattr(self._wrapped.tokenizer, "pad_token_id", None) or 0
        ids = torch.full((len(rows), longest), pad, device=rows[0].device)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, longest - len(row) :], mask[number, longest - len(row) :] = row, 1
        batch = {"input_ids": ids, "attention_mask": mask}
        if "position_ids" in self._names:
            batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        return batch
