"""Every method on every task: what it serves, from what, and what the answer is then."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from experiments.methods import METHODS, NOCACHE, MethodSettings
from experiments.methods.base import BYPASSED, COMPUTED, Method, Served, twin
from experiments.methods.cached import Cached
from experiments.methods.doccache import DocCache
from experiments.models.loading import UNTRAINED, load
from experiments.support.folders import Folders
from experiments.tasks import build, make_task
from experiments.tasks.wikitext import Read
from experiments.tasks.workload import Answer, Workload
from llmcache import LLMCache
from llmcache.errors import ConfigError

MADE = {"model": UNTRAINED, "data": "made", "limit": 24}
TASKS = {
    "stream": {"name": "stream", "model": UNTRAINED, "data": {"path": "support_desk", "limit": 400}, "limit": 60},
    "squad_v2": {"name": "squad_v2", "max_length": 96, **MADE},
    "openbookqa": {"name": "openbookqa", **MADE, "limit": 60},
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
on_every_task = pytest.mark.parametrize("task", TASKS)


@cache
def workload_of(task: str) -> Workload:
    return build(make_task(TASKS[task]), Folders(), 0)


def make(method: str, workload: Workload, **options: Any) -> Method:
    return MethodSettings.make({"method": method, **(options or OPTIONS[method])}).build(workload)


def serve(method: Method, workload: Workload) -> tuple[list[Answer], list[Served]]:
    """One cold round."""
    answers, notes = [], []
    with torch.inference_mode():
        method.begin()
        for number in range(len(workload.requests)):
            answers.append(method.ask(number))
            notes.append(method.last())
    return answers, notes


@pytest.mark.parametrize(("options", "may_step_aside"), [({}, False), ({"auto_bypass": True}, True)])
def test_it_steps_aside_only_where_options_say_so(options: dict[str, Any], may_step_aside: bool) -> None:
    """Experiments measure what the cache does, also where it does not pay; settings are kept as they were given."""
    workload = workload_of("stream")
    settings = MethodSettings.make({"method": "llmcache", **options})
    assert settings.options == options
    method = settings.build(workload)
    assert isinstance(method, Cached)
    method.begin()
    with torch.inference_mode():
        method.ask(0)
    method.end()
    assert bool(method.stats.cost) is may_step_aside


def is_same(one: Answer, other: Answer) -> bool:
    if isinstance(one, Read):
        return np.array_equal(one.tokens, other.tokens) and np.allclose(one.nll, other.nll, atol=1e-5, equal_nan=True)
    return bool(one == other)


def all_same(some: list[Answer], others: list[Answer]) -> bool:
    return all(is_same(one, other) for one, other in zip(some, others, strict=True))


def outputs_of(workload: Workload) -> list[Any]:
    with torch.inference_mode():
        return [workload.module(**request.inputs) for request in workload.requests]


def tokens_of(workload: Workload) -> list[bytes]:
    return [request.inputs["input_ids"].numpy().tobytes() for request in workload.requests]


def test_every_method_is_tested() -> None:
    assert OPTIONS.keys() == METHODS.keys()


@pytest.mark.slow
@on_every_task
@pytest.mark.parametrize("name", OPTIONS)
def test_a_round_is_cold_and_what_serves_was_computed(name: str, task: str) -> None:
    workload = workload_of(task)
    method = make(name, workload)
    answers, notes = serve(method, workload)
    held = method.nbytes, method.n_entries
    again, notes_again = serve(method, workload)
    method.end()
    assert all_same(answers, again) and notes == notes_again
    assert notes[0].by == COMPUTED and notes[0].source is None
    hits = [number for number, note in enumerate(notes) if note.is_hit]
    if name == NOCACHE:
        assert not hits and held == (None, None)
        return
    assert 0 < len(hits) < len(notes)
    assert (method.nbytes, method.n_entries) == held and min(held) > 0
    for number in hits:
        source = notes[number].source
        assert source is not None and source < number
        if task != "openbookqa" or name != "llmcache":  # there a question's rows are served one by one
            assert not notes[source].is_hit


@pytest.mark.slow
@on_every_task
@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_computed_is_the_models_own_answer(name: str, task: str) -> None:
    workload = workload_of(task)
    expected = [workload.answer(output, number) for number, output in enumerate(outputs_of(workload))]
    method = make(name, workload)
    answers, notes = serve(method, workload)
    method.end()
    assert not any(note.by == BYPASSED for note in notes)
    for answer, note, own in zip(answers, notes, expected, strict=True):
        assert note.is_hit or is_same(answer, own)


@pytest.mark.slow
@on_every_task
@pytest.mark.parametrize("options", [{"exact": True}, {"exact": True, "compression": "none"}])
def test_exact_repeats_change_no_answer(options: dict[str, Any], task: str) -> None:
    workload = workload_of(task)
    expected, _ = serve(make(NOCACHE, workload), workload)
    method = make("llmcache", workload, **options)
    answers, notes = serve(method, workload)
    method.end()
    assert all_same(answers, expected)
    assert {note.by for note in notes} == {COMPUTED, "exact"}


@on_every_task
def test_the_exact_response_cache_answers_what_was_asked_before(task: str) -> None:
    workload = workload_of(task)
    expected, _ = serve(make(NOCACHE, workload), workload)
    answers, notes = serve(make("exact_response", workload), workload)
    tokens = tokens_of(workload)
    assert all_same(answers, expected)
    for number, note in enumerate(notes):
        first = tokens.index(tokens[number])
        assert note == (Served() if first == number else Served("response", first, 1.0))


@on_every_task
def test_doccache_lets_the_head_read_the_nearest_document(task: str) -> None:
    """The answer is the source's output, read as this request's own: a span of this passage, for instance."""
    workload = workload_of(task)
    outputs = outputs_of(workload)
    answers, notes = serve(make("doccache", workload), workload)
    for number, (answer, note) in enumerate(zip(answers, notes, strict=True)):
        if note.is_hit:
            assert note.by == "document" and note.similarity is not None and note.similarity >= 0.6
            assert is_same(answer, workload.answer(outputs[int(note.source or 0)], number))


@on_every_task
def test_the_semantic_response_cache_gives_the_neighbours_answer_word_for_word(task: str) -> None:
    workload = workload_of(task)
    answers, notes = serve(make("semantic_response", workload), workload)
    assert notes[0].similarity is None  # there was nothing to compare with
    for answer, note in zip(answers[1:], notes[1:], strict=True):
        assert note.similarity is not None and (note.similarity >= 0.9) == note.is_hit
        if note.is_hit:
            assert is_same(answer, workload.borrowed(answers[int(note.source or 0)]))


def test_a_borrowed_text_is_the_neighbours_not_a_span_of_this_passage() -> None:
    workload = workload_of("squad_v2")
    answers, notes = serve(make("semantic_response", workload, threshold=-1.0, encoder=UNTRAINED), workload)
    assert {note.by for note in notes[1:]} == {"response"}
    assert len(set(answers)) == 1


def test_nbytes_by_hand() -> None:
    workload = workload_of("stream")
    method = make("doccache", workload, threshold=1.0)
    with torch.inference_mode():
        method.begin()
        assert (method.nbytes, method.n_entries) == (0, 0)
        method.ask(0)
    n = workload.requests[0].inputs["input_ids"].shape[1]
    width, n_tensors = 32, len(workload.requests[0].inputs)
    assert method.nbytes == 4 * width + 8 * n * n_tensors + 4 * n * width  # embedding, tokens and masks, final states
    assert method.n_entries == 1


@on_every_task
def test_a_twin_shares_weights_and_nothing_else(task: str) -> None:
    module = workload_of(task).module
    other = twin(module)
    parameters = dict(module.named_parameters())
    assert all(parameter is parameters[name] for name, parameter in other.named_parameters())
    with LLMCache.wrap(other):
        assert not any("forward" in vars(part) for part in module.modules())


def test_methods_do_not_meet() -> None:
    workload = workload_of("squad_v2")
    methods = [make(name, workload) for name in OPTIONS]
    with torch.inference_mode():
        for method in methods:
            method.begin()
            method.ask(0)
        assert [method.last().by for method in methods] == [COMPUTED] * len(methods)
    for method in methods:
        method.end()
    assert not any("forward" in vars(part) for part in workload.module.modules())


@pytest.mark.parametrize("task", ["squad_v2", "wikitext"])
def test_a_threshold_under_a_token_head_is_refused_by_name(task: str) -> None:
    with pytest.raises(ConfigError, match=r"^methods: fast: tau=0.9 with .*allow_unsafe=True") as raised:
        make("llmcache", workload_of(task), tau=0.9, label="fast")
    assert "\n" not in str(raised.value)


def test_another_payload_than_the_head_reads_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^methods: llmcache-payload=cls: payload: the head reads 'mean' .*'cls'"):
        make("llmcache", workload_of("stream"), payload="cls")


class Bare:
    """A workload whose model has no head."""

    payload = None

    def __init__(self) -> None:
        loaded = load(UNTRAINED)
        self.module, self.tokenizer = loaded.model, loaded.tokenizer


def test_doccache_needs_a_head() -> None:
    with pytest.raises(ConfigError, match=r"^methods: doccache-threshold=0.6: this method needs a model with a head"):
        make("doccache", Bare())  # type: ignore[arg-type]


def test_an_encoder_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^methods: semantic: model: 'no/such' could not be loaded"):
        make("semantic_response", workload_of("stream"), encoder="no/such", label="semantic")


def test_the_head_finds_what_it_looks_for_in_the_trunks_stead() -> None:
    method = make("doccache", workload_of("wikitext"))
    assert isinstance(method, DocCache)
    recall = method._recall
    assert recall.config is recall.trunk.config
    with pytest.raises(AttributeError):
        _ = recall.no_such_thing


def test_figures_stay_after_the_end() -> None:
    workload = workload_of("stream")
    method = make("llmcache", workload)
    assert isinstance(method, Cached)
    serve(method, workload)
    before = method.nbytes, method.n_entries
    method.end()
    assert (method.nbytes, method.n_entries) == before
