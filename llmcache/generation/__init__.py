"""Generation with a K/V cache: prefill and decode, sampling, streaming, latencies.

from llmcache.generation import Sampling, stream

answer = stream(model, ids, Sampling(max_new_tokens=64))
for token in answer:
    print(token.id, token.logprob)
print(answer.generation().times.ttft_s)

K/V caches and logits processors are transformers' own. On a wrapped model the prefill goes through the cache.
"""

from llmcache.generation.batch import Batch
from llmcache.generation.chat import Answer, Chat, Turn
from llmcache.generation.kv_caches import Kind, held_nbytes, kv_nbytes
from llmcache.generation.latency import QUOTABLE, Latencies, Latency, LatencySummary, Spread
from llmcache.generation.prompt_cache import Prompt, PromptCache
from llmcache.generation.results import Generation, StoppedBy, Token
from llmcache.generation.sampling import Sampling
from llmcache.generation.steps import decode_step, prefill
from llmcache.generation.stream import Stream, generate, stream

__all__ = [
    "QUOTABLE",
    "Answer",
    "Batch",
    "Chat",
    "Generation",
    "Kind",
    "Latencies",
    "Latency",
    "LatencySummary",
    "Prompt",
    "PromptCache",
    "Sampling",
    "Spread",
    "StoppedBy",
    "Stream",
    "Token",
    "Turn",
    "decode_step",
    "generate",
    "held_nbytes",
    "kv_nbytes",
    "prefill",
    "stream",
]
