"""Tiny models of every supported family, built from configs with seeded weights. No network, no files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

VOCABULARY = 96
PAD = 0


#: Sizes by the names that most families give them; and the ids of special tokens.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_SPECIAL: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
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
}


def _bert(**more: object) -> tf.BertConfig:
    return tf.BertConfig(**_SIZES, **more)


def _roberta() -> tf.RobertaConfig:
    return tf.RobertaConfig(**_SIZES, **_SPECIAL)


def _distilbert() -> tf.DistilBertConfig:
    return tf.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, n_layers=4, n_heads=4, hidden_dim=48, max_position_embeddings=64
    )


def _electra() -> tf.ElectraConfig:
    return tf.ElectraConfig(**_SIZES, embedding_size=24)


def _gpt2() -> tf.GPT2Config:
    return tf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=64, **_SPECIAL)


def llama(**changes: Any) -> tf.LlamaConfig:
    """A tiny Llama's settings, some of them changed."""
    return tf.LlamaConfig(**{**_SIZES, **_SPECIAL, "num_key_value_heads": 2, **changes})


def _t5() -> tf.T5Config:
    return tf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=4,
        num_heads=4,
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        eos_token_id=1,
    )


def _bart() -> tf.BartConfig:
    return tf.BartConfig(**_SEQ2SEQ, decoder_start_token_id=2)


def _mpnet() -> tf.MPNetConfig:
    return tf.MPNetConfig(**_SIZES, pad_token_id=PAD)


def _deberta() -> tf.DebertaV2Config:
    return tf.DebertaV2Config(**_SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8)


# Bare models; the value is built anew for each test.
BARE: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: tf.BertModel(_bert()),
    "roberta": lambda: tf.RobertaModel(_roberta()),
    "distilbert": lambda: tf.DistilBertModel(_distilbert()),
    "electra": lambda: tf.ElectraModel(_electra()),
    "gpt2": lambda: tf.GPT2Model(_gpt2()),
    "llama": lambda: tf.LlamaModel(llama()),
    "t5": lambda: tf.T5EncoderModel(_t5()),
    "bart": lambda: tf.BartModel(_bart()).encoder,
    "mpnet": lambda: tf.MPNetModel(_mpnet()),
    "deberta": lambda: tf.DebertaV2Model(_deberta()),
}

CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: tf.BertForSequenceClassification(_bert(num_labels=5)),
    "roberta": lambda: tf.RobertaForSequenceClassification(_roberta()),
    "distilbert": lambda: tf.DistilBertForSequenceClassification(_distilbert()),
    "electra": lambda: tf.ElectraForSequenceClassification(_electra()),
    "gpt2": lambda: tf.GPT2ForSequenceClassification(_gpt2()),
    "llama": lambda: tf.LlamaForSequenceClassification(llama()),
    "t5": lambda: tf.T5ForSequenceClassification(_t5()),
    "bart": lambda: tf.BartForSequenceClassification(_bart()),
}

GENERATORS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: tf.GPT2LMHeadModel(_gpt2()),
    "llama": lambda: tf.LlamaForCausalLM(llama()),
    "t5": lambda: tf.T5ForConditionalGeneration(_t5()),
    "bart": lambda: tf.BartForConditionalGeneration(_bart()),
}

_COMMON: dict[str, Any] = {**_SIZES, **_SPECIAL, "num_hidden_layers": 3}
_STRANGE_SEQ2SEQ: dict[str, Any] = {**_SEQ2SEQ, "encoder_layers": 3, "decoder_start_token_id": PAD}

# Families that no adapter names, and one that keeps a window of K/V only.
STRANGERS: dict[str, Callable[[], nn.Module]] = {
    "qwen3": lambda: tf.Qwen3Model(tf.Qwen3Config(**_COMMON, num_key_value_heads=2, head_dim=8)),
    "modernbert": lambda: tf.ModernBertModel(
        tf.ModernBertConfig(**_COMMON, cls_token_id=3, sep_token_id=4, local_attention=4, global_attn_every_n_layers=2)
    ),
    "megatron": lambda: tf.MegatronBertModel(tf.MegatronBertConfig(**_COMMON)),
    "convbert": lambda: tf.ConvBertModel(tf.ConvBertConfig(**_COMMON, embedding_size=32)),
    "squeezebert": lambda: tf.SqueezeBertModel(tf.SqueezeBertConfig(**_COMMON, embedding_size=32)),
}

STRANGE_GENERATORS: dict[str, Callable[[], nn.Module]] = {
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_COMMON)),
    "falcon": lambda: tf.FalconForCausalLM(
        tf.FalconConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, pad_token_id=PAD
        )
    ),
    "gpt_bigcode": lambda: tf.GPTBigCodeForCausalLM(
        tf.GPTBigCodeConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    ),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_COMMON, num_key_value_heads=2, head_dim=8)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_COMMON, num_key_value_heads=2, sliding_window=4)),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**_STRANGE_SEQ2SEQ)),
    "mbart": lambda: tf.MBartForConditionalGeneration(tf.MBartConfig(**_STRANGE_SEQ2SEQ)),
}

TOKEN_HEADS: dict[str, Callable[[], nn.Module]] = {
    "span": lambda: tf.BertForQuestionAnswering(_bert()),
    "token": lambda: tf.BertForTokenClassification(_bert()),
    "masked": lambda: tf.BertForMaskedLM(_bert()),
    "causal": lambda: tf.GPT2LMHeadModel(_gpt2()),
    "seq2seq": lambda: tf.T5ForConditionalGeneration(_t5()),
}


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A seeded model in eval mode, its weights large enough that different inputs give clearly different outputs."""
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


class _ByPlace(nn.Module):
    """Stands for kernels whose last bits hang on the row's place in a batch."""

    def forward(self, x: Tensor) -> Tensor:
        places: Tensor = torch.arange(len(x), dtype=x.dtype)[:, None, None]
        return x + 1e-5 * places


def rounding(family: str) -> Any:
    """A bare BERT, or a GPT-2 that generates, of which no two rows of a batch come out alike."""
    model: Any = build((BARE if family == "bert" else GENERATORS)[family])
    if family == "bert":
        model.encoder.layer[1].output.dropout = _ByPlace()
    else:
        model.transformer.h[0].mlp.dropout = _ByPlace()
    return model.eval()


def states(output: object) -> Tensor:
    """Whatever a model answers with: logits, or the last hidden states."""
    logits = getattr(output, "logits", None)
    return logits if logits is not None else output.last_hidden_state  # type: ignore[attr-defined]


def tokenizer(side: str = "right", words: list[str] | None = None) -> tf.PreTrainedTokenizerFast:
    """A tokenizer of some words, by default w0, w1, ... as many as there is room for, that frames texts BERT's way."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    room = VOCABULARY - len(special)
    words = [f"w{i}" for i in range(room)] if words is None else words
    assert len(words) <= room, "more words than the tiny models know"
    ids = {word: i for i, word in enumerate([*special, *words])}
    backend = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
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
