"""The second act of the demo: a decoder, users with one system prompt, and the time to each user's first token.

Whole passes over the users: the model alone, the model with `wrap`'s default cache, the model alone. Time to first
token runs from the prompt's token ids, storing included. Decoding is greedy.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from experiments.models.loading import Loaded
from llmcache import LLMCache
from llmcache.generation import Generation, PromptCache, Sampling, generate

_TEXTS: Mapping[str, list[str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
SYSTEM, QUESTIONS = "\n".join(_TEXTS["system"]), tuple(_TEXTS["questions"])
MAX_NEW_TOKENS = 12


def run_shared_prompt(loaded: Loaded) -> dict[str, Any]:
    """Put every question to the model, without and with the cache; `speedup` covers the users after the first."""
    prompts = PromptCache(loaded.tokenizer)
    system = {"role": "system", "content": SYSTEM}
    chats = [[system, {"role": "user", "content": question}] for question in QUESTIONS]
    asked = [torch.tensor([prompts.encode(chat).ids]) for chat in chats]
    generate(loaded.model, asked[0][:, :16], Sampling(max_new_tokens=2))  # the first call allocates memory
    before = _answers(loaded, asked)
    with LLMCache.wrap(loaded.model, tokenizer=loaded.tokenizer):
        cached = _answers(loaded, asked)
    plain = list(zip(before, _answers(loaded, asked), strict=True))
    users = [
        {
            "question": question,
            "answer": loaded.tokenizer.decode(with_cache.tokens, skip_special_tokens=True).strip(),
            "n_prompt": with_cache.n_prompt,
            "n_prefix": with_cache.n_prefix,
            "plain_ms": sum(map(_ttft_ms, without)) / len(without),
            "cache_ms": _ttft_ms(with_cache),
            "is_same": all(one.tokens == with_cache.tokens for one in without),
        }
        for question, without, with_cache in zip(QUESTIONS, plain, cached, strict=True)
    ]
    later = users[1:]
    return {
        "users": users,
        "speedup": sum(user["plain_ms"] for user in later) / sum(user["cache_ms"] for user in later),
        "n_same": sum(user["is_same"] for user in users),
    }


def _answers(loaded: Loaded, asked: list[Tensor]) -> list[Generation]:
    return [generate(loaded.model, ids, Sampling(max_new_tokens=MAX_NEW_TOKENS)) for ids in asked]


def _ttft_ms(generation: Generation) -> float:
    assert generation.times is not None
    return generation.times.ttft_s * 1e3
