"""Recipe: all-MiniLM-L6-v2 with a head that classifies support desk requests, in the format of `llmcache serve`.

Requests are generated, so nothing is downloaded. The head is a logistic regression on mean-pooled states, as in `demo`.
"""

import random
from typing import Any

from experiments.data.labelled import made_requests
from experiments.models.heads import as_sentence_model, fit_logistic
from experiments.models.loading import Loaded, load
from experiments.prepare.training import Order

_N, _FIT_SHARE = 1200, 0.5
_MAX_LENGTH = 128


def prepare(order: Order) -> tuple[Loaded, dict[str, Any]]:
    """Fit the head on half of the requests; accuracy is on the other half."""
    requests = made_requests(order.limit or _N, order.seed)
    random.Random(order.seed).shuffle(requests)
    n_fit = int(_FIT_SHARE * len(requests))
    seen, unseen = requests[:n_fit], requests[n_fit:]
    fitted = fit_logistic(load(order.base, "states"), "mean", seen, unseen, _MAX_LENGTH)
    model = as_sentence_model(load(order.base, "states"), fitted, "mean", _MAX_LENGTH)
    answers = model.encode([one.text for one in unseen], convert_to_numpy=True).argmax(axis=1)
    n_right = sum(fitted.labels[i] == one.label for i, one in zip(answers, unseen, strict=True))
    figures = {"n_train": len(seen), "n_test": len(unseen), "seed": order.seed, "accuracy": n_right / len(unseen)}
    return Loaded(model, model.tokenizer), figures
