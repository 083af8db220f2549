"""The ways to answer with an encoder: PyTorch, ONNX Runtime, and the cache before either."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
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
from llmcache.reuse.calibration.inputs import batches, tokenised
from llmcache.reuse.calibration.risk_target import RiskTarget
from llmcache.reuse.observation import Observation

MAX_DROPS = (0.001, 0.005, 0.01, 0.02)
ALONE, SESSION = "the model alone", "the session alone"
ONNX, INT8 = "ONNX Runtime", "ONNX Runtime, int8"
EXACT, REUSE, DRAFT = "llmcache, exact repeats", "llmcache, reuse", "llmcache, reuse and draft"
#: As `open_session` opens it; the fusion takes several times as long on some processors.
_OPEN = 'session = onnxruntime.InferenceSession({!r}, disabled_optimizers=["SkipLayerNormFusion"])'
_QUANTISE = """import pathlib, onnxruntime, llmcache.lab
    llmcache.lab.quantise(pathlib.Path({!r}), pathlib.Path("int8.onnx"))
    """


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
        self._answers = find_answers(config.answer, wrapped.head, wrapped.model)
        if isinstance(self._answers, Embeddings):
            raise ConfigError(
                f"advice compares classes, labels and scores, and {type(wrapped.model).__name__} returns none of them: "
                "for embeddings, LLMCache.wrap(model) serves exact repeats"
            )
        self._max_drops = max_drops
        self._session = wrapped.model if isinstance(wrapped.model, CallableModel) else None
        super().__init__(core, config, requests, max_drop, seconds)

    @property
    def n_ways(self) -> int:
        return (4 if self._session is None else 3 - self._session.is_dynamic) + len(self._max_drops)

    def _ways(self) -> Iterator[Way]:
        name, code = (ALONE, "model(**inputs)") if self._session is None else (SESSION, "session.run(None, inputs)")
        yield self._replay(name, code, self._alone(), self._served, nbytes=self._nbytes, bound=0.0)
        engine, held = dict[str, str](), {"eager": self._nbytes}
        with TemporaryDirectory() as folder:
            if self._session is None:
                way = self._by_graph(ONNX, "float32", Path(folder))
                if way.mean_ms is None and find_missing() is None:
                    way = self._trunk_by_graph()
                yield way
                if find_missing() is None:
                    engine, held = {"engine": "onnxruntime"}, held | {"engine": way.nbytes}
            if self._session is None or not self._session.is_dynamic:
                way = self._by_graph(INT8, "int8", Path(folder))
                yield way
                if self._session is None and way.mean_ms is not None:
                    engine, held = engine | {"draft": "int8"}, held | {"draft": way.nbytes}
        exact = {name: value for name, value in engine.items() if name != "draft"}
        yield self._exact(exact, sum(held.values()) - held.get("draft", 0))
        yield from self._calibrated(engine, sum(held.values()))

    def _trunk_by_graph(self) -> Way:
        """Try ONNX Runtime under the model's own head, which could not be exported; nothing is reused."""
        engine = {"engine": "onnxruntime", "exact": False}
        with self._cached(**engine) as (core, run):
            return self._replay(ONNX, self._code(engine), run, self._served, core, nbytes=self._nbytes, bound=0.0)

    def _exact(self, engine: Mapping[str, str], nbytes: int) -> Way:
        """Try exact repeats, of the first half too."""
        with self._cached(**engine) as (core, run):
            coupling = self._wrapped.coupling.reason(self._wrapped.weights.digest())  # then a call's rows have one key
            with torch.inference_mode():
                for inputs in self._learned if coupling else (inputs for _, inputs in batches(self._learned)):
                    run(inputs)
            return self._replay(EXACT, self._code(engine), run, self._served, core, nbytes=nbytes, bound=0.0)

    def _calibrated(self, engine: Mapping[str, str], nbytes: int) -> Iterator[Way]:
        """Try calibrated reuse at each share; `engine` are its settings, `nbytes` those of all weights."""
        name, code = DRAFT if "draft" in engine else REUSE, self._code(engine)
        with self._cached(**engine) as (core, run):
            started, observed, problem = perf_counter(), list[Observation](), ""
            try:
                observed = core.learn().observe(self._learned, None)
            except (CalibrationError, ConfigError) as error:
                problem = str(error)
            observing_s = perf_counter() - started
            for drop in self._max_drops:
                way = Way(f"{name}, {100 * drop:g} %", f"{code}\n    cache.calibrate(texts, max_drop={drop:g})")
                needed = size_needed(drop, self._config.delta)
                if problem or needed > len(self._learned):
                    yield replace(way, problem=problem or f"its bound needs {needed:,} requests to learn from")
                else:
                    yield self._at(drop, way, core, run, observed, nbytes, observing_s)

    def _at(
        self,
        drop: float,
        way: Way,
        core: Core,
        run: Run,
        observed: Sequence[Observation],
        nbytes: int,
        learned_s: float,
    ) -> Way:
        """Return the figures of a cache that is emptied, and calibrated on requests that were observed."""
        calibrator = core.learn()
        calibrated = calibrator.reuse.calibrated
        core.clear()
        calibrated.keep(observed)
        started = perf_counter()
        try:
            made = calibrator.choose(observed, RiskTarget(drop, self._config.delta, "changed", "frozen", 0))
        except CalibrationError as error:
            return replace(way, problem=str(error))
        learning_s = learned_s + perf_counter() - started
        served = self._replay(way.name, way.code, run, self._served, core, nbytes=nbytes, learning_s=learning_s)
        if made.chosen is None:
            return replace(served, problem="nothing is reused")
        if (now := calibrated.calibration) is None or now.n_alarms or now.has_drifted:
            return replace(served, problem="the later requests were unlike the first, so its bound ended")
        return replace(served, bound=made.chosen.bound)

    def _by_graph(self, name: str, precision: Precision, folder: Path) -> Way:
        """Return the figures of the whole model in a session of ONNX Runtime."""
        try:
            run, nbytes, code = self._graph(precision, folder)
            way = self._replay(name, code, run, self._served, nbytes=nbytes, bound=0.0)
        except Exception as error:  # an exporter may raise anything
            return Way(name, "", problem=" ".join(str(error).split())[:200])
        if precision == "int8":
            n = len(self._served)
            way = replace(way, bound=share_upper(round(way.changed * n), n, self._config.delta))
        return way

    def _graph(self, precision: Precision, folder: Path) -> tuple[Run, int, str]:
        """Return what runs the whole model, the bytes of its weights, and the line to copy.

        Raises:
            Exception: No graph can be made.
        """
        if missing := find_missing():
            raise ConfigError(f"it needs {missing}: pip install 'llmcache-torch[onnx]'")
        if self._session is None:
            with self._cached() as (core, _):
                graph = core.make_answer_graph(precision)
            return lambda inputs: graph.compute(inputs)[0], graph.nbytes, _OPEN.format(str(graph.path))
        if self._session.path is None:
            raise ConfigError("the session was not read from a file")
        made = quantise(Path(self._session.path), folder / "int8.onnx")
        other = CallableModel(open_session(made), INT8, None, self._wrapped.tokenizer)
        return (
            lambda inputs: other.trunk.function(inputs, {}),
            other.nbytes,
            _QUANTISE.format(self._session.path) + _OPEN.format("int8.onnx"),
        )

    def _prepare(self, requests: Sequence[Any]) -> list[Mapping[str, Any]]:
        """Return the inputs of each row; `CalibrationError` if a request is not valid."""
        prepared: list[Mapping[str, Any]] = []
        for inputs in tokenised(requests, self._wrapped.tokenizer, self._wrapped.trunk):
            n_rows = len(inputs["input_ids"])
            if n_rows == 1:
                prepared.append(inputs)
            else:
                prepared += [_row_of(inputs, row, n_rows) for row in range(n_rows)]
        return prepared

    def _answer(self, output: Any) -> list[Any]:
        """Return the signatures of a call's rows."""
        return list(self._answers.sign(self._wrapped.read(output).float().cpu().numpy()))

    def _n_changed(self, answers: Sequence[Any]) -> int:
        signatures = np.stack(answers)
        if answers is self._expected:
            self._answers.learn(signatures)  # the range of scores
        return int((~self._answers.agree(signatures, np.stack(self._expected))).sum())

    def _code(self, engine: Mapping[str, Any]) -> str:
        """Return the line that wraps the model, with the settings of this cache that are plain values."""
        fields = CacheConfig.model_fields.items()
        own = {name: value for name, field in fields if (value := getattr(self._config, name)) != field.default}
        plain = {name: value for name, value in own.items() if isinstance(value, str | int | float | bool)}
        named = "".join(f", {name}={value!r}" for name, value in {**plain, **engine}.items())
        return f"cache = LLMCache.wrap({'model' if self._session is None else 'session'}, tokenizer=tokenizer{named})"


def _row_of(inputs: Mapping[str, Any], row: int, n_rows: int) -> dict[str, Any]:
    """Return the inputs of one row of a call; what has no row for each is passed on."""
    return {
        name: value[row : row + 1] if isinstance(value, Tensor) and len(value) == n_rows else value
        for name, value in inputs.items()
    }
