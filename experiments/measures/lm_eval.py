"""Measure `lm_eval`: an evaluation by lm-evaluation-harness, of the model alone and of the wrapped model.

The harness asks the same questions in all passes, by its class `HFLM`. A round has one pass of the model alone and
one with a new cache, in alternating order; the cache then serves the same evaluation *again*. *Columns* are rows times
columns, padding included, on which a layer runs. Times are of the whole evaluation. With `batch: auto` it first
looks for the largest batch that fits, by running a made-up one five times: that is in neither columns nor times.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, process_time
from typing import Any, Literal

import torch
from pydantic import Field

from experiments.data.made import make_choices, make_questions
from experiments.data.published import Choice, Question, read_openbookqa, read_squad
from experiments.measures.base import Experiment, Outcome
from experiments.measures.columns import columns_of
from experiments.methods.cached import Cached
from experiments.models.architectures import Dtype
from experiments.models.loading import load
from experiments.support.files import Folders
from experiments.support.section import Section
from llmcache import ConfigError, LLMCache

Docs = list[dict[str, Any]]

#: What both tasks share, in the harness's own words; a question has `text`, `choices` and `right`.
_TASK: Mapping[str, Any] = {
    "output_type": "multiple_choice",
    "test_split": "test",
    "fewshot_split": "train",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{right}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
_METRICS = ("acc", "acc_norm")


class Asked(Section):
    """The questions: of OpenBookQA, as the harness words them, or of SQuAD, each after its passage."""

    name: Literal["openbookqa", "squad_v2"]
    data: Literal["official", "made"] = "official"  # as in `experiments.tasks.workload.OfficialSettings`
    limit: int = Field(ge=1)  # number of questions; of SQuAD, each about another passage
    shots: int = Field(default=5, ge=0)  # answered questions of the training split before each question
    # `default`: the harness draws shots for each question anew. `first_n`: all questions have the same.
    sampler: Literal["default", "first_n"] = "default"
    batch: int | Literal["auto"] = 1  # rows a call
    max_batch: int = Field(default=16, ge=1)  # with `auto`


class LmEval(Experiment):
    model: str = Field(min_length=1)  # a causal language model, as in `experiments.tasks.workload.TaskSettings`
    task: Asked
    dtype: Dtype = "float32"  # of weights and states
    rounds: int = Field(default=1, ge=1)  # passes of each kind
    cache: dict[str, Any] = Field(default_factory=dict)  # settings of llmcache

    @property
    def name(self) -> str:
        return f"{self.task.name}-{self.model}-batch={self.task.batch}"

    def check(self) -> None:
        super().check()
        Cached.check(self.cache, "cache")


@dataclass(slots=True)
class Pass:
    """What one evaluation returned and took."""

    metrics: dict[str, float]  # by name
    logprobs: list[float]  # of every answer to every question, in order
    columns: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)  # of the cache
    again: "Pass | None" = None  # the same evaluation once more, with the same cache


def run(experiment: LmEval, folders: Folders) -> Outcome:
    loaded = load(experiment.model, "token", folders.models)
    loaded.model.to(getattr(torch, experiment.dtype))
    asked = experiment.task
    docs = {"train": _docs(asked, "train", folders), "test": _docs(asked, "test", folders)[: asked.limit]}
    with torch.inference_mode():
        loaded.model(torch.ones(1, 64, dtype=torch.long))  # the first call is slower
    rounds: list[dict[bool, Pass]] = []
    for number in range(experiment.rounds):
        order = (False, True) if number % 2 == 0 else (True, False)
        rounds.append({is_cached: _evaluate(experiment, loaded, docs, is_cached) for is_cached in order})
    rows = [
        {"round": number, "is_cached": int(is_cached), "columns": one.columns, "wall_s": one.wall_s, "cpu_s": one.cpu_s}
        for number, both in enumerate(rounds)
        for is_cached, one in both.items()
    ]
    figures = _figures(rounds)
    metrics = {
        "task": asked.name,
        "model": experiment.model,
        "dtype": experiment.dtype,
        "n": len(docs["test"]),
        "limit": asked.limit,
        **{name: getattr(asked, name) for name in ("shots", "sampler", "batch")},
        "threads": torch.get_num_threads(),
        **figures,
        "summary": [figures],
    }
    return Outcome(rows, metrics)


def _figures(rounds: Sequence[Mapping[bool, Pass]]) -> dict[str, Any]:
    plain, cached = rounds[0][False], rounds[0][True]
    again = _again(cached)
    pairs = list(zip(plain.logprobs, cached.logprobs, again.logprobs, strict=True))
    passes = {name: [of(both) for both in rounds] for name, of in _PASSES.items()}
    times = {
        f"{kind}_{name}": median(getattr(one, kind) for one in some) for kind in _TIMES for name, some in passes.items()
    }
    ratios = {
        f"{kind.removesuffix('_s')}_{'' if name == 'cached' else 'again_'}ratio": median(
            getattr(one, kind) / getattr(other, kind) for one, other in zip(passes["plain"], passes[name], strict=True)
        )
        for kind in _TIMES
        for name in ("cached", "again")
    }
    return {
        "requests": len(plain.logprobs),
        "columns_plain": plain.columns,
        "columns_cached": cached.columns,
        "columns_again": again.columns,
        "columns_ratio": plain.columns / cached.columns,
        **times,
        **ratios,
        **{f"{name}_plain": plain.metrics[name] for name in _METRICS},
        **{f"{name}_cached": cached.metrics[name] for name in _METRICS},
        "logprob_difference": max(max(some) - min(some) for some in pairs),
        **{name: cached.stats[name] for name in ("token_hit_rate", "hits", "n_misses", "bypassed", "errors")},
    }


def _again(cached: Pass) -> Pass:
    assert cached.again is not None
    return cached.again


_TIMES = ("wall_s", "cpu_s")
#: Passes of a round, by the ending of their figures.
_PASSES: Mapping[str, Callable[[Mapping[bool, Pass]], Pass]] = {
    "plain": lambda both: both[False],
    "cached": lambda both: both[True],
    "again": lambda both: _again(both[True]),
}

# -- one pass ----------------------------------------------------------------------------------------------------------


def _evaluate(experiment: LmEval, loaded: Any, docs: Mapping[str, Docs], is_cached: bool) -> Pass:
    """Evaluate the model alone, or in a new cache."""
    with ExitStack() as stack:
        # Wrapped once columns are counted: a layer's forward that is replaced later is an edit, and tried again.
        columns = stack.enter_context(columns_of(loaded.model))
        cache = stack.enter_context(LLMCache.wrap(loaded.model, config=experiment.cache)) if is_cached else None
        meter = _Meter(columns, (lambda: None) if cache is None else cache.restart_stats)
        found = meter.measure(lambda: _simple_evaluate(experiment, loaded, docs, meter))
        if cache is not None:
            found.stats = cache.stats().to_dict()
            meter = _Meter(columns, cache.restart_stats)
            found.again = meter.measure(lambda: _simple_evaluate(experiment, loaded, docs, meter))
    return found


class _Meter:
    """Measures columns and times, and leaves out what is set aside."""

    def __init__(self, columns: list[int], restart: Callable[[], None]) -> None:
        """Read `columns`; `restart` has the counts begin anew after what is set aside."""
        self._columns, self._restart = columns, restart
        self._aside = [0, 0.0, 0.0]

    def _now(self) -> list[Any]:
        return [self._columns[0], perf_counter(), process_time()]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out what is done within the block."""
        before = self._now()
        yield
        self._restart()
        self._aside = [old + now - then for old, now, then in zip(self._aside, self._now(), before, strict=True)]

    def measure(self, evaluate: Callable[[], Pass]) -> Pass:
        before = self._now()
        found = evaluate()
        taken = [now - then - out for now, then, out in zip(self._now(), before, self._aside, strict=True)]
        found.columns, found.wall_s, found.cpu_s = taken
        return found


def _simple_evaluate(experiment: LmEval, loaded: Any, docs: Mapping[str, Docs], meter: _Meter) -> Pass:
    try:
        from datasets import Dataset
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"measure: lm_eval needs lm-eval ({error}): pip install '.[integrations]'") from error

    class Metered(HFLM):  # type: ignore[misc]
        def _detect_batch_size(self, *args: Any, **kwargs: Any) -> Any:
            with meter.aside():
                return super()._detect_batch_size(*args, **kwargs)

    asked = experiment.task
    task = {
        **_TASK,
        "task": asked.name,
        "custom_dataset": lambda **_: {name: Dataset.from_list(rows) for name, rows in docs.items()},
        "fewshot_config": {"sampler": asked.sampler},
    }
    model = Metered(loaded.model, tokenizer=loaded.tokenizer, batch_size=asked.batch, max_batch_size=asked.max_batch)
    found = simple_evaluate(
        model,
        tasks=[task],
        num_fewshot=asked.shots,
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
        random_seed=experiment.seed,
        fewshot_random_seed=experiment.seed,
    )
    samples = sorted(found["samples"][asked.name], key=lambda sample: sample["doc_id"])
    return Pass(
        {name: float(found["results"][asked.name][f"{name},none"]) for name in _METRICS},
        [float(one) for sample in samples for one, _ in sample["filtered_resps"]],
    )


# -- questions ---------------------------------------------------------------------------------------------------------


def _docs(asked: Asked, split: Literal["train", "test"], folders: Folders) -> Docs:
    """Return the questions of a split: `text`, `choices` and `right`, the index of the right one."""
    if asked.name == "openbookqa":
        choices = make_choices(0) if asked.data == "made" else read_openbookqa(split, folders.data)
        return [_of_choice(one) for one in choices]
    where: Literal["train", "validation"] = "train" if split == "train" else "validation"
    return _of_passages(make_questions(0) if asked.data == "made" else read_squad(where, folders.data))


def _of_choice(one: Choice) -> dict[str, Any]:
    return {"text": one.stem, "choices": list(one.choices), "right": one.right}


def _of_passages(questions: Sequence[Question], n_choices: int = 4) -> Docs:
    """Return the first answered question of each passage; wrong choices are answers to the passage's others."""
    by_passage: dict[str, list[Question]] = {}
    for one in questions:
        if one.answers:
            by_passage.setdefault(one.context, []).append(one)
    docs = []
    for number, (passage, some) in enumerate(by_passage.items()):
        choices = list(dict.fromkeys(one.answers[0][0] for one in some))[:n_choices]
        if len(choices) == n_choices:
            right = number % n_choices  # the place says nothing
            choices.insert(right, choices.pop(0))
            docs.append({"text": f"{passage}\nQuestion: {some[0].text}\nAnswer:", "choices": choices, "right": right})
    return docs
