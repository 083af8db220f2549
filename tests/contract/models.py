"""Tiny models of many families: a table of their classes and of the sizes that they name otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache as once
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

from llmcache import LLMCache
from tests.tiny_models import PAD, VOCABULARY, build, padded, tokenizer, tokens

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Endings of class names, by kind of head.
KINDS = {
    "bare": "Model",
    "classifier": "ForSequenceClassification",
    "token": "ForTokenClassification",
    "span": "ForQuestionAnswering",
    "masked": "ForMaskedLM",
    "choice": "ForMultipleChoice",
    "sentence": "ForNextSentencePrediction",
    "causal": "ForCausalLM",
    "seq2seq": "ForConditionalGeneration",
}
_CAUSAL = ("bare", "causal", "classifier")
_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
_GROUPED = {"num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 8}
_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": PAD}

#: By family: prefix of its class names, its kinds, and sizes that it needs besides or names otherwise.
FAMILIES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "bert": ("Bert", ("bare", "classifier", "token", "span", "masked", "choice", "sentence"), {}),
    "roberta": ("Roberta", ("bare", "classifier", "masked"), {}),
    "xlm-roberta": ("XLMRoberta", ("bare", "classifier"), {}),
    "camembert": ("Camembert", ("bare", "span"), {}),
    "distilbert": ("DistilBert", ("bare", "classifier", "choice", "span"), {"hidden_dim": 48}),
    "electra": ("Electra", ("bare", "classifier", "choice", "token"), {"embedding_size": 24}),
    "albert": ("Albert", ("bare", "classifier"), {"embedding_size": 24}),
    "mpnet": ("MPNet", ("bare", "classifier", "token"), {}),
    "deberta": ("Deberta", ("bare", "classifier", "span"), _DEBERTA),
    "deberta-v2": ("DebertaV2", ("bare", "classifier", "choice", "token"), _DEBERTA),
    "modernbert": ("ModernBert", ("bare", "classifier", "masked"), {"cls_token_id": 3, "local_attention": 4}),
    "convbert": ("ConvBert", ("bare", "classifier", "choice"), {"embedding_size": 32}),
    "megatron": ("MegatronBert", ("bare", "sentence"), {}),
    "squeezebert": ("SqueezeBert", ("bare", "classifier"), {"embedding_size": 32}),
    "rembert": ("RemBert", ("bare", "classifier", "masked"), {"input_embedding_size": 24, "output_embedding_size": 24}),
    "gpt2": ("GPT2", (*_CAUSAL, "token"), {}),
    "neox": ("GPTNeoX", _CAUSAL, {}),
    "bloom": ("Bloom", _CAUSAL, {}),
    "falcon": ("Falcon", _CAUSAL, {}),
    "opt": ("OPT", _CAUSAL, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("Phi", _CAUSAL, {}),
    "llama": ("Llama", (*_CAUSAL, "span"), _GROUPED),
    "mistral": ("Mistral", _CAUSAL, {**_GROUPED, "sliding_window": 4}),
    "mixtral": ("Mixtral", ("bare", "causal"), {**_GROUPED, "num_local_experts": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", _CAUSAL, _GROUPED),
    "qwen3": ("Qwen3", _CAUSAL, _GEMMA),
    "gemma2": ("Gemma2", _CAUSAL, {**_GEMMA, "sliding_window": 4}),
    "gemma3": ("Gemma3", ("causal",), {**_GEMMA, "sliding_window": 4}),
    "t5": ("T5", ("bare", "seq2seq", "classifier"), _T5),
    "bart": ("Bart", ("bare", "seq2seq", "classifier"), _SEQ2SEQ),
    "mbart": ("MBart", ("bare", "seq2seq"), _SEQ2SEQ),
    "marian": ("Marian", ("bare", "seq2seq"), _SEQ2SEQ),
}
#: Class names other than prefix and ending.
_NAMES = {"GPT2ForCausalLM": "GPT2LMHeadModel", "MarianForConditionalGeneration": "MarianMTModel"}


@once
def plain(family: str, kind: str) -> Any:
    """Return the plain model; tests share it and leave it as it is."""
    prefix, _, more = FAMILIES[family]
    config = getattr(tf, f"{prefix}Config" if family != "gemma3" else "Gemma3TextConfig")
    name = prefix + KINDS[kind]
    return build(lambda: getattr(tf, _NAMES.get(name, name))(config(**SIZES | more)))


def fresh(family: str, kind: str) -> Any:
    """Return a copy of the plain model, to wrap."""
    return deepcopy(plain(family, kind))


_to_wrap = once(fresh)  # unwrapped after each use


def sentence_model(folder: Path, *after: nn.Module, bert: Any = None, prompts: Any = None, **pooling: Any) -> Any:
    """Save a BERT and a tokenizer to a folder; return a model of sentence-transformers that pools its states."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    (bert or plain("bert", "bare")).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    parts = [modules.Transformer(str(folder)), modules.Pooling(32, **pooling), *after]
    return SentenceTransformer(modules=parts, device="cpu", prompts=prompts).eval()


@contextmanager
def wrapped(family: str, kind: str = "causal") -> Iterator[LLMCache]:
    """Within: the cache of a copy of the plain model. Nothing in the cache may fail."""
    with LLMCache.wrap(_to_wrap(family, kind), auto_bypass=False) as cache:
        yield cache
        assert cache.stats().errors == 0


def rows(inputs: dict[str, Any], *numbers: int) -> dict[str, Any]:
    """Return the call with these rows only, in this order."""
    return {name: value[[*numbers]] if isinstance(value, Tensor) else value for name, value in inputs.items()}


def inputs_of(family: str, kind: str, layout: str = "right", labels: bool = False) -> dict[str, Any]:
    """Return a call of three rows, or of two with two choices each.

    Args:
        family: Key of `FAMILIES`.
        kind: Kind of head.
        layout: `right` or `left`: side of the padding; `none`: no mask; `holes`: a mask with holes.
        labels: Whether to ask for a loss.
    """
    config = plain(family, kind).config
    inputs = padded([7, 4, 6], left=layout == "left") if layout != "none" else {"input_ids": tokens(3, 6)}
    if layout == "holes":
        inputs = {"input_ids": tokens(3, 7), "attention_mask": torch.ones(3, 7, dtype=torch.int64)}
        inputs["attention_mask"][[0, 0, 2], [2, 3, 5]] = 0
    ids = inputs["input_ids"]
    if kind == "classifier" and config.is_encoder_decoder:  # its head reads the state of the last end-of-text token
        last = ids.shape[1] - 1 if layout == "left" else inputs.get("attention_mask", ids).ne(0).sum(1) - 1
        ids[torch.arange(3), last] = config.eos_token_id
    if kind == "choice":
        inputs = {name: value[:2, None].repeat(1, 2, 1) for name, value in inputs.items()}
        inputs["input_ids"][:, 1, 0] += 1
    if kind in ("bare", "seq2seq") and config.is_encoder_decoder and not labels:
        inputs["decoder_input_ids"] = tokens(3, 5, seed=9)
    if labels:
        inputs |= _labels(kind, inputs)
    return inputs


def _labels(kind: str, inputs: dict[str, Any]) -> dict[str, Any]:
    if kind == "span":
        return {"start_positions": torch.tensor([1, 0, 2]), "end_positions": torch.tensor([3, 2, 3])}
    if kind in ("classifier", "sentence", "choice"):
        return {"labels": torch.tensor([0, 1, 1])[: len(inputs["input_ids"])]}
    if kind == "seq2seq":
        return {"labels": tokens(3, 5, seed=9)}
    return {"labels": inputs["input_ids"] % 2 if kind == "token" else inputs["input_ids"].clone()}
