"""`generate()` on a wrapped model gives the plain model's tokens, in all of its modes."""

from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from llmcache import LLMCache
from llmcache.generation import Chat, Sampling, decode_step, generate, prefill, stream
from tests.contract.judge import ask, check_same, uncomputed
from tests.contract.models import fresh, plain, wrapped
from tests.tiny_models import batch, padded, tokenizer, tokens

DECODERS = ("gpt2", "llama")
ENCODER_DECODERS = ("t5", "bart")
SLIDING = ("mistral", "gemma3")
OTHERS = ("mixtral", "opt", "marian")
LEFT = padded([9, 5], left=True)
N_NEW = 5


class Sevens(tf.LogitsProcessor):
    """Favours tokens divisible by seven."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 2.0 * (torch.arange(scores.shape[-1]) % 7 == 0)


class Short(tf.StoppingCriteria):
    """Ends each row at an even token."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -1] % 2 == 0


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.5},
    "nucleus": {"do_sample": True, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams, several answers": {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True},
    "beam sampling": {"num_beams": 2, "do_sample": True, "length_penalty": 0.5},
    "static cache": {"cache_implementation": "static"},
    "static cache, beams": {"cache_implementation": "static", "num_beams": 2},
    "no cache": {"use_cache": False},
    "no cache, beams": {"use_cache": False, "num_beams": 2},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[9], [5, 6]]},
    "logits processor": {"logits_processor": [Sevens()]},
    "stopping criteria": {"stopping_criteria": [Short()]},
    "several ends of text": {"eos_token_id": [2, *range(20, 60)]},
    "least length": {"min_new_tokens": 4, "eos_token_id": [2, *range(20, 60)]},
    # Of decoders only: their prompts are not served, but for the last.
    "chunked prefill": {"prefill_chunk_size": 4},
    "embeddings": {"embeddings": True},
    "guidance": {"guidance_scale": 1.5},
}


def write(model: Any, inputs: Any, **how: Any) -> Any:
    """Generate with the same random numbers each time."""
    torch.manual_seed(3)
    if how.pop("embeddings", False):
        inputs = {**inputs, "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
        del inputs["input_ids"]
    return model.generate(**{"do_sample": False, "max_new_tokens": N_NEW, "pad_token_id": 0, **inputs, **how})


def kind_of(family: str) -> str:
    return "seq2seq" if family in (*ENCODER_DECODERS, "marian") else "causal"


def check_tokens(family: str, inputs: Any = LEFT, is_served: bool = True, **how: Any) -> None:
    """Generate cold and warm; compare all that is returned with the plain model's."""
    model = plain(family, kind_of(family))
    expected, padding = write(model, inputs, **how), uncomputed(model, inputs)
    with wrapped(family, kind_of(family)) as cache:
        for turn in ("cold", "warm"):
            before = cache.stats().n_hits
            check_same(write(cache.model, inputs, **how), expected, where=turn, padding=padding)
        assert not is_served or cache.stats().n_hits > before


@pytest.mark.parametrize(
    ("way", "family"),
    [(way, DECODERS[number % 2]) for number, way in enumerate(WAYS)]
    + [(way, ENCODER_DECODERS[number // 4 % 2]) for number, way in enumerate([*WAYS][:-3]) if number % 4 == 1],
)
def test_every_way_of_decoding(family: str, way: str) -> None:
    """docs/generation.md: transformers' own `generate()` works on a wrapped model, and repeats serve its prefill."""
    check_tokens(family, **WAYS[way], is_served=way not in ("chunked prefill", "embeddings"))


RETURNED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.mark.parametrize(
    ("family", "inputs", "how"),
    [
        *((family, LEFT, {"num_beams": 2}) for family in (*SLIDING, *OTHERS)),
        *((family, padded([9, 5]), {}) for family in ("gpt2", "t5")),
        ("gpt2", {"input_ids": tokens(2, 6)}, {}),
        ("gpt2", LEFT, RETURNED | WAYS["beams"]),
        ("llama", LEFT, RETURNED | WAYS["static cache"]),
        ("bart", LEFT, RETURNED | WAYS["sampling"]),
    ],
)
def test_families_batches_and_all_that_is_returned(family: str, inputs: Any, how: Any) -> None:
    """docs/generation.md: tokens, scores, logits and K/V are the plain model's, for any K/V cache and padding."""
    check_tokens(family, inputs, is_served=family not in SLIDING, **how)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_states_and_attentions_of_every_layer(family: str) -> None:
    """inside/reuse.md: states that entries do not hold are computed, after a hit as before."""
    how = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
    expected = write(plain(family, kind_of(family)), LEFT, **how)
    with wrapped(family, kind_of(family)) as cache:
        for more in ({}, how, {}, how):
            found = write(cache.model, LEFT, **more)
            check_same(found, expected if more else expected.sequences)
        assert cache.stats().n_hits


# -- drafts ------------------------------------------------------------------------------------------------------------

KNOWN = tokens(1, 24)
GOES_ON = torch.cat([KNOWN[:, :20], tokens(1, 4, seed=9)], dim=1)
#: By name: arguments, and which of model and assistant are wrapped.
DRAFTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another model": ({}, ("assistant",)),
    "another model, sampling": ({"do_sample": True, "temperature": 2.0}, ("model", "assistant")),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, ("model",)),
    "early exit": ({"assistant_early_exit": 1}, ("model",)),
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts(draft: str) -> None:
    """docs/generation.md: tokens are the plain model's if another model, early layers or the prompt propose drafts."""
    how, on = DRAFTS[draft]
    copies = {"model": fresh("llama", "causal"), "assistant": fresh("gpt2", "causal")}

    def draw(ids: Tensor, model: Any, assistant: Any) -> Any:
        more = {"assistant_model": assistant} if draft.startswith("another") else {}
        return write(model, {"input_ids": ids}, **how, **more).tolist()

    with ExitStack() as until_the_end:
        caches = [until_the_end.enter_context(LLMCache.wrap(copies[name], auto_bypass=False)) for name in on]
        for ids in (KNOWN, GOES_ON, KNOWN):
            assert draw(ids, **copies) == draw(ids, plain("llama", "causal"), plain("gpt2", "causal"))
        assert all(cache.stats().n_hits >= 1 and cache.stats().errors == 0 for cache in caches)


# -- conversations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kv"), [("llama", "none"), ("llama", "handed back"), ("qwen3", "static"), ("mistral", "handed back")]
)
def test_a_conversation(family: str, kv: str) -> None:
    """docs/prefix.md: each turn's prompt begins with the previous turn, and K/V may be passed back in."""

    def talk(model: Any) -> list[Any]:
        ids, told = tokens(1, 20), []
        more: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
        if kv == "static":
            more["past_key_values"] = tf.StaticCache(config=model.config, max_cache_len=64)
        for turn in range(3):
            made = write(model, {"input_ids": ids}, **more)
            told.append((made.sequences, made.logits))
            ids = torch.cat([made.sequences, tokens(1, 4, seed=turn)], dim=1)
            if kv == "handed back":
                more["past_key_values"] = made.past_key_values
        return told

    expected = talk(plain(family, "causal"))
    with wrapped(family) as cache:
        for _ in range(2):
            check_same(talk(cache.model), expected)
        if family not in SLIDING:
            assert cache.stats().n_hits >= (5 if kv == "none" else 1)


# -- llmcache.generation -----------------------------------------------------------------------------------------------

SAMPLINGS: dict[str, tuple[Sampling, dict[str, Any]]] = {
    "greedy": (Sampling(max_new_tokens=6, stop_ids=()), {}),
    "sampled": (
        Sampling(do_sample=True, temperature=1.5, top_k=30, top_p=0.95, seed=3, max_new_tokens=6, stop_ids=()),
        {"do_sample": True, "temperature": 1.5, "top_k": 30, "top_p": 0.95},
    ),
    "penalised": (Sampling(repetition_penalty=1.7, max_new_tokens=6, stop_ids=()), {"repetition_penalty": 1.7}),
    "stopped": (Sampling(max_new_tokens=6, stop_ids=tuple(range(30, 70))), {"eos_token_id": [*range(30, 70)]}),
}


@pytest.mark.parametrize(
    ("family", "kind", "way"),
    [("gpt2", "dynamic", way) for way in SAMPLINGS]
    + [("llama", "static", "sampled"), ("llama", "static", "stopped"), ("mistral", "sliding", "greedy")],
)
def test_tokens_are_those_of_generate(family: str, kind: Any, way: str) -> None:
    """docs/generation.md: `llmcache.generation` gives the tokens of `generate()` with the same options and seed."""
    sampling, how = SAMPLINGS[way]
    how = {"eos_token_id": None, **how, "max_new_tokens": sampling.max_new_tokens}
    with wrapped(family) as cache:
        for ids in (KNOWN, GOES_ON, KNOWN):
            expected = write(plain(family, "causal"), {"input_ids": ids}, **how)[0, ids.shape[1] :].tolist()
            got = generate(cache.model, ids, sampling, cache=kind)
            assert (list(got.tokens), got.n_prompt) == (expected, ids.shape[1])
            assert got.stopped_by == ("stop" if expected[-1] in sampling.stop_ids else "length")
        if kind != "sliding":
            assert (got.rung, cache.stats().hits["prefix"]) == ("exact", 1)


def test_streams_of_several_readers_do_not_mix() -> None:
    """docs/generation.md: a stream's K/V is its own, so streams may interleave, be closed or be abandoned."""
    model, sampling = plain("llama", "causal"), SAMPLINGS["sampled"][0]
    prompts = [KNOWN, GOES_ON, tokens(1, 6)]
    alone = [generate(model, ids, sampling) for ids in prompts]
    with wrapped("llama") as cache:
        for _ in range(2):
            left = stream(cache.model, KNOWN, sampling)
            assert next(left).id == alone[0].tokens[0]
            left.close()
            answers = [stream(cache.model, ids, sampling) for ids in prompts]
            for _ in range(sampling.max_new_tokens):
                assert all(next(answer) for answer in answers)
            for answer, own in zip(answers, alone, strict=True):
                assert answer.generation().tokens == own.tokens
                assert answer.generation().logprobs == pytest.approx(own.logprobs, abs=1e-5)
        assert cache.stats().n_hits >= 4


@pytest.mark.parametrize(("family", "left"), [("gpt2", True), ("llama", False)])
def test_prefill_and_decode_steps_of_a_padded_batch(family: str, left: bool) -> None:
    """docs/generation.md: `prefill` and `decode_step` take padded batches, and rows come out as alone."""
    prompts, new = [tokens(1, 20), tokens(1, 7, seed=1), tokens(1, 13, seed=2)], tokens(3, 2, seed=4)
    model = plain(family, "causal")
    ids, mask = batch(prompts, left).values()
    with wrapped(family) as cache:
        for _ in range(2):
            logits, kv = prefill(cache.model, ids, attention_mask=mask)
            steps, seen = [logits], mask
            for column in new.T:
                seen = torch.cat([seen, torch.ones(3, 1, dtype=seen.dtype)], dim=1)
                steps.append(decode_step(cache.model, column, kv, seen))
            for row, prompt in enumerate(prompts):
                whole = ask(model, input_ids=torch.cat([prompt, new[row : row + 1]], dim=1)).logits[:, -3:]
                check_same(torch.stack(steps, dim=1)[row : row + 1].clone(), whole)
        assert cache.stats().n_hits == 3


def test_a_chat_keeps_its_conversation() -> None:
    """docs/generation.md: each turn's prompt begins with an earlier prompt, which the prefix rung serves."""
    spoken: list[Any] = []
    system = " ".join(f"w{number}" for number in range(18))
    for model in (plain("llama", "causal"), fresh("llama", "causal")):
        chat = Chat(model, tokenizer(), Sampling(max_new_tokens=2, stop_ids=()), system=system)
        with LLMCache.wrap(model) if spoken else nullcontext():
            spoken.append([("".join(chat.ask(text)), chat.turn().generation) for text in ("w5 w6", "w7")])
    for (text, made), (own_text, own) in zip(*spoken, strict=True):
        assert (text, made.tokens) == (own_text, own.tokens)
    assert [made.n_prefix >= 16 for _, made in spoken[1]] == [False, True]
