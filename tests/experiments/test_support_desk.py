"""The support-desk stream: the seed decides it, longer streams extend shorter ones, labels and texts are valid."""

from __future__ import annotations

import hashlib

from experiments.data.streams.support_desk import INTENTS, Request, support_desk

CHECKSUM_SEED_0 = "8c7a5802a82771c81320896ee68afe36719f428f6b75cf968281c338190e7a3b"


def checksum(stream: list[Request]) -> str:
    lines = "\n".join(f"{request.label}\t{request.text}" for request in stream)
    return hashlib.sha256(lines.encode()).hexdigest()


def test_seed_gives_the_same_stream_everywhere() -> None:
    """A changed phrase or setting changes this sum and every figure measured on the stream."""
    assert checksum(support_desk()) == CHECKSUM_SEED_0


def test_seeds_differ_and_longer_streams_begin_with_shorter_ones() -> None:
    assert support_desk(50, seed=1) != support_desk(50, seed=2)
    assert support_desk(1000, seed=3)[:300] == support_desk(300, seed=3)


def test_intents_labels_and_texts() -> None:
    stream = support_desk()
    assert len(INTENTS) >= 24
    assert {request.label for request in stream} == set(INTENTS)
    assert all(request.text == request.text.strip() != "" and "\n" not in request.text for request in stream)
    assert not any(mark in request.text for request in stream for mark in "{}[]#|")
