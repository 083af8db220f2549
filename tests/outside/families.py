"""A test class for each family, where no checkout of transformers was named: its common mixins on tiny models of ours.

Not collected by itself: `python -m judge` names this file, and picks one class.
"""

import unittest
from typing import Any

import torch
import transformers as tf
from judge import archive

archive.enter(archive.fetch("transformers"))

from transformers_tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from transformers_tests.test_modeling_common import ModelTesterMixin  # noqa: E402

VOCABULARY = 99
SIZES = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
ENCODER = SIZES | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DECODER = SIZES | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
}


class Tester:
    """What the mixins ask of a family: its config, and a batch with a full row and padding on either side."""

    batch_size = 3
    seq_length = encoder_seq_length = decoder_seq_length = key_length = 7
    num_hidden_layers = 2
    num_attention_heads = 4
    hidden_size = 32
    num_choices = 3
    pad_token_id = SIZES["pad_token_id"]
    is_training = False

    def __init__(self, config: tf.PreTrainedConfig, has_types: bool) -> None:
        """Inputs are drawn anew at each request, from torch's random numbers."""
        self.config = config
        self.has_types = has_types

    def get_config(self) -> tf.PreTrainedConfig:
        """A config that the caller may change."""
        return type(self.config).from_dict(self.config.to_dict())

    def prepare_config_and_inputs_for_common(self) -> tuple[tf.PreTrainedConfig, dict[str, torch.Tensor]]:
        """Token ids, mask, and token types or decoder ids where the family has them."""
        shape = (self.batch_size, self.seq_length)
        ids = torch.randint(5, VOCABULARY, shape)
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        mask[2, :2] = 0
        ids[[0, 1, 2], [-1, -3, -1]] = SIZES["eos_token_id"]  # BART's and T5's classifiers read the state there
        inputs = {"input_ids": ids.masked_fill(mask == 0, self.pad_token_id), "attention_mask": mask}
        if self.has_types:
            inputs["token_type_ids"] = torch.randint(0, 2, shape)
        if self.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(5, VOCABULARY, shape)
            inputs["decoder_attention_mask"] = torch.ones_like(ids)
        return self.get_config(), inputs


def make(prefix: str, heads: str, config: tf.PreTrainedConfig, **more: Any) -> type[unittest.TestCase]:
    """The test class of a family.

    Args:
        prefix: What its classes begin with.
        heads: What they end with, split at spaces.
        config: Of a tiny model.
        **more: Attributes that the mixins read; `has_types` is ours.
    """
    classes = tuple(getattr(tf, prefix + head) for head in heads.split())
    has_types = more.pop("has_types", False)

    def set_up(self: Any) -> None:
        self.model_tester = Tester(config, has_types)

    generates = (GenerationTesterMixin,) if any(one.can_generate() for one in classes) else ()
    body = {"setUp": set_up, "all_model_classes": classes, "is_encoder_decoder": config.is_encoder_decoder, **more}
    return type(f"{prefix}ModelTest", (ModelTesterMixin, *generates, unittest.TestCase), body)


BERT_HEADS = "Model ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification ForTokenClassification"
CLASSIFIERS = "Model ForCausalLM ForSequenceClassification ForTokenClassification ForQuestionAnswering"

BertModelTest = make(
    "Bert",
    f"{BERT_HEADS} LMHeadModel ForNextSentencePrediction ForPreTraining",
    tf.BertConfig(**ENCODER),
    has_types=True,
)
RobertaModelTest = make("Roberta", f"{BERT_HEADS} ForCausalLM", tf.RobertaConfig(**ENCODER))
DistilBertModelTest = make(
    "DistilBert",
    BERT_HEADS,
    tf.DistilBertConfig(
        **SIZES,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=37,
        max_position_embeddings=64,
        dropout=0,
        attention_dropout=0,
    ),
)
ElectraModelTest = make(
    "Electra",
    f"{BERT_HEADS} ForCausalLM ForPreTraining",
    tf.ElectraConfig(**ENCODER, embedding_size=24),
    has_types=True,
)
MPNetModelTest = make("MPNet", BERT_HEADS, tf.MPNetConfig(**ENCODER))
DebertaV2ModelTest = make(
    "DebertaV2",
    BERT_HEADS,
    tf.DebertaV2Config(**ENCODER, relative_attention=True, position_biased_input=False, pos_att_type=["p2c", "c2p"]),
)
ModernBertModelTest = make(
    "ModernBert",
    BERT_HEADS,
    tf.ModernBertConfig(
        **SIZES,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=37,
        max_position_embeddings=64,
        cls_token_id=2,
        sep_token_id=3,
        embedding_dropout=0.0,
        mlp_dropout=0.0,
        attention_dropout=0.0,
        classifier_dropout=0.0,
    ),
)
GPT2ModelTest = make(
    "GPT2",
    "Model LMHeadModel DoubleHeadsModel ForQuestionAnswering ForSequenceClassification ForTokenClassification",
    tf.GPT2Config(
        **SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
)
LlamaModelTest = make("Llama", CLASSIFIERS, tf.LlamaConfig(**DECODER))
Qwen2ModelTest = make("Qwen2", CLASSIFIERS, tf.Qwen2Config(**DECODER))
MistralModelTest = make("Mistral", CLASSIFIERS, tf.MistralConfig(**DECODER, sliding_window=None))
T5ModelTest = make(
    "T5",
    "Model ForConditionalGeneration ForSequenceClassification ForQuestionAnswering",
    tf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=1,
        eos_token_id=3,
        decoder_start_token_id=1,
        relative_attention_num_buckets=8,
    ),
)
T5EncoderModelTest = make(
    "T5",
    "EncoderModel",
    tf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=1,
        is_encoder_decoder=False,  # else it would be given a decoder's ids, which it does not take
    ),
)
T5EncoderModelTest.__name__ = "T5EncoderModelTest"
BartModelTest = make(
    "Bart",
    "Model ForConditionalGeneration ForSequenceClassification ForQuestionAnswering",
    tf.BartConfig(
        **SIZES,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=37,
        decoder_ffn_dim=37,
        max_position_embeddings=64,
        decoder_start_token_id=3,
        forced_eos_token_id=None,
        dropout=0.0,
        attention_dropout=0.0,
    ),
)
