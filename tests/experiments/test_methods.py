"""Every method on every task: requests served, their sources, and their answers."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from experiments.methods import METHODS, NOCACHE, MethodSettings
from experiments.methods.base import BYPASSED, COMPUTED, Method, Served, twin
from experiments.models.loading import UNTRAINED, load
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
on_every_task = pytest.mark.parametrize(
    "task", ["squad_v2", *(pytest.param(task, marks=pytest.mark.slow) for task in ("stream", "openbookqa", "wikitext"))]
)


@cache
def workload_of(task: str) -> Workload:
    return build(make_task(TASKS[task]), Folders(), 0)


def make(method: str, workload: Any, **options: Any) -> Method:
    return MethodSettings.make({"method": method, **(options or OPTIONS[method])}).build(workload)


@cache
def outputs_of(task: str) -> list[Any]:
    """Return the plain model's outputs."""
    workload = workload_of(task)
    with torch.inference_mode():
        return [workload.module(**request.inputs) for request in workload.requests]


def own_answers(task: str) -> list[Answer]:
    return [workload_of(task).answer(output, number) for number, output in enumerate(outputs_of(task))]


def is_same(one: Answer, other: Answer) -> bool:
    if isinstance(one, Read):
        return np.array_equal(one.tokens, other.tokens) and np.allclose(one.nll, other.nll, atol=1e-5, equal_nan=True)
    return bool(one == other)


def all_same(some: list[Answer], others: list[Answer]) -> bool:
    return all(is_same(one, other) for one, other in zip(some, others, strict=True))


def ask_all(method: Method, workload: Workload) -> tuple[list[Answer], list[Served]]:
    """Ask all requests in one cold round."""
    answers, notes = [], []
    with torch.inference_mode():
        method.begin()
        for number in range(len(workload.requests)):
            answers.append(method.ask(number))
            notes.append(method.last())
    return answers, notes


def serve(name: str, task: str, **options: Any) -> tuple[list[Answer], list[Served]]:
    """Run two rounds; assert that they agree, and that computed answers are the model's own."""
    workload = workload_of(task)
    method = make(name, workload, **options)
    answers, notes = ask_all(method, workload)
    held = method.nbytes, method.n_entries
    again, notes_again = ask_all(method, workload)
    method.end()
    assert all_same(answers, again) and notes == notes_again
    assert (method.nbytes, method.n_entries) == held
    assert notes[0].by == COMPUTED and notes[0].source is None
    for number, (note, own) in enumerate(zip(notes, own_answers(task), strict=True)):
        assert note.by != BYPASSED
        if note.is_hit:
            assert note.source is not None and note.source < number
            # In multiple choice, rows are served one by one.
            assert not notes[note.source].is_hit or (name, task) == ("llmcache", "openbookqa")
        else:
            assert is_same(answers[number], own)
    if name != NOCACHE:
        assert 0 < sum(note.is_hit for note in notes) < len(notes) and min(held) > 0
    return answers, notes


def test_every_method_is_tested() -> None:
    assert OPTIONS.keys() == METHODS.keys()


@on_every_task
def test_nocache_serves_nothing(task: str) -> None:
    _, notes = serve(NOCACHE, task)
    assert not any(note.is_hit for note in notes)
    method = make(NOCACHE, workload_of(task))
    assert (method.nbytes, method.n_entries) == (None, None)


@on_every_task
def test_llmcache_serves_near_requests(task: str) -> None:
    serve("llmcache", task)


@on_every_task
@pytest.mark.parametrize("options", [{"exact": True}, {"exact": True, "compression": "none"}])
def test_exact_repeats_change_no_answer(options: dict[str, Any], task: str) -> None:
    answers, notes = serve("llmcache", task, **options)
    assert all_same(answers, own_answers(task))
    assert {note.by for note in notes} == {COMPUTED, "exact"}


@on_every_task
def test_the_exact_response_cache_answers_what_was_asked_before(task: str) -> None:
    answers, notes = serve("exact_response", task)
    tokens = [request.inputs["input_ids"].tolist() for request in workload_of(task).requests]
    assert all_same(answers, own_answers(task))
    for number, note in enumerate(notes):
        first = tokens.index(tokens[number])
        assert note == (Served() if first == number else Served("response", first, 1.0))


@on_every_task
def test_doccache_lets_the_head_read_the_nearest_document(task: str) -> None:
    """The source's output is read as this request's own: as a span of this passage, for instance."""
    answers, notes = serve("doccache", task)
    for number, (answer, note) in enumerate(zip(answers, notes, strict=True)):
        if note.is_hit:
            assert note.by == "document" and note.similarity is not None and note.similarity >= 0.6
            assert is_same(answer, workload_of(task).answer(outputs_of(task)[int(note.source or 0)], number))


@on_every_task
def test_the_semantic_response_cache_gives_the_neighbours_answer_word_for_word(task: str) -> None:
    answers, notes = serve("semantic_response", task)
    assert notes[0].similarity is None  # nothing to compare with yet
    for answer, note in zip(answers[1:], notes[1:], strict=True):
        assert note.similarity is not None and (note.similarity >= 0.9) == note.is_hit
        if note.is_hit:
            assert is_same(answer, workload_of(task).borrowed(answers[int(note.source or 0)]))


@on_every_task
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


@pytest.mark.parametrize(
    ("method", "task", "options", "error"),
    [
        ("llmcache", "squad_v2", {"tau": 0.9, "label": "fast"}, "fast: tau=0.9 with .*allow_unsafe=True"),
        ("llmcache", "wikitext", {"tau": 0.9, "label": "fast"}, "fast: tau=0.9 with .*allow_unsafe=True"),
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
    with pytest.raises(ConfigError, match=f"^methods: {error}") as raised:
        make(method, workload_of(task) if task else bare, **options)
    assert "\n" not in str(raised.value)
