"""Draws `docs/server.png`: the server's page after an hour of synthetic traffic, half of it repeats.

    python -m tests.server_screenshot docs/server.png

The model is a small BERT with random weights and a head fitted to five topics; nothing is downloaded. The requests
take a minute; the script advances the page's clock between them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import transformers as tf

from llmcache import LLMCache
from llmcache.serving.history import History
from llmcache.serving.loading import Served
from llmcache.serving.saving import Saves
from llmcache.serving.server import Server
from llmcache.serving.settings import ServerSettings
from tests.contract.streams import N_TOPICS, fit_head
from tests.serving.served import listening, tokenizer
from tests.serving_browser import open_browser
from tests.tiny_models import build
from tests.topics import batched, requests

_N_SAMPLES, _EVERY_S = 240, 15.0
_N_KNOWN = 400


def main(path: Path) -> None:
    """Draw the page into a file."""
    with open_browser() as browser:
        if browser is None:
            sys.exit("Chromium, its driver and selenium are needed: apt-get install chromium chromium-driver")
        torch.set_num_threads(1)
        now = 0.0
        cache = _cache()
        served = Served("classifier", cache.model, tokenizer(), 64)
        settings = ServerSettings(model="bert-of-five-topics", warmup_tokens=0)
        server = Server(settings, served, cache, Saves(None))
        with listening(server) as (_, address):
            server.history = History(lambda: now)  # filled below: a minute stands for an hour
            for part in _traffic():
                for ids in part:
                    begun = perf_counter()
                    cache(input_ids=torch.tensor([ids]))
                    server.metrics.answered("/predict", 200, perf_counter() - begun, is_inference=True)
                cache.drain()
                now += _EVERY_S
                server.history.add(cache.stats())
            browser.show(address, "desk")
            browser.fit()
            browser.save(str(path))


def _cache() -> LLMCache:
    """A calibrated cache on a BERT of six layers."""
    config = tf.BertConfig(
        vocab_size=96,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=64,
        num_labels=N_TOPICS,
    )
    cache = LLMCache.wrap(
        fit_head(build(lambda: tf.BertForSequenceClassification(config))), max_drop=0.05, max_bytes=1_200_000
    )
    cache.calibrate(batched(requests(_N_KNOWN)[0]))
    return cache


def _traffic() -> Iterator[list[list[int]]]:
    """Yield the token ids of each interval's requests: more in the middle of the hour, and some repeats."""
    rng = np.random.default_rng(0)
    fresh = iter(requests(20 * _N_SAMPLES, seed=1)[0])
    asked: list[list[int]] = []
    for n in range(_N_SAMPLES):
        part = []
        for _ in range(rng.poisson(10 + 6 * np.sin(np.pi * n / _N_SAMPLES))):
            if asked and rng.random() < 0.4 * n / _N_SAMPLES + 0.1:
                part.append(asked[int(len(asked) * rng.random() ** 3)])
            else:
                asked.append(next(fresh)["input_ids"][0].tolist())
                part.append(asked[-1])
        yield part


if __name__ == "__main__":
    main(Path(sys.argv[1]))
