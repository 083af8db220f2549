"""Hit decisions for many thresholds from one recorded pass without a cache.

What an `exact` rung and then a `semantic` rung would do depends on tokens, fingerprints and the order of requests only,
so one pass of the model is enough for a whole sweep. Requests that miss are stored, nothing is evicted, and an entry
fits any length (payload `cls`, `last` or `mean`). Speed cannot be replayed: it is measured live or left empty.

Sizes: N requests, F fingerprint width, K thresholds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.heads import Classifier
from experiments.measure import BYPASSED, COMPUTED, tokens_of
from experiments.models import Inputs
from experiments.progress import tracked
from llmcache.adapters import locate, special_ids
from llmcache.fingerprint import MeanEmbedding, View


@dataclass(frozen=True, slots=True)
class Recording:
    """One pass of the model alone.

    Attributes:
        keys: Valid token ids of each request, packed: equal for equal requests only.
        fingerprints: Mean embeddings, L2 norm 1, float32 (N, F); zero for a request without content.
        answers: Column of the highest logit (N,).
    """

    keys: Sequence[bytes]
    fingerprints: NDArray[np.float32]
    answers: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a cache would have done.

    Attributes:
        served: Rung that serves each request, else `computed` or `bypassed`, (N,).
        source: Number of the request whose state answers it, itself where it is computed, (N,).
        similarity: Cosine to the nearest stored request, (N,); NaN where nothing was stored yet.
    """

    served: NDArray[np.str_]
    source: NDArray[np.int64]
    similarity: NDArray[np.float32]


def record(classifier: Classifier, requests: Sequence[Inputs]) -> Recording:
    """Run the model alone over a stream.

    Args:
        classifier: Not wrapped; as before when this returns.
        requests: Tokenised, batch 1.
    """
    trunk = locate(classifier.module)
    fingerprint = MeanEmbedding()
    specials = torch.tensor(special_ids(trunk, classifier.tokenizer))
    captured: list[Tensor] = []

    def capture(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured.append(args[0] if args else kwargs["hidden_states"])

    keys, features, answers = [], [], []
    handle = trunk.layers[0].register_forward_pre_hook(capture, with_kwargs=True)
    try:
        with torch.inference_mode():
            for inputs in tracked(requests, len(requests), "Recording the model alone"):
                answers.append(int(classifier.module(**inputs).argmax(dim=-1)))
                ids = inputs["input_ids"]
                content = ~torch.isin(ids, specials) & inputs.get("attention_mask", torch.ones_like(ids)).bool()
                features.append(fingerprint.features(View(captured.pop(), content, ids))[0].numpy())
                keys.append(tokens_of(inputs).numpy().tobytes())
    finally:
        handle.remove()
    return Recording(keys, fingerprint.project(np.stack(features)), np.array(answers, dtype=np.int64))


def replay(recording: Recording, taus: Sequence[float]) -> list[Replay]:
    """Decide every request for every threshold.

    Args:
        recording: One pass of the model alone.
        taus: Least cosine similarity at which another request's state is reused; above 1: the exact rung alone.

    Returns:
        One replay a threshold, in the same order.
    """
    vectors, n, k = recording.fingerprints, len(recording.keys), len(taus)
    thresholds = np.array(taus, dtype=np.float32)
    rungs = np.arange(k)
    stored = np.zeros((k, n), dtype=bool)
    source = np.tile(np.arange(n), (k, 1))
    nearest = np.full((k, n), np.nan, dtype=np.float32)
    served = np.full((k, n), COMPUTED, dtype="<U8")
    seen: dict[bytes, list[int]] = {}
    for i, key in enumerate(recording.keys):
        if not vectors[i].any():  # nothing but special tokens takes no part in caching
            served[:, i] = BYPASSED
            continue
        if i:
            similarity = np.where(stored[:, :i], vectors[:i] @ vectors[i], -np.inf)
            best = similarity.argmax(axis=1)
            nearest[:, i] = np.where(stored[:, :i].any(axis=1), similarity[rungs, best], np.nan)
            is_near = stored[:, :i].any(axis=1) & (nearest[:, i] >= thresholds)
            source[is_near, i], served[is_near, i] = best[is_near], "semantic"
        for earlier in seen.setdefault(key, []):  # of equal requests, at most one is stored
            source[stored[:, earlier], i], served[stored[:, earlier], i] = earlier, "exact"
        stored[:, i] = source[:, i] == i
        seen[key].append(i)
    return [Replay(served[row], source[row], nearest[row]) for row in range(k)]
