"""Models of sentence-transformers: answers equal `encode`, whatever the modules and prompts."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from llmcache.errors import ConfigError
from llmcache.serving.loading import load_served
from llmcache.serving.tokenizing import Prompted, Tokenizing, Tokens
from tests.fixtures import Log
from tests.generation.test_detokenizer import spaced_tokenizer
from tests.serving.served import Client, byte_tokenizer, make_server, tokenizer
from tests.tiny_models import build, llama

pytest.importorskip("sentence_transformers")
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

PROMPTS = {"query": "where is: ", "document": "the card ", "none": ""}
TEXTS = ["Lost my Card", "the card lost my cash", "my", "w1 w2 w3 w4 w5 w6 w7 w8 w9"]
TEMPLATE = "{% for m in messages %}w1 {{ m['content'] }} w2{% endfor %}"


def _made(models: Path, folder: Path, after: Sequence[Any], *, words: Any = None, **settings: Any) -> Path:
    """Save a sentence-transformers model: the tiny BERT, a tokenizer, and the modules `after`."""
    (words or tokenizer()).save_pretrained(folder / "bert")
    tf.BertModel.from_pretrained(models / "embedding").save_pretrained(folder / "bert")
    first = {name: settings.pop(name) for name in ("do_lower_case", "max_seq_length") if name in settings}
    model = SentenceTransformer(
        modules=[Transformer(str(folder / "bert"), **first), *after], prompts=PROMPTS, **settings
    )
    model.save(str(folder / "st"))
    return folder / "st"


def _edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _check(folder: Path) -> None:
    """Ask a server twice with each prompt, and compare with `encode`."""
    plain, server = SentenceTransformer(str(folder)), make_server(folder)
    with Client(server) as client:
        for name in (None, *PROMPTS):
            body = {"inputs": TEXTS, "normalize": False, "truncate": True, "prompt_name": name}
            expected = plain.encode(TEXTS, prompt_name=name)
            for _ in range(2):
                np.testing.assert_allclose(np.array(client.post("/embed", json=body).json()), expected, atol=1e-5)
    assert server.cache.stats().hits["exact"] >= (1 + len(PROMPTS)) * len(TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "includes_prompt", "settings"),
    [
        (("cls", "max", "weightedmean", "mean"), False, {"default_prompt_name": "document"}),
        ("mean", True, {"do_lower_case": True, "max_seq_length": 6, "truncate_dim": 500}),
    ],
    ids=str,
)
def test_poolings_and_settings(
    models: Path, tmp_path: Path, mode: Any, includes_prompt: bool, settings: dict[str, Any]
) -> None:
    _check(_made(models, tmp_path, [Pooling(32, pooling_mode=mode, include_prompt=includes_prompt)], **settings))


@pytest.mark.slow
def test_a_decoder_of_sentence_transformers_is_an_embedding_model(tmp_path: Path) -> None:
    build(lambda: tf.LlamaModel(llama())).save_pretrained(tmp_path / "llama")
    tokenizer().save_pretrained(tmp_path / "llama")
    pooling = Pooling(32, pooling_mode="lasttoken", include_prompt=False)
    model = SentenceTransformer(modules=[Transformer(str(tmp_path / "llama")), pooling], prompts=PROMPTS)
    model.save(str(tmp_path / "st"))
    _edit(tmp_path / "st" / "config.json", architectures=["LlamaForCausalLM"])
    _check(tmp_path / "st")


def test_what_cannot_be_served_is_told(models: Path, tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = TEMPLATE
    with pytest.raises(ConfigError, match="changes texts before its tokenizer reads them"):
        load_served(str(_made(models, tmp_path / "chats", [Pooling(32)], words=words)))
    folder = _made(models, tmp_path, [Pooling(32)])
    settings = folder / "config_sentence_transformers.json"
    _edit(settings, model_type="SparseEncoder")
    with pytest.raises(ConfigError, match="is a SparseEncoder of"):
        load_served(str(folder))
    settings.write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        load_served(str(folder))


@pytest.mark.parametrize(
    ("width", "is_normalised", "n_labels", "is_told"),
    [(5, False, 2, True), (5, False, 5, False), (77, False, 2, True), (5, True, 2, False), (64, False, 2, False)],
)
def test_a_dense_of_labels_without_their_names_is_told(
    models: Path, tmp_path: Path, width: int, is_normalised: bool, n_labels: int, is_told: bool, caplog: Log
) -> None:
    folder = _made(models, tmp_path, [Pooling(32), Dense(32, width), *([Normalize()] if is_normalised else [])])
    _edit(folder / "config.json", id2label={str(one): f"label {one}" for one in range(n_labels)})
    served = load_served(str(folder))
    assert served.kind == ("classifier" if width == n_labels else "embedding")
    assert [f"name {width} labels in id2label" in one.message for one in caplog.records] == [True] * is_told


@pytest.mark.parametrize("make", [tokenizer, byte_tokenizer, spaced_tokenizer])
@pytest.mark.parametrize("is_fast", [True, False])
def test_tokens_of_a_prompt(make: Callable[[], Any], is_fast: bool) -> None:
    """`n_prompt` counts the prompt's tokens without a special one at its end; a cut on the left reduces it."""
    made, prompt, text = make(), "where is: ", "the card " * 40
    alone = made(prompt)["input_ids"]
    n_prompt = len(alone) - (alone[-1] in made.all_special_ids)
    tokenizing = Tokenizing(made, 30, len(made), [prompt, ""], is_pooled=False)
    if not is_fast:
        tokenizing._fast = None
    n_over = len(made(prompt + text)["input_ids"]) - 30
    for item, side, expected in (
        (Prompted(prompt, (text,)), "right", n_prompt),
        (Prompted(prompt, (text,)), "left", max(0, n_prompt - n_over)),
        (Prompted(prompt, ("the",)), "left", n_prompt),
        (Prompted(prompt, ("the", "card")), "right", n_prompt),
        (Prompted("", ("the",)), "right", 0),
        (prompt + "the", "right", 0),
    ):
        (got,) = tokenizing.encode([item], True, side)
        assert isinstance(got, Tokens) and got.n_prompt == expected
    (pooled,) = Tokenizing(made, 30, len(made), [prompt]).encode([Prompted(prompt, ("the",))], True)
    assert isinstance(pooled, Tokens) and pooled.n_prompt == 0


def test_pooling_and_dtype_are_as_asked(models: Path) -> None:
    served = load_served(str(models / "embedding"), device="cpu", dtype="bfloat16", pooling="cls")
    inputs = {"input_ids": torch.tensor([[1, 5, 6, 2]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    with torch.inference_mode():
        states, pooled = served.states(dict(inputs)), served.forward(dict(inputs))
    assert pooled.dtype == torch.bfloat16 and torch.equal(pooled, states[:, 0])


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        ("embedding", {"device": "cuda:99"}, "device: 'cuda:99' cannot be used"),
        ("embedding", {"device": "gpu"}, "device: 'gpu' cannot be used"),
        ("embedding", {"dtype": "int8"}, "dtype: 'int8' is not one of float32, float16, bfloat16"),
        ("embedding", {"pooling": "max"}, "pooling: 'max' is not one of mean, cls, last-token"),
        ("classifier", {"pooling": "cls"}, "pooling: for embedding models"),
        ("classifier", {"revision": "main"}, "revision: .* is a folder"),
    ],
)
def test_options_that_do_not_fit_are_told(models: Path, kind: str, given: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_served(str(models / kind), **given)
