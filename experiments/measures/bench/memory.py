"""Memory per entry and rate of storing, through the whole path of a call.

Layers pass their input through, so reading the request, fingerprint, search and storing are timed. Memory is the growth
of the process's resident set after the first tenth, which covers one-time allocations.
"""

import ctypes
import gc
import os
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from experiments.models.architectures import Requests, Shortcut, find_layers
from experiments.support.progress import tracked
from llmcache import ConfigError, LLMCache

MOST_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Settings:
    entries: int = 100_000  # entries to store
    width: int = 768  # hidden width, and with `mean` the fingerprint's width
    seq_len: int = 128  # tokens per request
    batch_size: int = 8  # small, else the calls' own buffers blur the figure
    payload: str = "cls"  # what entries keep
    compression: str = "fp16"
    fingerprint: str = "simhash"  # fingerprint name; with `simhash` the fingerprint adds almost nothing to the figure
    seed: int = 0


def measure(settings: Settings) -> dict[str, Any]:
    """Run the benchmark; return bytes per entry, entries stored per second, and the settings. See `latency.measure`."""
    if settings.width % 8:
        raise ConfigError(f"--width {settings.width}: give a multiple of 8")
    if settings.seq_len > MOST_TOKENS:
        raise ConfigError(f"--seq-len {settings.seq_len}: give at most {MOST_TOKENS}")
    cache = _wrap(settings)
    requests = Requests(cache.model.config, settings.batch_size, settings.seq_len, settings.seed, "cpu")
    start, resident_before, stored_before, spent = settings.entries // 10, 0, 0, 0.0
    for done in tracked(range(0, settings.entries, settings.batch_size), "storing"):
        if done >= start and not resident_before:
            resident_before, stored_before = resident_bytes(), cache.stats().n_stored
        inputs = requests.inputs(requests.fresh())
        began = perf_counter()
        cache(**inputs)
        spent += perf_counter() - began
    stats = cache.stats()
    return asdict(settings) | {
        "bytes_per_entry": (resident_bytes() - resident_before) / (stats.n_stored - stored_before),
        "payload_bytes_per_entry": stats.nbytes / stats.n_stored,
        "calls_entries_per_s": stats.n_stored / spent,
        "storing_entries_per_s": stats.n_stored / (stats.storing_ms / 1e3),
        "n_stored": stats.n_stored,
        "threads": torch.get_num_threads(),
    }


def _wrap(settings: Settings) -> LLMCache:
    """Wrap a classifier with one layer that computes nothing."""
    import transformers

    torch.manual_seed(settings.seed)
    config = transformers.BertConfig(
        hidden_size=settings.width, num_hidden_layers=1, num_attention_heads=8, max_position_embeddings=MOST_TOKENS
    )
    model = transformers.BertForSequenceClassification(config).eval()
    shortcut = Shortcut(is_open=True)
    shortcut.install(find_layers(model))
    return LLMCache.wrap(
        model,
        tau=1.0,
        layers="last",
        payload=settings.payload,
        compression=settings.compression,
        fingerprint=settings.fingerprint,
        max_bytes=2**40,
    )


def resident_bytes() -> int:
    """Return this process's resident set from /proc, after the allocator has released its free memory."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc
        trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
