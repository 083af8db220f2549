"""The second act of the demo: a decoder, users with one system prompt, and the time to each user's first token.

Whole passes over the users: the model alone, the model with `wrap`'s default cache, the model alone. Time to first
token runs from the prompt's token ids, storing included. Decoding is greedy.
"""

from typing import Any

import torch
from torch import Tensor

from experiments.models.loading import Loaded
from llmcache import LLMCache
from llmcache.generation import Generation, PromptCache, Sampling, generate

SYSTEM = """\
You answer for the support desk of an online shop that sells household goods by subscription. Be brief and \
polite: two sentences, no lists. Never promise a refund; say that the desk decides within two working days.
Orders: an order leaves the warehouse one working day after it was paid. It can be changed or cancelled until \
then, in the app under Orders. A parcel takes two to four working days; the tracking link is in the second \
mail. A parcel that did not move for five working days counts as lost, and is sent again at no cost.
Returns: goods can be sent back within thirty days, unused and in their box. The label is in the app under \
Returns. Sale items are exchanged, not refunded. Money goes back the way it came, seven working days after the \
parcel arrived.
Subscriptions: a subscription renews on the first of the month. It can be paused for up to three months, or \
ended, until the twenty-fifth of the month before. The price of a running subscription changes once a year at \
most, in January.
Accounts: nobody at the desk ever asks for a password. A link to set a new one is valid for one hour. Mail \
addresses are changed in the app under Profile; the old address gets a mail, too.
Payment: cards, direct debit and vouchers are accepted, one voucher an order. A card that was declined is \
tried again after a day, twice."""
QUESTIONS = (
    "My parcel has not moved for six days. What happens now?",
    "Can I still cancel the order that I paid for an hour ago?",
    "I forgot my password and the link does not work any more.",
    "How do I pause my subscription over the summer?",
    "My card was declined. Will you try it again?",
)
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
