"""Recipe: a GPT-2 with 6 layers, 256 wide, and a byte-level BPE of 8,000 tokens, both trained on WikiText-2.

`<unk>`, which replaces rare words in the training text, is one token: read as context, never a target.

Sizes: N blocks, T tokens of a block.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.data.published import UNK, read_wikitext, unk_rate
from experiments.models.loading import Loaded
from experiments.prepare.training import Order, Schedule, train
from experiments.tasks.wikitext import WikiText

VOCABULARY = 8000
BLOCK = 128
SHAPE = {"n_embd": 256, "n_layer": 6, "n_head": 8}
END = "<|endoftext|>"
IGNORED = -100  # target that transformers leaves out of the loss


def prepare(order: Order) -> tuple[Loaded, dict[str, Any]]:
    """Train tokenizer and model; return them with figures on validation and test text, beside a unigram model's."""
    lines = read_wikitext("train", order.data_dir)[: order.limit]
    tokenizer = make_tokenizer(lines)
    model = make_model(tokenizer, order.seed)
    ids = np.array(tokenizer("\n".join(lines))["input_ids"], dtype=np.int64)
    blocks = ids[: len(ids) // BLOCK * BLOCK].reshape(-1, BLOCK)
    schedule = Schedule(epochs=order.epochs or 4, batch_size=16, learning_rate=1e-3, weight_decay=0.1)
    examples = [{"input_ids": block} for block in blocks]
    collator = Collator(tokenizer.convert_tokens_to_ids(UNK))
    train(model, examples, collator, schedule, order.folder, order.seed, "wikitext")
    loaded = Loaded(model, tokenizer)
    figures: dict[str, Any] = {"n_train_tokens": blocks.size, "train_unk_rate": unk_rate(lines)}
    for split in ("validation", "test"):
        task = WikiText(loaded, read_wikitext(split, order.data_dir), BLOCK, order.limit, None)
        told = task.answer_all("Reading")
        own = {"accuracy": float(task.scores(told).mean()), **task.extras(told)}
        figures[split] = {**own, "unk_rate": task.facts["unk_rate"], "unigram": unigram(ids, task)}
    return loaded, figures


def make_tokenizer(lines: Sequence[str]) -> Any:
    """Train a byte-level BPE, as GPT-2's, on the text; `<unk>` and the end of text are single tokens."""
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(lines, vocab_size=VOCABULARY, special_tokens=[END, UNK], show_progress=False)
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END, unk_token=UNK, pad_token=END
    )


def make_model(tokenizer: Any, seed: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=256,
        **SHAPE,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.GPT2LMHeadModel(config)


class Collator:
    """Makes batches: ids (B, T), and targets without `<unk>`."""

    def __init__(self, unk: int) -> None:
        self._unk = unk

    def __call__(self, examples: Sequence[dict[str, NDArray[np.int64]]]) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(np.stack([example["input_ids"] for example in examples]))
        return {"input_ids": ids, "labels": ids.masked_fill(ids == self._unk, IGNORED)}


def unigram(ids: NDArray[np.int64], task: WikiText) -> dict[str, float]:
    """Return next-token accuracy and perplexity of a unigram model of the training text."""
    counts = Counter(ids.tolist())
    unk = task.tokenizer.convert_tokens_to_ids(UNK)
    del counts[unk]
    size = len(task.tokenizer)
    frequent = counts.most_common(1)[0][0]
    targets = np.concatenate([request.reference[1:] for request in task.requests])
    targets = targets[targets != unk]
    total = sum(counts.values()) + size  # add-one smoothing, so that no token is impossible
    nll = -np.log([(counts[token] + 1) / total for token in targets.tolist()])
    return {"accuracy": float((targets == frequent).mean()), "perplexity": float(np.exp(nll.mean()))}
