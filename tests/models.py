"""Tiny models of every supported family, built from configs with seeded weights. No network, no files."""

from collections.abc import Callable

import torch
import transformers as tf
from torch import Tensor, nn

VOCABULARY = 96
PAD = 0


def _bert(**more: object) -> tf.BertConfig:
    return tf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        **more,
    )


def _roberta() -> tf.RobertaConfig:
    return tf.RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
    )


def _distilbert() -> tf.DistilBertConfig:
    return tf.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, n_layers=4, n_heads=4, hidden_dim=48, max_position_embeddings=64
    )


def _electra() -> tf.ElectraConfig:
    return tf.ElectraConfig(
        vocab_size=VOCABULARY,
        embedding_size=24,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
    )


def _gpt2() -> tf.GPT2Config:
    return tf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=PAD,
    )


def _llama() -> tf.LlamaConfig:
    return tf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=PAD,
    )


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
    return tf.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=4,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )


def _mpnet() -> tf.MPNetConfig:
    return tf.MPNetConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        pad_token_id=PAD,
    )


def _deberta() -> tf.DebertaV2Config:
    return tf.DebertaV2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
    )


# Bare models; the value is built anew for each test.
BARE: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: tf.BertModel(_bert()),
    "roberta": lambda: tf.RobertaModel(_roberta()),
    "distilbert": lambda: tf.DistilBertModel(_distilbert()),
    "electra": lambda: tf.ElectraModel(_electra()),
    "gpt2": lambda: tf.GPT2Model(_gpt2()),
    "llama": lambda: tf.LlamaModel(_llama()),
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
    "llama": lambda: tf.LlamaForSequenceClassification(_llama()),
    "t5": lambda: tf.T5ForSequenceClassification(_t5()),
    "bart": lambda: tf.BartForSequenceClassification(_bart()),
}

GENERATORS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: tf.GPT2LMHeadModel(_gpt2()),
    "llama": lambda: tf.LlamaForCausalLM(_llama()),
    "t5": lambda: tf.T5ForConditionalGeneration(_t5()),
    "bart": lambda: tf.BartForConditionalGeneration(_bart()),
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


def padded(lengths: list[int], seed: int = 0, left: bool = False) -> dict[str, Tensor]:
    """Rows of different lengths, padded to the longest."""
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        where = slice(width - length, width) if left else slice(0, length)
        ids[row, where] = tokens(1, length, seed + row)[0]
        mask[row, where] = 1
    return {"input_ids": ids, "attention_mask": mask}


def states(output: object) -> Tensor:
    """Whatever a model answers with: logits, or the last hidden states."""
    logits = getattr(output, "logits", None)
    return logits if logits is not None else output.last_hidden_state  # type: ignore[attr-defined]
