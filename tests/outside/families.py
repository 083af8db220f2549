"""Test classes by family, for runs without a checkout of transformers: its common mixins on our tiny models.

Not collected by default: `python -m judge` selects classes of this file.
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
SPECIAL = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
#: Sizes under the most common setting names; families with other names get theirs below.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
}


class Tester:
    """The mixins' model tester: a config, and a batch with a full row and padding on either side."""

    batch_size = 3
    seq_length = encoder_seq_length = decoder_seq_length = key_length = 7
    num_hidden_layers = 2
    num_attention_heads = 4
    hidden_size = 32
    num_choices = 3
    pad_token_id = SPECIAL["pad_token_id"]
    is_training = False

    def __init__(self, config: tf.PreTrainedConfig, has_types: bool) -> None:
        """Inputs are drawn from torch's generator at each call."""
        self.config = config
        self.has_types = has_types

    def get_config(self) -> tf.PreTrainedConfig:
        """Return a copy of the config, which the caller may change."""
        return type(self.config).from_dict(self.config.to_dict())

    def prepare_config_and_inputs_for_common(self) -> tuple[tf.PreTrainedConfig, dict[str, torch.Tensor]]:
        """Return the config and inputs: ids, mask, and token types or decoder ids if the family has them."""
        shape = (self.batch_size, self.seq_length)
        ids = torch.randint(5, VOCABULARY, shape)
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        mask[2, :2] = 0
        ids[[0, 1, 2], [-1, -3, -1]] = SPECIAL["eos_token_id"]  # BART's and T5's classifiers read the state there
        inputs = {"input_ids": ids.masked_fill(mask == 0, self.pad_token_id), "attention_mask": mask}
        if self.has_types:
            inputs["token_type_ids"] = torch.randint(0, 2, shape)
        if self.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.randint(5, VOCABULARY, shape)
            inputs["decoder_attention_mask"] = torch.ones_like(ids)
        return self.get_config(), inputs


def make(prefix: str, heads: str, has_types: bool = False, **sizes: Any) -> type[unittest.TestCase]:
    """Make a family's test class; model classes are `prefix` plus each of `heads`, split at spaces."""
    config = getattr(tf, f"{prefix}Config")(**SPECIAL, **SIZES | sizes)
    for name, value in config.to_dict().items():
        if "drop" in name and value:
            setattr(config, name, 0.0)
    classes = tuple(getattr(tf, prefix + head) for head in heads.split())

    def set_up(self: Any) -> None:
        self.model_tester = Tester(config, has_types)

    generates = (GenerationTesterMixin,) if any(one.can_generate() for one in classes) else ()
    body = {"setUp": set_up, "all_model_classes": classes, "is_encoder_decoder": config.is_encoder_decoder}
    return type(f"{prefix}ModelTest", (ModelTesterMixin, *generates, unittest.TestCase), body)


BERT_HEADS = "Model ForMaskedLM ForMultipleChoice ForQuestionAnswering ForSequenceClassification ForTokenClassification"
CLASSIFIERS = "Model ForCausalLM ForSequenceClassification ForTokenClassification ForQuestionAnswering"
GPT2_HEADS = "Model LMHeadModel DoubleHeadsModel ForQuestionAnswering ForSequenceClassification ForTokenClassification"
SEQ2SEQ = "Model ForConditionalGeneration ForSequenceClassification ForQuestionAnswering"
DEBERTA = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}
GROUPED = {"num_key_value_heads": 2}
T5 = {"d_kv": 8, "d_ff": 37, "decoder_start_token_id": 1, "relative_attention_num_buckets": 8}
BART = {"decoder_layers": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37}

# Named as in `judge.__main__.ALL`.
bert = make("Bert", f"{BERT_HEADS} LMHeadModel ForNextSentencePrediction ForPreTraining", has_types=True)
roberta = make("Roberta", f"{BERT_HEADS} ForCausalLM")
distilbert = make("DistilBert", BERT_HEADS, hidden_dim=37)
electra = make("Electra", f"{BERT_HEADS} ForCausalLM ForPreTraining", has_types=True, embedding_size=24)
mpnet = make("MPNet", BERT_HEADS)
deberta_v2 = make("DebertaV2", BERT_HEADS, **DEBERTA)
modernbert = make("ModernBert", BERT_HEADS, cls_token_id=2, sep_token_id=3)
gpt2 = make("GPT2", GPT2_HEADS)
llama = make("Llama", CLASSIFIERS, **GROUPED)
qwen2 = make("Qwen2", CLASSIFIERS, **GROUPED)
mistral = make("Mistral", CLASSIFIERS, **GROUPED, sliding_window=None)
t5 = make("T5", SEQ2SEQ, num_decoder_layers=2, **T5)
# By itself: else the encoder would get decoder ids, which it does not take.
t5_encoder = make("T5", "EncoderModel", is_encoder_decoder=False, **T5)
bart = make("Bart", SEQ2SEQ, decoder_start_token_id=3, forced_eos_token_id=None, **BART)
