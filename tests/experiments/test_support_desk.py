"""The support-desk stream: the same everywhere, honest labels, the shares asked for, neither easy nor impossible."""

from __future__ import annotations

import hashlib
import re
from itertools import chain
from typing import Any

import pytest

from experiments.data.streams.support_desk import INTENTS, PHRASES, REPEAT_SHARE, Request, support_desk

CHECKSUM_SEED_0 = "8c7a5802a82771c81320896ee68afe36719f428f6b75cf968281c338190e7a3b"


def checksum(stream: list[Request]) -> str:
    lines = "\n".join(f"{request.label}\t{request.text}" for request in stream)
    return hashlib.sha256(lines.encode()).hexdigest()


def share_of_repeats(stream: list[Request]) -> float:
    return 1.0 - len({request.text for request in stream}) / len(stream)


def test_seed_gives_the_same_stream_everywhere() -> None:
    """A changed phrase or setting changes this sum, and every figure measured on the stream with it."""
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


def test_a_text_never_has_two_labels() -> None:
    stream = support_desk(5000)
    assert len({request.text for request in stream}) == len(set(stream))


def test_slots_are_known_and_used() -> None:
    texts = [*chain.from_iterable(PHRASES["templates"].values()), *PHRASES["contexts"]]
    assert set(chain.from_iterable(re.findall(r"\{(.*?)\}", text) for text in texts)) == set(PHRASES["fillers"])


def test_templates_are_many_and_belong_to_one_intent() -> None:
    templates = list(chain.from_iterable(PHRASES["templates"].values()))
    assert len(set(templates)) == len(templates)
    assert all(8 <= len(of_intent) <= 12 for of_intent in PHRASES["templates"].values())


def test_share_of_exact_repeats_is_near_what_is_asked() -> None:
    assert REPEAT_SHARE - 0.03 < share_of_repeats(support_desk(3000, seed=5)) < REPEAT_SHARE + 0.05


def test_intents_are_skewed_in_the_order_given() -> None:
    labels = [request.label for request in support_desk(5000)]
    assert labels.count(INTENTS[0]) > labels.count(INTENTS[-1])
    assert {request.label for request in support_desk(200, intents=INTENTS[:2])} == set(INTENTS[:2])


def test_empty_stream() -> None:
    assert support_desk(0) == []


@pytest.mark.parametrize(
    "arguments",
    [{"n": -1}, {"seed": -1}, {"intents": []}, {"intents": ["order_status"] * 2}, {"intents": ["small_talk"]}],
)
def test_bad_values_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|unknown intents"):
        support_desk(**arguments)


def test_labels_can_be_learned_but_not_trivially() -> None:
    """The nearest neighbour in bags of words, from the first half, is a cheap stand-in for a model."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.neighbors import KNeighborsClassifier

    stream = support_desk()
    labels = [request.label for request in stream]
    bags = TfidfVectorizer(token_pattern=r"[\w']+").fit_transform(request.text for request in stream)
    nearest = KNeighborsClassifier(n_neighbors=1, metric="cosine", algorithm="brute").fit(bags[:1000], labels[:1000])
    assert 0.75 < nearest.score(bags[1000:], labels[1000:]) < 0.99
