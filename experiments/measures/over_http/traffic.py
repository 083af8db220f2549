"""Inputs sent to servers, and the comparison of replies with the model's own answers.

The support desk gets single texts, longer ones, and several in one request.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from experiments.data.streams.support_desk import support_desk
from experiments.measures.over_http.client import OK, post
from experiments.measures.over_http.loops import Load

#: The best label and its probability.
Best = tuple[str, float]

EQUAL = 1e-5  # tolerance for a component of an embedding
PREDICT = "/predict"
SHARE_LONG, TEXTS_LONG = 0.05, 4  # share of inputs that join several texts, and texts in each
SHARE_BATCH, TEXTS_BATCH = 0.1, 8  # share of requests with several inputs, and inputs in each
#: Share of inputs that join several texts.
LONG_INPUTS = SHARE_LONG / (1 + SHARE_BATCH * (TEXTS_BATCH - 1))


@dataclass(frozen=True, slots=True)
class Asked:
    texts: tuple[str, ...]

    @property
    def request(self) -> bytes:
        """Bytes in the format of text-embeddings-inference, where a list of texts would be a pair."""
        return post(PREDICT, {"inputs": self.texts[0] if len(self.texts) == 1 else [[text] for text in self.texts]})


def mixed(texts: Sequence[str], seed: int) -> list[str]:
    rest, rng = iter(texts), random.Random(seed)
    return [" ".join([text, *islice(rest, TEXTS_LONG - 1)]) if rng.random() < LONG_INPUTS else text for text in rest]


class Traffic:
    """Mixed support desk requests that follow those of head and calibration."""

    def __init__(self, known: int, seed: int) -> None:
        """Skip the first `known` texts."""
        self._seed, self._taken = seed, known
        self._rng = random.Random(seed)

    def take(self, n: int) -> list[Asked]:
        sizes = [self._rng.random() for _ in range(n)]
        most = n * max(TEXTS_LONG, TEXTS_BATCH)
        mean = 1 + SHARE_LONG * (TEXTS_LONG - 1) + SHARE_BATCH * (TEXTS_BATCH - 1)
        texts = iter(self._texts(min(most, math.ceil(1.2 * mean * n) + 1000)))
        return [self._one(size, texts) for size in sizes]

    def _one(self, size: float, texts: Iterator[str]) -> Asked:
        if size < SHARE_LONG:
            return Asked((" ".join(next(texts) for _ in range(TEXTS_LONG)),))
        n = TEXTS_BATCH if size < SHARE_LONG + SHARE_BATCH else 1
        return Asked(tuple(next(texts) for _ in range(n)))

    def _texts(self, n: int) -> list[str]:
        stream = support_desk(self._taken + n, self._seed)[self._taken :]
        self._taken += n
        return [one.text for one in stream]


def embed(text: str, session: str | None = None) -> bytes:
    return post("/embed", {"inputs": text, "normalize": False, "truncate": True}, session=session)


def texts_of(seed: int) -> Iterator[str]:
    seen: set[str] = set()
    for number in count(seed):
        new = dict.fromkeys(one.text for one in support_desk(1000, number))
        yield from (text for text in new if text not in seen)
        seen |= new.keys()


def best_of(body: bytes) -> list[Best]:
    """Return the first label of each text, from a reply of `/predict` to one text or several."""
    told = json.loads(body)
    rows = [told] if isinstance(told[0], dict) else told
    return [(str(row[0]["label"]), float(row[0]["score"])) for row in rows]


def changed(load: Load, labels: Sequence[str]) -> dict[str, Any]:
    """Return the share of kept replies whose label differs from the model's; one text per request."""
    told = [
        best_of(reply.body)[0][0] != label
        for reply, label in zip(load.replies, labels, strict=False)
        if reply is not None and reply.status == OK
    ]
    return {"n_checked": len(told), "changed_answers": sum(told) / len(told) if told else None}
