"""The ways to run a decoder's prompts: alone and with the cache, one by one and in batches."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llmcache.advice.advice import Way
from llmcache.advice.encoder import ALONE
from llmcache.advice.trial import Run, Trial
from llmcache.models.adapters import device_of
from llmcache.reuse.calibration.inputs import prompts_of

PREFIXES, BATCHES, TREE = "llmcache, prefixes", "the model alone, batches of 8", "llmcache, batches of 8"
_ROWS = 8


class DecoderTrial(Trial):
    """A causal language model: the time to the first token of each prompt, alone and in batches."""

    def _prepare(self, requests: Sequence[Any]) -> list[Mapping[str, Tensor]]:
        prompts = prompts_of(list(requests), self._wrapped.tokenizer)
        return [{"input_ids": torch.tensor([ids], device=device_of(self._wrapped.trunk.module))} for ids in prompts]

    def _answer(self, output: Any) -> list[int]:
        found: list[int] = output.logits[:, -1].argmax(dim=-1).tolist()
        return found

    def _n_changed(self, answers: Sequence[int]) -> int:
        return sum(one != other for one, other in zip(answers, self._expected, strict=True))

    n_ways = 4

    def ways(self) -> Iterator[Way]:
        batches = [self._padded(self.served[i : i + _ROWS]) for i in range(0, len(self.served), _ROWS)]
        code = "cache = LLMCache.wrap(model, tokenizer=tokenizer)"
        for plain, cached, calls, how in (
            (ALONE, PREFIXES, self.served, "model.generate(**inputs)"),
            (BATCHES, TREE, batches, "model.generate(**batch)"),
        ):
            yield self._replay(plain, how, _prefill(self._alone()), calls, nbytes=self._nbytes, bound=0.0)
            with self._cached() as (core, run):
                yield self._replay(cached, f"{code}; {how}", _prefill(run), calls, core, self._nbytes, bound=0.0)

    def _padded(self, prompts: Sequence[Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Return a batch, padded on the left."""
        rows = [one["input_ids"][0] for one in prompts]
        longest, pad = max(map(len, rows)), getattr(self._wrapped.tokenizer, "pad_token_id", None) or 0
        ids = torch.full((len(rows), longest), pad, device=device_of(self._wrapped.trunk.module))
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, longest - len(row) :], mask[number, longest - len(row) :] = row, 1
        return {"input_ids": ids, "attention_mask": mask}


def _prefill(run: Run) -> Run:
    """Return the call that makes a first token, and the K/V for the next."""
    asked: dict[str, Any] = {"use_cache": True}
    return lambda inputs: run({**inputs, **asked})
