"""What servers are asked, and how their answers are held against what the model answers by itself."""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from experiments.data.streams.support_desk import support_desk
from experiments.measures.over_http.client import post
from experiments.measures.over_http.loops import OK, Load

#: Labels with their probabilities, the best one alone.
Best = tuple[str, float]

EQUAL = 1e-5  # of a number of an embedding


def embed(text: str, session: str | None = None) -> bytes:
    """The request for the embedding of a text."""
    return post("/embed", {"inputs": text, "normalize": False, "truncate": True}, session=session)


def texts_of(seed: int) -> Iterator[str]:
    """Different texts, without an end."""
    seen: set[str] = set()
    for number in count(seed):
        new = dict.fromkeys(one.text for one in support_desk(1000, number))
        yield from (text for text in new if text not in seen)
        seen |= new.keys()


def best_of(body: bytes) -> list[Best]:
    """The first label of each text, of an answer of `/predict` to one text or to several."""
    told = json.loads(body)
    rows = [told] if isinstance(told[0], dict) else told
    return [(str(row[0]["label"]), float(row[0]["score"])) for row in rows]


def changed(load: Load, labels: Sequence[str]) -> dict[str, Any]:
    """Share of the answers that have another label than the model's, of those that were kept; one text a request."""
    told = [
        best_of(reply.body)[0][0] != label
        for reply, label in zip(load.replies, labels, strict=False)
        if reply is not None and reply.status == OK
    ]
    return {"n_checked": len(told), "changed_answers": sum(told) / len(told) if told else None}
