"""The requests of `tests.topics` as rows of one tensor, and its classifier that tells their topics apart."""

import torch
from torch import Tensor

from llmcache import LLMCache
from tests import topics
from tests.topics import calibrated, classifier

__all__ = ["ask", "batched", "calibrated", "classifier", "requests"]


def requests(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids (n, 8) and topics (n,)."""
    inputs, owners = topics.requests(n, seed)
    return torch.cat([one["input_ids"] for one in inputs]), torch.tensor(owners)


def batched(ids: Tensor, size: int = 50) -> list[dict[str, Tensor]]:
    """The same requests, several a call."""
    return [{"input_ids": part} for part in ids.split(size)]


def ask(cache: LLMCache, ids: Tensor) -> list[str | None]:
    """Ask each request alone; which rung answered it."""
    return topics.rungs_of(cache, batched(ids, 1))
