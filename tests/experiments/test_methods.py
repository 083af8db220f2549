"""Every method on every task: what it serves, from which source, and with which answer."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from experiments.measures.base import serve_once
from experiments.measures.serve import measure
from experiments.methods import METHODS, NOCACHE, MethodSettings
from experiments.methods.base import BYPASSED, COMPUTED, Method, twin
from experiments.methods.cached import Cached
from experiments.models.loading import UNTRAINED, encode, load
from experiments.support.files import Folders
from experiments.tasks import build, make_task
from experiments.tasks.wikitext import Read
from experiments.tasks.workload import Answer, Workload
from llmcache import LLMCache
from llmcache.errors import ConfigError

MADE = {"model": UNTRAINED, "data": "made", "limit": 24}
TASKS = {
    "stream": {"name": "stream", "model": UNTRAINED, "data": {"path": "support_desk", "limit": 200}, "limit": 40},
    "squad_v2": {"name": "squad_v2", "max_length": 96, **MADE},
    "openbookqa": {"name": "openbookqa", **MADE, "limit": 30},
    "wikitext": {"name": "wikitext", "window": 16, "repeats": {"whole": 0.3, "changed": 0.3}, **MADE},
}
#: Thresholds low enough that untrained encoders find neighbours.
OPTIONS: dict[str, dict[str, Any]] = {
    NOCACHE: {},
    "llmcache": {"tau": 0.9, "allow_unsafe": True},
    "doccache": {"threshold": 0.6},
    "exact_response": {},
    "semantic_response": {"threshold": 0.9, "encoder": UNTRAINED},
}


@cache
def workload_of(task: str) -> Workload:
    return build(make_task(TASKS[task]), Folders(), 0)


def make(method: str, workload: Any, **options: Any) -> Method:
    return MethodSettings.make({"method": method, **(options or OPTIONS[method])}).build(workload)


@cache
def outputs_of(task: str) -> list[Any]:
    """Return the plain model's outputs."""
    with torch.inference_mode():
        return [workload_of(task).module(**request.inputs) for request in workload_of(task).requests]


def is_same(one: Answer, other: Answer) -> bool:
    if isinstance(one, Read):
        return np.array_equal(one.tokens, other.tokens) and np.allclose(one.nll, other.nll, atol=1e-5, equal_nan=True)
    return bool(one == other)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in METHODS), ("llmcache", {"exact": True})])
def test_a_method_serves_what_it_says(name: str, options: dict[str, Any], task: str) -> None:
    """Two rounds agree, computed answers are the model's own, and others follow from their source."""
    workload = workload_of(task)
    own = [workload.answer(output, i) for i, output in enumerate(outputs_of(task))]
    method = make(name, workload, **options)
    answers, notes = serve_once(method, range(len(own)))
    held = method.nbytes, method.n_entries
    again, notes_again = serve_once(method, range(len(own)))
    assert notes == notes_again and all(map(is_same, answers, again)) and (method.nbytes, method.n_entries) == held
    assert notes[0].by == COMPUTED and notes[0].source is None and BYPASSED not in {note.by for note in notes}
    hits = [number for number, note in enumerate(notes) if note.is_hit]
    assert bool(hits) == (name != NOCACHE) and len(hits) < len(notes)
    assert held == (None, None) if name == NOCACHE else min(held) > 0
    tokens = [request.inputs["input_ids"].tolist() for request in workload.requests]
    for number, (answer, note) in enumerate(zip(answers, notes, strict=True)):
        source, alike = note.source, note.similarity
        if number not in hits:
            assert is_same(answer, own[number])
            continue
        assert source is not None and source < number
        if options or name == "exact_response":
            assert is_same(answer, own[number]) and note.by in ("exact", "response")
            assert (options and task == "openbookqa") or source == tokens.index(tokens[number])
        elif name == "doccache":  # the source's output, read as this request's own
            assert (
                alike is not None
                and alike >= 0.6
                and is_same(answer, workload.answer(outputs_of(task)[source], number))
            )
        elif name == "semantic_response":
            assert is_same(answer, workload.borrowed(answers[source])) and alike is not None and alike >= 0.9


@pytest.mark.parametrize("task", TASKS)
def test_methods_share_weights_and_nothing_else(task: str) -> None:
    workload = workload_of(task)
    parameters = dict(workload.module.named_parameters())
    assert all(parameter is parameters[name] for name, parameter in twin(workload.module).named_parameters())
    methods = [make(name, workload) for name in OPTIONS]
    with LLMCache.wrap(twin(workload.module)), torch.inference_mode():
        for method in methods:
            method.begin()
            method.ask(0)
        assert [method.last().by for method in methods] == [COMPUTED] * len(methods)
        assert not any("forward" in vars(part) for part in workload.module.modules())
    for method in methods:
        method.end()


def test_bypasses_and_evictions_are_told_apart() -> None:
    workload = workload_of("stream")
    blank = replace(workload.requests[0], inputs=encode(workload.tokenizer, "", 48))
    asked = workload.of([blank, *workload.requests[:3]])
    trace = measure(asked, {"x": Cached(asked, {"max_entries": 2})}, 1, 0)["x"]
    assert trace.served.tolist() == [["bypassed", "computed", "computed", "computed"]]
    assert trace.evicting.tolist() == [[False, False, False, True]] and trace.n_entries == 2


@pytest.mark.parametrize(
    ("method", "task", "options", "error"),
    [
        ("llmcache", "squad_v2", {"tau": 0.9, "label": "fast"}, "fast: tau=0.9 with .*allow_unsafe=True"),
        ("llmcache", "stream", {"payload": "cls"}, "llmcache-payload=cls: payload: the head reads 'mean' .*'cls'"),
        (
            "semantic_response",
            "stream",
            {"encoder": "no/such", "label": "a"},
            "a: model: 'no/such' could not be loaded",
        ),
        ("doccache", None, {}, "doccache-threshold=0.6: this method needs a model with a head"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_name(
    method: str, task: str | None, options: dict[str, Any], error: str
) -> None:
    loaded = load(UNTRAINED)
    bare = SimpleNamespace(module=loaded.model, tokenizer=loaded.tokenizer, payload=None)
    with pytest.raises(ConfigError, match=f"^methods: {error}"):
        make(method, workload_of(task) if task else bare, **options)
