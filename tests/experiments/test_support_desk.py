"""The support-desk stream: the same everywhere, honest labels, the shares asked for, neither easy nor impossible."""

from __future__ import annotations

import hashlib
import re
from dataclasses import fields
from itertools import chain
from typing import Any

import pytest

from experiments.data.streams.support_desk import INTENTS, PHRASES, Noise, Traffic, support_desk

CHECKSUM_SEED_0 = "8c7a5802a82771c81320896ee68afe36719f428f6b75cf968281c338190e7a3b"
QUIET = Noise(**{field.name: 0.0 for field in fields(Noise)})


def test_seed_gives_the_same_stream_everywhere() -> None:
    """A changed phrase or setting changes this sum, and every figure measured on the stream with it."""
    lines = "\n".join(f"{request.label}\t{request.text}" for request in support_desk())
    assert hashlib.sha256(lines.encode()).hexdigest() == CHECKSUM_SEED_0
    assert support_desk(50, seed=1) != support_desk(50, seed=2)
    assert support_desk(1000, seed=3)[:300] == support_desk(300, seed=3)
    assert support_desk(0) == []


def test_intents_labels_and_texts() -> None:
    stream = support_desk()
    assert len(INTENTS) >= 24
    assert {request.label for request in stream} == set(INTENTS)
    assert all(request.text == request.text.strip() != "" and "\n" not in request.text for request in stream)
    assert not any(mark in request.text for request in stream for mark in "{}[]#|")
    long = support_desk(5000)
    assert len({request.text for request in long}) == len(set(long))  # a text never has two labels


def test_templates_are_many_and_belong_to_one_intent_and_all_slots_are_used() -> None:
    templates = list(chain.from_iterable(PHRASES["templates"].values()))
    assert len(set(templates)) == len(templates)
    assert all(8 <= len(of_intent) <= 12 for of_intent in PHRASES["templates"].values())
    slots = [re.findall(r"\{(.*?)\}", text) for text in (*templates, *PHRASES["contexts"])]
    assert set(chain.from_iterable(slots)) == set(PHRASES["fillers"])


@pytest.mark.parametrize("share", [0.0, 0.15, 0.5])
def test_share_of_exact_repeats_is_near_the_setting(share: float) -> None:
    stream = support_desk(3000, seed=5, traffic=Traffic(repeat_share=share))
    assert share - 0.03 < 1.0 - len({request.text for request in stream}) / len(stream) < share + 0.05


def test_near_requests_reuse_paraphrases() -> None:
    def n_beginnings(near_share: float) -> int:
        stream = support_desk(1000, noise=QUIET, traffic=Traffic(repeat_share=0.0, near_share=near_share))
        return len({" ".join(request.text.split()[:4]) for request in stream})

    assert n_beginnings(0.95) < 0.7 * n_beginnings(0.0)


def test_intents_are_skewed_in_the_order_given() -> None:
    chosen = ("keep_order", "cancel_order", "order_status")
    traffic = Traffic(repeat_share=0.0, near_share=0.0, intent_offset=1.0)
    labels = [request.label for request in support_desk(1000, intents=chosen, traffic=traffic)]
    assert sorted(set(labels), key=labels.count, reverse=True) == list(chosen)


@pytest.mark.parametrize(
    ("noise", "is_as_asked"),
    [
        (QUIET, lambda text: text[0] == text[0].upper() and text[-1] in ".?"),
        (Noise(lower=1.0), str.islower),
        (Noise(lower=0.0, upper=1.0), str.isupper),
        (Noise(no_apostrophe=1.0), lambda text: "'" not in text),
        (Noise(no_punctuation=1.0), lambda text: text[-1] not in ".?!"),
    ],
)
def test_noise_does_what_it_says(noise: Noise, is_as_asked: Any) -> None:
    assert all(is_as_asked(request.text) for request in support_desk(200, noise=noise))


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        (support_desk, {"n": -1}),
        (support_desk, {"seed": -1}),
        (support_desk, {"intents": []}),
        (support_desk, {"intents": ["order_status"] * 2}),
        (support_desk, {"intents": ["small_talk"]}),
        (Noise, {"typo": 1.1}),
        (Noise, {"lower": -0.1}),
        (Noise, {"context": float("nan")}),
        (Traffic, {"repeat_share": 0.7, "near_share": 0.4}),
        (Traffic, {"intent_offset": 0.0}),
    ],
)
def test_bad_values_and_unknown_settings_are_refused(settings: Any, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|unknown intents"):
        settings(**values)
    with pytest.raises(TypeError, match="typos"):
        settings(typos=0.5)


def test_labels_can_be_learned_but_not_trivially() -> None:
    """The nearest neighbour in bags of words, from the first half, is a cheap stand-in for a model."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.neighbors import KNeighborsClassifier

    stream = support_desk()
    labels = [request.label for request in stream]
    bags = TfidfVectorizer(token_pattern=r"[\w']+").fit_transform(request.text for request in stream)
    nearest = KNeighborsClassifier(n_neighbors=1, metric="cosine", algorithm="brute").fit(bags[:1000], labels[:1000])
    assert 0.75 < nearest.score(bags[1000:], labels[1000:]) < 0.99
