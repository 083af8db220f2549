"""Tiny models in folders, as a server loads them; and a server of each, in process or on a free port."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers as tf

from llmcache.config import CacheConfig
from llmcache.serving.loading import load_served
from llmcache.serving.saving import Saves
from llmcache.serving.server import Server
from llmcache.serving.settings import ServerSettings
from tests.tiny_models import VOCABULARY, build

LABELS = ("card", "cash", "change", "credit", "other")
WORDS = ("lost", "my", "card", "where", "is", "cash", "change", "the", "rate", "please", *(f"w{i}" for i in range(70)))
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")


def tokenizer() -> tf.PreTrainedTokenizerFast:
    """One token a word, as BERT frames texts and pairs."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*SPECIAL, *WORDS))}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    made.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_max_length=32,
    )


def _config(**more: Any) -> tf.BertConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    return tf.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes, **more)


def write(folder: Path, kind: str) -> Path:
    """Write a model of a kind, with its tokenizer; returns the folder."""
    makes: dict[str, Callable[[], Any]] = {
        "classifier": lambda: tf.BertForSequenceClassification(_config(id2label=dict(enumerate(LABELS)))),
        "reranker": lambda: tf.BertForSequenceClassification(_config(num_labels=1)),
        "embedding": lambda: tf.BertModel(_config()),
    }
    model: Any = build(makes[kind])
    model.save_pretrained(folder / kind)
    tokenizer().save_pretrained(folder / kind)
    return folder / kind


def make_server(folder: Path, cache: dict[str, Any] | None = None, **settings: Any) -> Server:
    """A server of a model in a folder, not started; it computes by itself, which is ready sooner."""
    made = ServerSettings.model_validate({"model": folder.name, "warmup_tokens": 8, **settings})
    served = load_served(str(folder))
    saves = Saves(made.save)
    return Server(made, served, saves.hang_cache(served, None if cache is None else CacheConfig.make(cache)), saves)


def within(server: Server, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Start a server, do work in its event loop, and stop it."""

    async def run() -> Any:
        await server.start()
        try:
            return await work()
        finally:
            await server.stop()

    return asyncio.run(run())


@contextmanager
def listening(server: Server) -> Iterator[str]:
    """Within: the server listens on a free port; gives its address."""
    with running(server) as (_, address):
        yield address


@contextmanager
def running(server: Server) -> Iterator[tuple[Any, str]]:
    """The same; gives what runs it as well, which can be told to stop."""
    from llmcache.serving.running import Uvicorn

    uvicorn = Uvicorn(server, "127.0.0.1", 0)
    thread = threading.Thread(target=uvicorn.run, daemon=True)
    thread.start()
    while not uvicorn.started and thread.is_alive():
        thread.join(0.01)
    assert uvicorn.started
    try:
        port = uvicorn.servers[0].sockets[0].getsockname()[1]
        yield uvicorn, f"http://127.0.0.1:{port}"
    finally:
        uvicorn.should_exit = True
        thread.join()
