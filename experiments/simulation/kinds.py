"""What is timed: requests of a calibrated classifier, and prompts of a decoder, both made up so that all are new."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.methods.base import twin
from experiments.models.architectures import build
from experiments.simulation.clock import Asked
from experiments.tasks.workload import Workload
from llmcache import LLMCache
from llmcache.generation import Sampling, generate

BLOCK = 16  # tokens, the cache's own default
_WORDS = 12  # tokens of a request


def requests(workload: Workload, folder: Path, n: int, seed: int) -> Asked:
    """Requests of a calibrated cache that was saved to a folder; its settings have a store."""
    like = workload.requests[0].inputs

    def ask(cache: LLMCache, ids: torch.Tensor) -> None:
        about = {name: torch.ones_like(ids) if name == "attention_mask" else torch.zeros_like(ids) for name in like}
        cache(**{**about, "input_ids": ids})

    def load() -> LLMCache:
        return LLMCache.load(twin(workload.module), folder, tokenizer=workload.tokenizer)

    draw = _drawn(len(workload.tokenizer), seed)
    return Asked(load, ask, lambda size: draw(_WORDS), (1,), n, announces=True)


def blocks(name: str, settings: Mapping[str, Any], sizes: Sequence[int], n: int, seed: int) -> Asked:
    """Prompts of whole blocks, to their first token."""
    model: Any = build(name, seed, "cpu", head="token").model
    model.config.use_cache = True

    def ask(cache: LLMCache, ids: torch.Tensor) -> None:
        generate(cache.model, ids, Sampling(max_new_tokens=1))

    draw = _drawn(model.config.vocab_size, seed)

    def wrap() -> LLMCache:
        return LLMCache.wrap(twin(model), **settings)

    return Asked(wrap, ask, lambda size: draw(BLOCK * size), tuple(sorted(sizes)), n, announces=False)


def _drawn(vocabulary: int, seed: int) -> Callable[[int], torch.Tensor]:
    """Draws requests (1, T)."""
    random = torch.Generator().manual_seed(seed)
    return lambda n_tokens: torch.randint(5, vocabulary, (1, n_tokens), generator=random)
