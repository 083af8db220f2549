"""What a classifier's server answered, held against what the model answers by itself."""

import json
from collections.abc import Sequence
from typing import Any

from experiments.measures.over_http.loops import OK, Load

#: Labels with their probabilities, the best one alone.
Best = tuple[str, float]


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
