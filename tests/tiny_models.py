"""Tiny models of every supported family, built from configs with seeded weights. No network, no files."""

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

VOCABULARY = 96
PAD = 0
#: What trunks call the K/V cache: `cache` since transformers 5.24. Not the library's, which is imported later, traced.
CACHE = fields(BaseModelOutputWithPast)[1].name

#: Sizes under the most common setting names, and ids of special tokens.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_SPECIAL: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
#: Sizes of a decoder with two K/V heads.
DECODER: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "pad_token_id": PAD}
_COMMON: dict[str, Any] = {**_SIZES, **_SPECIAL, "num_hidden_layers": 3}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 4,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    **_SPECIAL,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 2,
}
_STRANGE_SEQ2SEQ: dict[str, Any] = {**_SEQ2SEQ, "encoder_layers": 3, "decoder_start_token_id": PAD}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 4,
    "num_heads": 4,
    "decoder_start_token_id": PAD,
    "pad_token_id": PAD,
    "eos_token_id": 1,
}
_QWEN3: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2, "head_dim": 8}

#: By family: prefix of its class names, and settings of its config.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _SIZES),
    "roberta": ("Roberta", {**_SIZES, **_SPECIAL}),
    "distilbert": ("DistilBert", {**_SIZES, "hidden_dim": 48}),
    "electra": ("Electra", {**_SIZES, "embedding_size": 24}),
    "gpt2": ("GPT2", {**_SIZES, **_SPECIAL}),
    "llama": ("Llama", {**_SIZES, **_SPECIAL, "num_key_value_heads": 2}),
    "t5": ("T5", _T5),
    "bart": ("Bart", _SEQ2SEQ),
    "mpnet": ("MPNet", {**_SIZES, "pad_token_id": PAD}),
    "deberta": (
        "DebertaV2",
        {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    ),
}

Make = Callable[[], nn.Module]


def _maker(prefix: str, kind: str, settings: dict[str, Any]) -> Make:
    """Return a function that builds, say, a `BertModel` from a `BertConfig` with these settings."""
    return lambda: getattr(tf, prefix + kind)(getattr(tf, f"{prefix}Config")(**settings))


def _of(family: str, kind: str, **more: Any) -> Make:
    prefix, settings = _FAMILIES[family]
    return _maker(prefix, kind, {**settings, **more})


def llama(**changes: Any) -> tf.LlamaConfig:
    """Return a tiny Llama's config with some settings changed."""
    return tf.LlamaConfig(**{**_FAMILIES["llama"][1], **changes})


# Bare models; each test builds its own.
BARE: dict[str, Make] = {
    **{family: _of(family, "Model") for family in _FAMILIES},
    "t5": _of("t5", "EncoderModel"),
    "bart": lambda: tf.BartModel(tf.BartConfig(**_SEQ2SEQ)).encoder,
}

CLASSIFIERS: dict[str, Make] = {
    **{family: _of(family, "ForSequenceClassification") for family in _FAMILIES if family not in ("mpnet", "deberta")},
    "bert": _of("bert", "ForSequenceClassification", num_labels=5),
}

GENERATORS: dict[str, Make] = {
    "gpt2": _of("gpt2", "LMHeadModel"),
    "llama": _of("llama", "ForCausalLM"),
    "t5": _of("t5", "ForConditionalGeneration"),
    "bart": _of("bart", "ForConditionalGeneration"),
}

# Families without an adapter; and Mistral, whose K/V covers only a sliding window.
STRANGERS: dict[str, Make] = {
    "qwen3": _maker("Qwen3", "Model", _QWEN3),
    "modernbert": _maker(
        "ModernBert",
        "Model",
        {**_COMMON, "cls_token_id": 3, "sep_token_id": 4, "local_attention": 4, "global_attn_every_n_layers": 2},
    ),
    "megatron": _maker("MegatronBert", "Model", _COMMON),
    "convbert": _maker("ConvBert", "Model", {**_COMMON, "embedding_size": 32}),
    "squeezebert": _maker("SqueezeBert", "Model", {**_COMMON, "embedding_size": 32}),
}

STRANGE_GENERATORS: dict[str, Make] = {
    "neox": _maker("GPTNeoX", "ForCausalLM", _COMMON),
    "falcon": _maker("Falcon", "ForCausalLM", _COMMON),
    "gpt_bigcode": _maker("GPTBigCode", "ForCausalLM", _COMMON),
    "qwen3": _maker("Qwen3", "ForCausalLM", _QWEN3),
    "mistral": _maker("Mistral", "ForCausalLM", {**_COMMON, "num_key_value_heads": 2, "sliding_window": 4}),
    "marian": _maker("Marian", "MTModel", _STRANGE_SEQ2SEQ),
    "mbart": _maker("MBart", "ForConditionalGeneration", _STRANGE_SEQ2SEQ),
}

TOKEN_HEADS: dict[str, Make] = {
    "span": _of("bert", "ForQuestionAnswering"),
    "token": _of("bert", "ForTokenClassification"),
    "masked": _of("bert", "ForMaskedLM"),
    "causal": GENERATORS["gpt2"],
    "seq2seq": GENERATORS["t5"],
}


def kv_named(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Give the argument `kv_cache` of a trunk's forward the name `CACHE`."""

    @wraps(forward)
    def named(self: object, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **({"kv_cache": kwargs.pop(CACHE)} if CACHE in kwargs else {}), **kwargs)

    own = signature(forward)
    renamed = [one.replace(name=CACHE) if name == "kv_cache" else one for name, one in own.parameters.items()]
    named.__signature__ = own.replace(parameters=renamed)  # type: ignore[attr-defined]
    return named


def build(make: Make, seed: int = 0) -> nn.Module:
    """Build a seeded model in eval mode; its large weights give clearly different outputs for different inputs."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model


def tokens(n_rows: int, length: int, seed: int = 0) -> Tensor:
    """Random content tokens (n_rows, length), int64, without special ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (n_rows, length), generator=generator)


def batch(prompts: list[Tensor], left: bool = False) -> dict[str, Tensor]:
    """Prompts (1, n) of different lengths, padded to the longest."""
    width = max(prompt.shape[1] for prompt in prompts)
    ids = torch.full((len(prompts), width), PAD)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        length = prompt.shape[1]
        where = slice(width - length, width) if left else slice(0, length)
        ids[row, where], mask[row, where] = prompt[0], 1
    return {"input_ids": ids, "attention_mask": mask}


def padded(lengths: list[int], seed: int = 0, left: bool = False) -> dict[str, Tensor]:
    """Rows of random tokens of different lengths, padded to the longest."""
    return batch([tokens(1, length, seed + row) for row, length in enumerate(lengths)], left)


def states(output: object) -> Tensor:
    """Return a model's logits, or else its last hidden states."""
    logits = getattr(output, "logits", None)
    return logits if logits is not None else output.last_hidden_state  # type: ignore[attr-defined]


def tokenizer(side: str = "right", words: list[str] | None = None) -> tf.PreTrainedTokenizerFast:
    """Return a word tokenizer with BERT's special tokens; by default w0, w1, ... fill its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    room = VOCABULARY - len(special)
    words = [f"w{i}" for i in range(room)] if words is None else words
    assert len(words) <= room, "more words than the tiny models know"
    ids = {word: i for i, word in enumerate([*special, *words])}
    backend = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    return tf.PreTrainedTokenizerFast(tokenizer_object=backend, padding_side=side, model_max_length=32, **names)


def save_bert(folder: Path, text: str, n_layers: int = 2) -> Path:
    """Save a tiny bare BERT with random weights, and a tokenizer of the words of a text: lower case, no accents."""
    cleaned = tf.BertTokenizer(vocab={"[UNK]": 0}).backend_tokenizer
    plain = cleaned.normalizer.normalize_str(text)
    found = (word for word, _ in cleaned.pre_tokenizer.pre_tokenize_str(plain))
    words = dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *found])
    config = tf.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=n_layers,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=512,
    )
    build(lambda: tf.BertModel(config)).save_pretrained(folder)
    tf.BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
    return folder
