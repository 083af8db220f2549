"""Memory that a process takes beyond the counted entries."""

import platform
from pathlib import Path

import pytest
import torch
import transformers as tf

from llmcache import LLMCache

ROWS = 48
BATCHES = 22  # until the heap is trimmed, the first time and again


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of glibc is trimmed, no other")
@pytest.mark.parametrize("settings", [{}, {"tau": 0.999, "layers": "last", "max_entries": 4096}], ids=["exact", "tau"])
def test_a_stored_entry_takes_a_few_times_what_is_counted_of_it(settings: dict[str, object]) -> None:
    """Freed activations of the model do not stay resident between entries."""
    config = tf.BertConfig(
        vocab_size=96, hidden_size=256, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, num_labels=3
    )
    model = tf.BertForSequenceClassification(config).eval()
    cache = LLMCache.wrap(model, **settings)
    ids = torch.randint(4, 96, (2 * BATCHES * ROWS, 12), generator=torch.Generator().manual_seed(0))

    def ask(first: int, last: int) -> None:
        with torch.inference_mode():
            for number in range(first, last, ROWS):
                model(input_ids=ids[number : number + ROWS])

    ask(0, BATCHES * ROWS)
    before = _resident()
    ask(BATCHES * ROWS, len(ids))
    assert cache.stats().n_stored == len(ids)
    assert (_resident() - before) / (BATCHES * ROWS) < 6 * cache.stats().held_nbytes / len(ids)
