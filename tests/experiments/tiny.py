"""Tiny models and requests of the experiments' tests."""

from pathlib import Path

import transformers as tf

from experiments.data.streams.support_desk import Request, support_desk
from experiments.measures.shared_prompt import QUESTIONS, SYSTEM
from experiments.models.loading import Loaded
from tests.generation.test_prompt_cache import TEMPLATE, word_tokenizer
from tests.tiny_models import PAD, VOCABULARY, build, llama

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def desk(n: int, *intents: str) -> list[Request]:
    """Return `n` requests with these intents from the support-desk stream."""
    return [request for request in support_desk(40 * n) if request.label in intents][:n]


def save_tiny(folder: Path, labels: tuple[str, ...] = ()) -> Path:
    """Save a tiny BERT with random weights and a word tokenizer; with labels, a classifier."""
    words = sorted({word for request in support_desk(300) for word in request.text.lower().split()})
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*SPECIALS, *".,?!'", *words]))}
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    names = dict(enumerate(labels or ("a", "b")))
    config = tf.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=128, id2label=names, **shape)
    kind = tf.BertForSequenceClassification if labels else tf.BertModel
    build(lambda: kind(config)).save_pretrained(folder)
    tf.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    return folder


def save_gpt2(folder: Path, layers: int = 3, positions: int = 128) -> Path:
    """Save a tiny language model, no tokenizer."""
    shape = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": positions}
    config = tf.GPT2Config(**shape, bos_token_id=1, eos_token_id=2, pad_token_id=PAD)
    build(lambda: tf.GPT2LMHeadModel(config)).save_pretrained(folder)
    return folder


def decoder() -> Loaded:
    """Return a tiny decoder with a chat template; its tokenizer knows the demo's words."""
    tokenizer = word_tokenizer(" ".join(dict.fromkeys(" ".join(("system user assistant", SYSTEM, *QUESTIONS)).split())))
    tokenizer.chat_template = TEMPLATE
    config = llama(vocab_size=len(tokenizer), max_position_embeddings=512)
    return Loaded(build(lambda: tf.LlamaForCausalLM(config)), tokenizer)
