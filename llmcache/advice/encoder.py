"""The ways to answer with an encoder: PyTorch, ONNX Runtime, and the cache before either."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from llmcache.advice.advice import Way
from llmcache.advice.trial import Run, Trial
from llmcache.calls.core import Core
from llmcache.config import CacheConfig
from llmcache.engines.onnx import Precision, find_missing, open_session, quantise
from llmcache.errors import CalibrationError, ConfigError
from llmcache.models.callables import CallableModel
from llmcache.reuse.answers import Embeddings, find_answers
from llmcache.reuse.calibration.bounds import share_upper
from llmcache.reuse.calibration.calibration import size_needed
from llmcache.reuse.calibration.inputs import tokenised
from llmcache.reuse.calibration.risk_target import RiskTarget
from llmcache.reuse.observation import Observation

MAX_DROPS = (0.001, 0.005, 0.01, 0.02)
ALONE, SESSION = "the model alone", "the session alone"
ONNX, INT8 = "ONNX Runtime", "ONNX Runtime, int8"
EXACT, REUSE, DRAFT = "llmcache, exact repeats", "llmcache, reuse", "llmcache, reuse and draft"
_EXPORT = "optimum-cli export onnx --model MODEL onnx/"
_QUANTISE = "optimum-cli onnxruntime quantize --onnx_model onnx/ -o int8/ --avx512_vnni"


class EncoderTrial(Trial):
    """A model that answers with a class, labels or a score: in PyTorch, or a session of ONNX Runtime."""

    def __init__(
        self,
        core: Core,
        config: CacheConfig,
        requests: Sequence[Any],
        max_drop: float,
        seconds: float,
        max_drops: Sequence[float] = MAX_DROPS,
    ) -> None:
        """Prepare requests; calibrated reuse is tried at each of `max_drops`. See `Trial`.

        Raises:
            ConfigError: As for `Trial`, or the model's answers are not of these kinds.
        """
        wrapped = core.wrapped
        self._answers, self._read = find_answers(config.answer, wrapped.head, wrapped.model), wrapped.read
        if isinstance(self._answers, Embeddings):
            raise ConfigError(
                f"advice compares classes, labels and scores, and {type(wrapped.model).__name__} returns none of them: "
                "for embeddings, LLMCache.wrap(model) serves exact repeats"
            )
        self._max_drops = max_drops
        self._is_session = isinstance(wrapped.model, CallableModel)
        super().__init__(core, config, requests, max_drop, seconds)

    @property
    def n_ways(self) -> int:
        return (3 if self._is_session else 4) + len(self._max_drops)

    def ways(self) -> Iterator[Way]:
        name, code = (SESSION, "session.run(None, inputs)") if self._is_session else (ALONE, "model(**inputs)")
        yield self._replay(name, code, self._alone(), self.served, nbytes=self._nbytes, bound=0.0)
        engine, held = dict[str, str](), self._nbytes
        with TemporaryDirectory() as folder:
            for name, code, precision, setting in (
                *(() if self._is_session else ((ONNX, _EXPORT, "float32", {"engine": "onnxruntime"}),)),
                (INT8, _QUANTISE, "int8", {"draft": "int8"}),
            ):
                way, size = self._by_graph(name, code, precision, Path(folder))
                if way is not None:
                    yield way
                if size and not self._is_session:
                    engine, held = engine | setting, held + size
        yield from self._with_cache(engine, held)

    def _with_cache(self, engine: Mapping[str, str], nbytes: int) -> Iterator[Way]:
        """Try the cache in front of what computes; `engine` are its settings, and `nbytes` those of all weights."""
        given = "session" if self._is_session else "model"
        exact = {name: value for name, value in engine.items() if name != "draft"}
        with self._cached(**exact) as (core, run):
            yield self._replay(EXACT, _code(given, exact), run, self.served, core, nbytes, bound=0.0)
        way = Way(DRAFT if "draft" in engine else REUSE, _code(given, engine))
        ways = {
            drop: replace(
                way,
                name=f"{way.name}, {100 * drop:g} %",
                code=f"{way.code}\n    cache.calibrate(texts, max_drop={drop:g})",
            )
            for drop in self._max_drops
        }
        with self._cached(**engine) as (core, run):
            started, observed, problem = perf_counter(), list[Observation](), ""
            try:
                observed = core.learn().observe(self.learned, None)
            except (CalibrationError, ConfigError) as error:
                problem = str(error)
            observing_s = perf_counter() - started
            for drop, way in ways.items():
                needed = size_needed(drop, self._config.delta)
                if problem or needed > len(self.learned):
                    yield replace(way, problem=problem or f"its bound needs {needed:,} requests to learn from")
                else:
                    yield self._calibrated(drop, way, core, run, observed, nbytes, observing_s)

    def _calibrated(
        self,
        drop: float,
        way: Way,
        core: Core,
        run: Run,
        observed: Sequence[Observation],
        nbytes: int,
        observing_s: float,
    ) -> Way:
        """Return the figures of a cache that is emptied, and calibrated on requests that were observed."""
        core.clear()
        for case in observed:
            case.generation = core.bank.purges.generation
        started = perf_counter()
        try:
            made = core.learn().choose(observed, RiskTarget(drop, self._config.delta, "changed", "frozen", 0))
        except CalibrationError as error:
            return replace(way, problem=str(error))
        learning_s = observing_s + perf_counter() - started
        bound, problem = (None, "nothing is reused") if made.chosen is None else (made.chosen.bound, "")
        told = {"bound": bound, "learning_s": learning_s, "problem": problem}
        return self._replay(way.name, way.code, run, self.served, core, nbytes, **told)

    def _by_graph(self, name: str, code: str, precision: Precision, folder: Path) -> tuple[Way | None, int]:
        """Return the figures of the whole model in a session of ONNX Runtime, and the bytes of its graph."""
        try:
            run, size = self._graph(precision, folder)
        except Exception as error:  # an exporter may raise anything
            return Way(name, code, problem=" ".join(str(error).split())[:200]), 0
        way = self._replay(name, code, run, self.served, nbytes=size, bound=0.0)
        if precision == "int8":
            n = len(self.served)
            way = replace(way, bound=share_upper(round(way.changed * n), n, self._config.delta))
        return way, size

    def _graph(self, precision: Precision, folder: Path) -> tuple[Run, int]:
        """Return what runs the whole model, and the bytes of its weights."""
        if missing := find_missing():
            raise ConfigError(f"it needs {missing}: pip install 'llmcache-torch[onnx]'")
        model = self._wrapped.model
        if not isinstance(model, CallableModel):
            with self._cached() as (core, _):
                graph = core.make_answer_graph(precision)
            return lambda inputs: graph.compute(inputs)[0], graph.nbytes
        if model.path is None:
            raise ConfigError("the session was not read from a file")
        made = quantise(Path(model.path), folder / "int8.onnx")
        other = CallableModel(open_session(made), INT8, None, self._wrapped.tokenizer)
        return lambda inputs: other.trunk.function(inputs, {}), sum(one.stat().st_size for one in folder.iterdir())

    def _prepare(self, requests: Sequence[Any]) -> list[Mapping[str, Tensor]]:
        made = tokenised(requests, self._wrapped.tokenizer, self._wrapped.trunk)
        return [
            {name: value[row : row + 1] for name, value in inputs.items()}
            for inputs in made
            for row in range(len(inputs["input_ids"]))
        ]

    def _answer(self, output: Any) -> list[Any]:
        return list(self._answers.sign(self._read(output).float().cpu().numpy()))

    def _n_changed(self, answers: Sequence[Any]) -> int:
        signatures = np.stack(answers)
        if answers is self._expected:
            self._answers.learn(signatures)  # the range of scores
        return int((~self._answers.agree(signatures, np.stack(self._expected))).sum())


def _code(given: str, settings: Mapping[str, str]) -> str:
    named = "".join(f', {name}="{value}"' for name, value in settings.items())
    return f"cache = LLMCache.wrap({given}, tokenizer=tokenizer{named})"
