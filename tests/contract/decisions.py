"""Makes the decisions of calibrated reuse on small streams, which `decisions.json` records.

    python -m tests.contract.decisions    writes decisions.json anew, after decisions were changed on purpose

The stream, the model's weights and every seed are the same on all machines. The model computes in float64, so that the
rounding of processors shows in the last bits of float32 only: risks differ by some 1e-6.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

from llmcache import LLMCache

FILE = Path(__file__).with_suffix(".json")
#: Tolerance of limits and risks. Kernels from SSE to AVX-512 differed by 5e-6.
ROUNDING = 2e-5
N_LATER, N_REPEATS = 60, 10
_N_TOPICS, _N_WORDS, _FIRST_WORD = 5, 12, 10  # words of each topic; id of the first one
_HIDDEN = 32
_INFINITE = 2.0  # an infinite risk in the file; other risks are probabilities

#: The model's problem type and number of outputs, by the kind of its answers.
_HEADS = {
    "class": ("single_label_classification", _N_TOPICS),
    "labels": ("multi_label_classification", _N_TOPICS),
    "score": ("regression", 1),
    "embedding": ("single_label_classification", _N_TOPICS),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One calibration, and the requests that follow it."""

    seed: int  # of the model and of all requests
    settings: Mapping[str, Any]
    answer: str = "class"
    n: int = 200  # requests to calibrate on
    calibrate: Mapping[str, Any] = field(default_factory=dict)  # arguments of `calibrate`, without labels
    n_rows: int = 1  # of a later call
    span: int = 40  # weights are up to this many 256ths; larger makes states less alike


CASES: Mapping[str, Case] = {
    "arguments": Case(1, {}, calibrate={"max_drop": 0.03, "delta": 0.2, "seed": 7, "metric": "accuracy"}),
    "batches": Case(2, {"max_drop": 0.1, "delta": 0.01}, n_rows=8),
    "learn": Case(3, {"learn": 200, "max_drop": 0.1}),
    "growing": Case(3, {"learn": 200, "max_drop": 0.1, "sources": "growing"}),
    "labels": Case(4, {"max_drop": 0.15}, "labels"),
    "score": Case(5, {"max_drop": 0.15}, "score"),
    "embedding": Case(6, {"max_drop": 0.15, "answer": "embedding"}, "embedding", span=70),
    "audit": Case(7, {"max_drop": 0.2, "audit": {"rate": 1.0, "in_background": False}}),  # each hit is drawn
}


def draw(n: int, seed: int) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Requests (n, 8) of six words between two special tokens, and the topic of each word (n, 6).

    A fifth of the words are of any topic, the others of the request's own.
    """
    rng = np.random.default_rng(seed)
    own = rng.integers(0, _N_TOPICS, (n, 1))
    topics = np.where(rng.random((n, 6)) < 0.2, rng.integers(0, _N_TOPICS, (n, 6)), own)
    words = _FIRST_WORD + _N_WORDS * topics + rng.integers(0, _N_WORDS, (n, 6))
    return torch.from_numpy(np.pad(words, ((0, 0), (1, 1)), constant_values=((0, 0), (1, 2)))), topics


def make_model(case: Case) -> Any:
    """A BERT with random weights, and a head that is fitted to the topics in closed form."""
    problem, n_outputs = _HEADS[case.answer]
    config = tf.BertConfig(
        vocab_size=_FIRST_WORD + _N_TOPICS * _N_WORDS,
        hidden_size=_HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        num_labels=n_outputs,
        problem_type=problem,
    )
    model: Any = tf.BertForSequenceClassification(config).double().eval()
    rng = np.random.default_rng(case.seed)
    inputs, topics = draw(400, 1000 + case.seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.from_numpy(rng.integers(-case.span, case.span + 1, tuple(weight.shape)) / 256))
        pooled = model.bert(inputs).pooler_output.numpy()
        counts = _counts(topics)
        if case.answer == "labels":
            aims = np.where(counts >= 2, 1.0, -1.0)
        elif case.answer == "score":
            aims = counts.argmax(axis=1)[:, None].astype(float)
        else:
            aims = np.eye(_N_TOPICS)[counts.argmax(axis=1)]
        centred, middle = pooled - pooled.mean(axis=0), aims.mean(axis=0)
        spread = centred.T @ centred
        solved = np.linalg.solve(spread + 0.01 * np.trace(spread) / _HIDDEN * np.eye(_HIDDEN), centred.T @ aims)
        weights = (64 * solved).round() / 64  # cuts off the processor's rounding
        model.classifier.weight.copy_(torch.from_numpy(weights.T))
        model.classifier.bias.copy_(torch.from_numpy((64 * (middle - pooled.mean(axis=0) @ weights)).round() / 64))
    return model


def decide(case: Case) -> dict[str, Any]:
    """Calibrate and serve; return the limit, and the rung and risk of each later request.

    `served` has one letter per request: `s` semantic, `e` exact, `-` computed; a capital if the answer is not the
    model's own.
    """
    model = make_model(case)
    first, topics = draw(case.n, 10 + case.seed)
    later = draw(N_LATER, 500 + case.seed)[0]
    stream = torch.cat([later, first[: N_REPEATS // 2], later[: N_REPEATS // 2]])
    read = _reading(case.answer)
    with torch.inference_mode():
        own = read(model(input_ids=stream).logits)
    settings = {"audit": 0, **case.settings, "auto_bypass": False}
    with LLMCache.wrap(model, **settings) as cache:
        if "learn" in settings:
            for part in first.split(5):
                cache(input_ids=part)
            cache.drain()  # the learned calibration is in force
        else:
            labels = _counts(topics).argmax(axis=1).tolist() if "metric" in case.calibrate else None
            cache.calibrate([{"input_ids": part} for part in first.split(50)], labels=labels, **case.calibrate)
        found = cache.calibration
        assert found is not None
        chosen = found.chosen
        assert chosen is not None
        served, risks = "", []
        for start in range(0, len(stream), case.n_rows):
            told = read(cache(input_ids=stream[start : start + case.n_rows]).logits)
            for outcome, one, other in zip(cache.last, told, own[start:], strict=False):
                letter = "-" if outcome.rung is None else outcome.rung[0]
                served += letter if one == other else letter.upper()
                risks.append(None if outcome.risk is None else min(outcome.risk, _INFINITE))
            cache.drain()
        audit = cache.stats().audit
        assert audit is not None
    return {
        "limit": chosen.limit,
        "n_limits": len(found.curve),
        **{name: getattr(found, name) for name in ("n_sources", "n_tested")},
        **{name: getattr(chosen, name) for name in ("hit_rate", "loss", "bound")},
        **{name: getattr(audit, name) for name in ("status", "n_drawn", "n_changed", "n_quarantined")},
        "served": served,
        "risks": risks,
    }


def check_same(found: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    """Compare decisions: numbers within `ROUNDING`; hits may differ only if the risk is as near to the limit.

    Raises:
        AssertionError: They differ.
    """
    limit = recorded["limit"]
    assert abs(found["limit"] - limit) <= ROUNDING, f"limit: {found['limit']}, not {limit}"
    rows = zip(found["served"], recorded["served"], found["risks"], recorded["risks"], strict=True)
    for number, (by, by_then, risk, risk_then) in enumerate(rows):
        if by != by_then:
            at_the_limit = risk_then is not None and abs(risk_then - limit) <= ROUNDING
            assert at_the_limit, f"request {number}: {by!r}, not {by_then!r}, at a risk of {risk_then}, limit {limit}"
            return  # storing and auditing may differ after this
        is_same = risk == risk_then if None in (risk, risk_then) else abs(risk - risk_then) <= ROUNDING
        assert is_same, f"request {number}: risk {risk}, not {risk_then}"
    for name in recorded.keys() - {"limit", "served", "risks"}:
        one, other = found[name], recorded[name]
        is_same = abs(one - other) <= ROUNDING if isinstance(other, float) else one == other
        assert is_same, f"{name}: {one}, not {other}"


def read_recorded() -> dict[str, dict[str, Any]]:
    """Return the recorded decisions, by the name of the case."""
    known: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return known


def _counts(topics: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Count the words of each request by topic (n, topics)."""
    counts: np.ndarray[Any, Any] = (topics[:, :, None] == np.arange(_N_TOPICS)).sum(axis=1)
    return counts


def _reading(answer: str) -> Callable[[torch.Tensor], list[Any]]:
    """Return how to read answers from logits: class or labels. Scores and embeddings are not compared."""
    if answer == "class":
        return lambda logits: logits.argmax(dim=-1).tolist()
    if answer == "labels":
        return lambda logits: (logits > 0).tolist()
    return lambda logits: [None] * len(logits)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 7) if isinstance(value, float) and value < inf else value


def _record() -> None:
    """Write the file: one case a line."""
    torch.set_num_threads(1)
    lines = []
    for name, case in CASES.items():
        decided = {key: _rounded(value) for key, value in decide(case).items()}
        lines.append(f"{json.dumps(name)}: {json.dumps(decided)}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    _record()
