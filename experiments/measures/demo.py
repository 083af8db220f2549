"""The demo: three jobs that repeat themselves, on small real models, with settings fixed in advance.

desk      a support desk's requests with all-MiniLM-L6-v2 and a linear head, by every way of `LLMCache.advise`
corpus    texts that sentence-transformers embeds a second time, as a nightly job does
prompts   questions behind one system prompt: the time to the first token, from token ids, storing included
"""

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from experiments.data.labelled import made_requests
from experiments.measures.second_pass import embed_twice
from experiments.methods.cached import configure
from experiments.models.heads import fit_logistic
from experiments.models.loading import Loaded
from experiments.support.progress import tracked
from experiments.tasks.stream import Stream
from llmcache import Advice, LLMCache
from llmcache.generation import Generation, PromptCache, Sampling, generate

N_FIT = 600  # requests that the head is fitted on
MAX_LENGTH = 128
BATCH = 32  # of `encode`, its default
MAX_NEW_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Size:
    n: int  # requests of the desk; half of them, or as many as the bound needs, are learned from
    seconds: float  # of the model alone, see `LLMCache.advise`
    max_drops: tuple[float, ...]
    n_texts: int  # of the corpus


#: Of a minute on two cores, and of a long demo.
SHORT, LONG = Size(2000, 3.0, (0.01, 0.02), 1000), Size(5400, 30.0, (0.005, 0.01, 0.02), 5000)


def desk(loaded: Loaded, size: Size, on_way: Callable[[Advice], object], seed: int = 0) -> Advice:
    """Answer the desk's requests by every way; `on_way` gets what is known after each."""
    data = made_requests(N_FIT + size.n, seed)
    random.Random(seed).shuffle(data)
    stream = data[N_FIT:]
    classifier = fit_logistic(loaded, "mean", data[:N_FIT], stream, MAX_LENGTH)
    workload = Stream(classifier, stream, MAX_LENGTH, payload="mean")
    settings = {"answer": "class", "auto_bypass": True}
    with LLMCache.wrap(
        workload.module, config=configure(workload, settings, audits_in_background=True), tokenizer=workload.tokenizer
    ) as cache:
        requests = [request.inputs for request in workload.requests]
        drops = size.max_drops
        return cache.advise(requests, max_drop=drops[0], max_drops=drops, seconds=size.seconds, on_way=on_way)


def corpus(path: Path, size: Size, seed: int = 0) -> dict[str, Any]:
    """Embed distinct texts twice; `speedup` is that of the second time."""
    from sentence_transformers import SentenceTransformer

    texts = list(dict.fromkeys(one.text for one in made_requests(4 * size.n_texts, seed)))[: size.n_texts]
    model = SentenceTransformer(str(path), device="cpu", local_files_only=True)
    took = embed_twice(model, texts, texts, BATCH, shows_progress=sys.stderr.isatty())
    return {"n": len(texts), **took, "speedup": took["plain_s"] / took["second_s"]}


_TEXTS: Mapping[str, list[str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
SYSTEM, QUESTIONS = "\n".join(_TEXTS["system"]), tuple(_TEXTS["questions"])


def untrained(tokenizer: Any) -> Loaded:
    """Return a decoder with the shape of GPT-2 and random weights: times do not depend on them, its words do."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return Loaded(GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer))).eval(), tokenizer)


def prompts(loaded: Loaded) -> dict[str, Any]:
    """Put every question to the model, without and with the cache; `speedup` covers the users after the first."""
    encoder = PromptCache(loaded.tokenizer)
    has_template = bool(getattr(loaded.tokenizer, "chat_template", None))
    asked = [
        torch.tensor([encoder.encode(_chat(one) if has_template else f"{SYSTEM}\n{one}").ids]) for one in QUESTIONS
    ]
    generate(loaded.model, asked[0][:, :16], Sampling(max_new_tokens=2))  # the first call allocates memory
    before = _answers(loaded, asked, "without the cache")
    with LLMCache.wrap(loaded.model, tokenizer=loaded.tokenizer):
        cached = _answers(loaded, asked, "with it")
    plain = list(zip(before, _answers(loaded, asked, "without it again"), strict=True))
    users = [
        {
            "question": question,
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


def _chat(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def _answers(loaded: Loaded, asked: list[Tensor], what: str) -> list[Generation]:
    return [generate(loaded.model, ids, Sampling(max_new_tokens=MAX_NEW_TOKENS)) for ids in tracked(asked, what)]


def _ttft_ms(generation: Generation) -> float:
    assert generation.times is not None
    return generation.times.ttft_s * 1e3
