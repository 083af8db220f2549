"""Runs commands and measures in this process, on tiny models with random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from experiments.data.streams.support_desk import Request, support_desk
from experiments.measures import MEASURES
from experiments.measures.base import Outcome
from experiments.runs.grid import make_experiment
from experiments.support.files import Folders
from llmcache.cli.main import main
from tests.tiny_models import PAD, VOCABULARY, build

LEARN, N = 150, 240
TASK = {"name": "held_out", "model": "untrained", "limit": N, "data": {"path": "support_desk", "limit": 700}}
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


class Commands:
    """Runs commands of the program; keeps the output of the last one."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.out = self.err = ""
        self._capsys = capsys

    def __call__(self, *words: str | Path) -> int:
        """Run a command; return its exit status."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main([str(word) for word in words])
        self.out, self.err = self._capsys.readouterr()
        return int(done.value.code or 0)

    def refused(self, *words: str | Path) -> str:
        """Run a command that must fail; return its one-line error without the program's name."""
        assert (self(*words), self.out) == (2, "")
        lines = self.err.splitlines()  # transformers may print before it
        assert [line.startswith("llmcache: ") for line in lines].count(True) == 1
        return lines[-1].removeprefix("llmcache: ")


def learning(measure: str, **changes: Any) -> dict[str, Any]:
    """Settings of a measure that learns from the first LEARN of N requests."""
    values = {"measure": measure, "task": TASK, "learn": LEARN, "max_drops": [0.2], "cache": {"answer": "class"}}
    return values | changes


def measured(values: Mapping[str, Any], folders: Folders | None = None, **changes: Any) -> Outcome:
    """Run a measure with some settings changed; return its outcome."""
    done: Outcome = MEASURES[values["measure"]].run(make_experiment({**values, **changes}), folders or Folders())
    return done


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


def save_gpt2(folder: Path) -> Path:
    """Save a tiny language model, no tokenizer."""
    shape = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
    config = tf.GPT2Config(**shape, bos_token_id=1, eos_token_id=2, pad_token_id=PAD)
    build(lambda: tf.GPT2LMHeadModel(config)).save_pretrained(folder)
    return folder
