"""Task `stream`: labelled requests, one by one, with and without the cache.

labelled data -> a seeded part fits the head -> the rest, in data order, is the stream
-> every request by both arms, back to back -> figures
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.config import Experiment
from experiments.data.labelled import Labelled, read_requests
from experiments.heads import Classifier, fit_logistic, ready
from experiments.measure import Trace, measure
from experiments.metrics import summary
from experiments.models import check_length, encode, load
from experiments.tasks import Outcome
from experiments.tasks.split import split


def run(experiment: Experiment, data_dir: Path | None) -> Outcome:
    """Stream the requests of one experiment.

    Args:
        experiment: Its settings.
        data_dir: What relative data paths are relative to.

    Raises:
        ConfigError: The data does not fit the settings.
        FileNotFoundError: A data file is missing.
    """
    data = read_requests(experiment.data, data_dir, experiment.seed, experiment.limit)
    classifier, stream = prepare(experiment, data)
    requests = [encode(classifier.tokenizer, request.text, experiment.max_length) for request in stream]
    arms = {"nocache": None, "cache": experiment.cache}
    traces = measure(classifier, arms, requests, experiment.rounds, experiment.warmup)
    base, trace = traces["nocache"], traces["cache"]
    labels = np.array([classifier.labels.index(request.label) for request in stream])
    metrics = {
        **summary(base, trace, labels),
        "n": len(stream),
        "n_fit": classifier.n_fit,
        "n_data": len(data),
        "limit": experiment.limit,
        "n_labels": len(classifier.labels),
        "n_distinct": len({request.text for request in stream}),
        "mean_tokens": float(np.mean([inputs["input_ids"].shape[1] for inputs in requests])),
        "rounds": experiment.rounds,
    }
    return Outcome(_rows(stream, classifier.labels, base, trace), metrics)


def prepare(experiment: Experiment, data: Sequence[Labelled]) -> tuple[Classifier, Sequence[Labelled]]:
    """The model with its head, and the requests that are left to stream."""
    head, is_ready = experiment.head, experiment.head.kind == "ready"
    fit, stream = ([], data) if is_ready else split(data, head.fit_share, experiment.seed)
    loaded = load(experiment.model, "class" if is_ready else "states")
    check_length(loaded, experiment.max_length)
    if is_ready:
        return ready(loaded, stream), stream
    return fit_logistic(loaded, head.pool, fit, stream, experiment.max_length), stream


def _rows(
    stream: Sequence[Labelled], labels: Sequence[str], base: Trace, trace: Trace
) -> list[dict[str, str | int | float]]:
    """One row a request, of the first round."""
    return [
        {
            "id": request.id,
            "label": request.label,
            "answer_nocache": labels[base.answers[0, i]],
            "answer_cache": labels[trace.answers[0, i]],
            "rung": str(trace.served[0, i]),
            "nocache_ms": round(float(base.ms[0, i]), 4),
            "cache_ms": round(float(trace.ms[0, i]), 4),
        }
        for i, request in enumerate(stream)
    ]
