"""Tiny inputs for streams of prompts: text, a tokenizer, a trace of conversations, and a language model."""

import json
from pathlib import Path

import transformers as tf

from experiments.support.files import Folders
from tests.tiny_data import passage, write_data
from tests.tiny_models import build

VOCABULARY, POSITIONS = 320, 512
N_PASSAGES = 80  # of some 100 tokens each

#: A GPT-2 of three layers.
SHAPE = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS}

#: Arrival time and blocks; all share block 0. Conversations begin with blocks 1, 5 and 8.
TRACE = [
    (0, [0, 1, 2]),
    (10, [0, 5]),
    (20, [0, 1, 2, 3]),
    (30, [0, 8, 9]),
    (40, [0, 5, 6, 7]),
    (50, [0, 1, 4]),
    (60, [0, 8, 9, 10, 11]),
    (60, [0, 5, 6, 7]),
]


def write_trace(folder: Path) -> None:
    """Write the trace in Mooncake's format, not quite in order."""
    lines = [
        json.dumps({"timestamp": at, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": ids})
        for at, ids in (*TRACE[3:], *TRACE[:3])
    ]
    (folder / "mooncake").mkdir()
    (folder / "mooncake" / "conversation_trace.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_prompts(folder: Path) -> Folders:
    """Write data and a prepared model, `tiny`, with large random weights."""
    from tokenizers import ByteLevelBPETokenizer

    data, models = folder / "data", folder / "models"
    data.mkdir()
    write_data(data)
    write_trace(data)
    bpe = ByteLevelBPETokenizer()
    text = "\n".join(passage(seed) for seed in range(N_PASSAGES))
    (data / "wikitext" / "wikitext-103_test.txt").write_text(text, encoding="utf-8")
    bpe.train_from_iterator([text], vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False)
    there = data / "tokenizers" / "gpt2"
    there.mkdir(parents=True)
    bpe.save_model(str(there))
    tf.GPT2Tokenizer(vocab=str(there / "vocab.json"), merges=str(there / "merges.txt")).save_pretrained(models / "tiny")
    build(lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**SHAPE, bos_token_id=0, eos_token_id=0))).save_pretrained(
        models / "tiny"
    )
    return Folders(data, models)
