"""Recipe: all-MiniLM-L6-v2 fine-tuned as an intent classifier whose head reads the first token.

It is trained on a seeded half of the labelled data. With the same seed and share, the task `stream` uses the other
half.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from experiments.data.labelled import Data, Labelled, read_requests, split
from experiments.models.loading import Loaded, load
from experiments.prepare.training import Order, Padding, Schedule, train
from experiments.support.progress import tracked

MAX_LENGTH = 64
FIT_SHARE = 0.5


def prepare(order: Order, data: str) -> tuple[Loaded, dict[str, Any]]:
    """Train a model on a labelled set; accuracy is on the unseen half, beside that of the most common intent."""
    requests = read_requests(Data.make({"path": data, "limit": order.limit}), order.data_dir, order.seed)
    seen, unseen = split(requests, FIT_SHARE, order.seed)
    labels = sorted({request.label for request in requests})
    names: dict[str, Any] = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
    }
    torch.manual_seed(order.seed)
    base = load(order.base, "class", is_new_head=True, num_labels=len(labels), **names)
    schedule = Schedule(epochs=order.epochs or 6, batch_size=64, learning_rate=5e-4)
    cut = {"truncation": True, "max_length": MAX_LENGTH}
    examples = [{**base.tokenizer(one.text, **cut), "labels": labels.index(one.label)} for one in seen]
    train(base.model, examples, Padding(base.tokenizer), schedule, order.folder, order.seed, data)
    commonest = Counter(request.label for request in seen).most_common(1)[0][0]
    return base, {
        "n_train": len(seen),
        "n_test": len(unseen),
        "seed": order.seed,
        "fit_share": FIT_SHARE,
        "accuracy": _accuracy(base, labels, unseen),
        "commonest": sum(request.label == commonest for request in unseen) / len(unseen),
    }


def _accuracy(model: Loaded, labels: Sequence[str], requests: Sequence[Labelled]) -> float:
    n_right = 0
    with torch.inference_mode():
        for request in tracked(requests, "Answering"):
            inputs = model.tokenizer(request.text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
            n_right += labels[int(model.model(**inputs).logits.argmax())] == request.label
    return n_right / len(requests)
