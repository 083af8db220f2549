"""Calibrates a wrapped model: runs requests through it, and passes its answers to the parts that learn from them."""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from llmcache.calls.call import CachedForward
from llmcache.config import CacheConfig, DraftOptions
from llmcache.engines.onnx import OnnxTrunk
from llmcache.errors import CalibrationError, ConfigError, WrapError
from llmcache.memory.bank import Bank
from llmcache.memory.index import AutoIndex
from llmcache.memory.stores.tier import Tier
from llmcache.models.adapters import Trunk, device_of, special_ids, vocabulary_size
from llmcache.models.arguments import names_of, takes_dict
from llmcache.models.coupling import Coupling
from llmcache.models.heads import Head
from llmcache.models.hooks import Installed, ModelForward
from llmcache.models.packing import Payload
from llmcache.models.twin import make_replicas, run_uncached
from llmcache.models.weights import Weights
from llmcache.request.counters import Counters
from llmcache.request.rows import id_dtype
from llmcache.reuse.answers import Answers, Embeddings, Reading, find_answers
from llmcache.reuse.audit.audit import Audit
from llmcache.reuse.audit.recompute import RecomputeQueue
from llmcache.reuse.audit.recomputer import Recomputer
from llmcache.reuse.calibration.calibrated_reuse import CalibratedReuse
from llmcache.reuse.calibration.calibration import Calibration, check_size
from llmcache.reuse.calibration.inputs import Requests, batches, n_rows, numbered, tokenised
from llmcache.reuse.calibration.observer import Observer, collect
from llmcache.reuse.calibration.requirements import check_settings, refuse_coupled
from llmcache.reuse.calibration.risk_target import Metric, MetricName, RiskTarget
from llmcache.reuse.calibration.risk_target import Sources as Growth
from llmcache.reuse.calibration.sharing import SharedCalibration
from llmcache.reuse.calibration.token_vectors import TokenVectors
from llmcache.reuse.calibration.training import CalibrationFitter
from llmcache.reuse.content_gate import ContentGate
from llmcache.reuse.decide import NeighbourChooser, Semantic
from llmcache.reuse.draft import Draft
from llmcache.reuse.drafters import Drafter, GraphDrafter, ModelDrafter, check_model
from llmcache.reuse.fingerprint import Learned
from llmcache.reuse.observation import Observation
from llmcache.reuse.sources import Sources
from llmcache.support.context import setting
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

N_TIMED = 16  # requests that are computed once more, each alone


class Calibrator:
    """Calibrates the model of one cache. One thread at a time calibrates or observes; others wait."""

    def __init__(
        self,
        model: nn.Module,
        config: CacheConfig,
        trunk: Trunk,
        head: Head,
        payload: Payload,
        weights: Weights,
        coupling: Coupling,
        counters: Counters,
        bank: Bank,
        forward: CachedForward,
        installed: Installed,
        tokenizer: Any,
        answer_of: Reading,
        tier: Tier | None,
        make_graph: Callable[[], OnnxTrunk],
    ) -> None:
        """Install what a calibration needs. Nothing is reused approximately until the model is calibrated.

        Raises:
            ConfigError: A setting or the model rules out a calibration.
            UnsafeReuseError: The head answers token by token.
        """
        self._model, self._trunk, self._forward, self._coupling = model, trunk, forward, coupling
        self._installed, self._tokenizer = installed, tokenizer
        # Reentrant: the given iterable of requests may itself call `observe`.
        self._lock: AbstractContextManager[Any] = forkable(threading.RLock(), is_waited_for=False)
        check_settings(head, config)
        names = names_of(model.forward)
        if config.audit and names is not None and "input_ids" not in names:
            raise ConfigError(
                f"audit={config.audit.rate}: the audit recomputes a hit from input_ids, which {type(model).__name__}."
                f"forward() does not take ({', '.join(sorted(names)) or 'nothing'}): rename its argument or set audit=0"
            )
        tokens = TokenVectors(trunk, payload, partial(run_uncached, trunk.module))
        fingerprint = Learned(**config.fingerprint_component.options)
        fingerprint.bind(tokens.embed, tokens.think)
        answers = find_answers(config.answer, head, model)
        sources = Sources(AutoIndex, not payload.fits_any_length)
        bank.on_leave = sources.remove
        gate = _make_gate(trunk, config, tokenizer)
        chooser = NeighbourChooser(sources, answers, gate)
        self._weights, self.rest = weights, Weights(model, without=trunk.module)
        self.draft: Draft | None = None
        if config.draft is not None:
            if isinstance(answers, Embeddings):
                _check_draft_of_embedding(config.draft, payload)
                answers.least = config.draft.min_cosine
            device = torch.device("cpu") if config.device == "cpu" else device_of(trunk.module)
            make = partial(self._make_drafter, config.draft.model, answer_of, payload, answers, make_graph)
            packings, seen = forward.packings, forward.seen
            self.draft = Draft(answers, answer_of, packings, self._serving, make, device, seen, counters)
            self.draft.refresh()
        fitter = CalibrationFitter(bank, sources, fingerprint, tokens, chooser, answers, self.draft)
        self.calibrated = CalibratedReuse(fitter, self.rest, counters, config)
        self._observer = Observer(answers, answer_of, self.rest)
        self._observer.draft = self.draft
        semantic = Semantic(bank, sources, fingerprint, chooser, self.calibrated.in_force, self.rest, counters)
        self.semantic = semantic
        queue = RecomputeQueue(getattr(trunk.config, "pad_token_id", None) or 0, names)
        recomputer = Recomputer(trunk, weights, self.calibrated, self._observer, counters, self._compute_again, queue)
        self.audit = Audit(recomputer, semantic, config)
        self._observer.learner = self.audit
        self.sharing = None
        if config.share_calibration and tier is not None:
            special = special_ids(trunk, tokenizer)
            self.sharing = SharedCalibration(tier, self.calibrated, self.audit.alarm, counters, config, special)
        if not (answers.reads_payload and (model is trunk.module or takes_dict(model))):
            self._watch(model, trunk, forward)
        forward.learn(self._observer, semantic, self.audit, self.sharing)
        if self.draft is not None:
            forward.draft = self.draft
            forward.rungs = (*forward.rungs, self.draft)

    def calibrate(self, requests: Requests, labels: Sequence[Any] | None, risk_target: RiskTarget) -> Calibration:
        """Compute requests, learn from some of them, and choose the limit; see `LLMCache.calibrate`."""
        with self._lock:
            self._check_installed()
            self.calibrated.end()
            if self.draft is not None:
                self.draft.refresh()
            inputs = self._tokenised(requests)
            n = sum(map(n_rows, inputs))
            known = numbered(labels, n, self._model)
            check_size(n, risk_target.max_drop, risk_target.delta, risk_target.metric)
            # The first answer alone shows some errors: raise them before computing the rest takes minutes.
            first = collect(self._compute, self._observer, inputs[:1], is_learned_from=True)
            self.calibrated.check(first[0], known, risk_target)
            observed = self._observe_all(inputs)
            if self.draft is not None:  # rungs are weighed by times of single calls
                alone = [collect(self._compute, self._observer, [one])[0].seconds for one in inputs[:N_TIMED]]
                self.calibrated.fitter.model_s = median(alone)
            with self.calibrated.held():  # no purge in between
                made = self.calibrated.calibrate(self.calibrated.remaining(_labelled(observed, known)), risk_target)
            if self.sharing is not None:
                self.sharing.settle()
            return made

    def _tokenised(self, requests: Requests) -> list[Mapping[str, Any]]:
        """Return the model's inputs for each request. If rows of a call affect each other, none is batched."""
        inputs = list(tokenised(requests, self._tokenizer, self._trunk))
        digest = self._weights.digest()
        coupling = self._coupling.reason(digest) if self._weights.unreadable is None else ""
        refuse_coupled(coupling, inputs)
        return [dict(one) for one in inputs] if coupling else inputs  # `batches` joins `Tokenised` alone

    def _observe_all(self, inputs: Sequence[Mapping[str, Any]]) -> list[Observation]:
        """Compute requests, and return their observations in order, with the model's own where an engine computes."""
        observed = self._observe(inputs)
        if engine := self._forward.engine.name:  # what it changes counts
            for case, own in zip(observed, self._observe(inputs, engine), strict=True):
                case.own = own
        return observed

    def _observe(self, inputs: Sequence[Mapping[str, Any]], engine: str = "") -> list[Observation]:
        """Compute requests, batched by length, and return their observations in order.

        `engine`: the model itself computes them, under this engine's keys.
        """
        from tqdm.auto import tqdm

        namespace = self._forward.namespace.get()
        compute = partial(self._compute_again, namespace, engine, is_eager=True) if engine else self._compute
        learned: dict[str, Any] = {"is_learned_from": not engine}
        observed: list[Observation] = []
        with tqdm(total=len(inputs), desc="Calibrating", unit="request", disable=None) as bar:
            for numbers, some in batches(inputs):
                try:
                    cases = collect(compute, self._observer, [some], numbers[0], **learned)
                except CalibrationError:
                    if len(numbers) == 1:
                        raise
                    # Find the request that fails, or the model takes no batches: compute one by one.
                    singly = (collect(compute, self._observer, [inputs[n]], n, **learned) for n in numbers)
                    cases = [case for of_one in singly for case in of_one]
                if len(numbers) > 1:
                    for number, case in zip(numbers, cases, strict=True):
                        case.number = number
                observed += cases
                bar.update(len(numbers))
        return sorted(observed, key=lambda case: case.number)  # a stable sort: rows of one input stay in order

    def observe(self, requests: Requests, labels: Sequence[Any] | None) -> list[Observation]:
        """Compute requests and return their observations; see `LLMCache.observe`."""
        with self._lock:
            self._check_installed()
            observed = self._observe_all(self._tokenised(requests))
            return _labelled(observed, numbered(labels, len(observed), self._model))

    def forget(self, namespace: str | None) -> None:
        """Drop sources and collected requests of a namespace (None: all), and end a calibration with such sources."""
        self.calibrated.forget(namespace)
        self.calibrated.fitter.sources.forget(namespace)

    def bury(self, namespace: str, keys: Collection[str]) -> None:
        """Bury the sources among forgotten requests. Queued hits are audited all the same, as the rate needs it."""
        sources = self.semantic.sources
        for key in keys:
            if key in sources:
                sources.bury(key, namespace)
        if self.draft is not None:
            self.draft.forget()

    def check_engine(self) -> None:
        """End a calibration whose sources another engine computed: none of them would be found."""
        made, engine = self.calibrated.calibration, self._forward.engine.name
        if made is not None and made.engine != engine:
            self.calibrated.end()
            logger.warning(
                "llmcache: a calibration with the engine %r is left out, since it is %r now: call calibrate()",
                made.engine or "eager",
                engine or "eager",
            )

    def _serving(self, weights: str) -> Calibration | None:
        return self.semantic.serving(weights)

    def _make_drafter(
        self,
        other: nn.Module | None,
        read: Reading,
        payload: Payload,
        answers: Answers,
        make_graph: Callable[[], OnnxTrunk],
        before: Drafter | None,
    ) -> Drafter:
        """Return what drafts with the present weights; a graph made before is kept if it is of these."""
        if other is not None:
            check_model(other, self._model, self._trunk, read)
            return ModelDrafter(other, self._model, self._trunk, self._forward.arguments)
        graph = before.engine if isinstance(before, GraphDrafter) else None
        if graph is None or not (graph.n_graphs and graph.is_of(self._weights.digest())):
            graph = make_graph()
        kept = payload if answers.reads_payload else None
        return GraphDrafter(self._model, self._trunk, read, kept, graph, self.rest.digest())

    def _check_installed(self) -> None:
        if self._installed.is_empty:
            raise WrapError("this cache was unwrapped: wrap the model again, and calibrate that cache")

    def _compute(self, inputs: Mapping[str, Any], model: nn.Module | None = None) -> Any:
        """Return the model's output for tokenised inputs."""
        model = self._model if model is None else model
        with torch.inference_mode():
            return model(dict(inputs)) if takes_dict(model) else model(**inputs)

    def _compute_again(self, namespace: str, engine: str, inputs: Mapping[str, Any], is_eager: bool = False) -> Any:
        with setting(self._forward.namespace, namespace):
            return self._compute(inputs, self._without_hooks(engine, is_eager))

    def _without_hooks(self, engine: str, is_eager: bool) -> nn.Module:
        """Return a twin of the model that shares its tensors, without user hooks; keys are made for the engine.

        Its layers yield to calls. ONNX Runtime, if it is the engine, computes unless `is_eager`, and does not yield.
        """
        try:
            replicas = make_replicas(self._model)
        except ConfigError as error:  # this model has no faithful twin
            if is_eager:
                raise CalibrationError(
                    f"what the engine changes cannot be measured, as {error}: remove that, or use engine='eager'"
                ) from error
            return self._model
        trunk = self._trunk
        for part in {trunk.module, *trunk.layers}:
            replicas[part].register_forward_pre_hook(self._give_way)
        twin = replace(trunk, module=replicas[trunk.module], layers=tuple(replicas[layer] for layer in trunk.layers))
        forward, graph = self._forward.on(twin, engine), self._forward.engine
        if isinstance(graph, OnnxTrunk) and graph.n_graphs and graph.name == engine and not is_eager:
            forward.engine = graph
        if not self._observer.answers.reads_payload:
            self._watch(replicas[self._model], twin, forward, is_kept=False)
        return replicas[self._model]

    def _give_way(self, module: nn.Module, args: Any) -> None:
        if self.audit.worker.may_stop:
            self.audit.worker.give_way()

    def _watch(self, model: nn.Module, trunk: Trunk, forward: CachedForward, is_kept: bool = True) -> None:
        """Swap the model's forward, so that the observer gets its output.

        Raises:
            ConfigError: The model is its trunk, which returns states and no answer.
        """
        if model is trunk.module:
            raise ConfigError("answer: a model without a head returns states and no answer: set answer='auto'")
        swap = ModelForward(model, forward)
        if is_kept:
            self._installed.add(swap.remove)


def _labelled(observed: Sequence[Observation], labels: Sequence[Any]) -> list[Observation]:
    return [replace(case, label=label) for case, label in zip(observed, labels, strict=True)]


def _check_draft_of_embedding(options: DraftOptions, payload: Payload) -> None:
    """Refuse drafts that are not measured on the vector that a user reads."""
    if options.engine == "model":
        raise ConfigError("draft: another model's vectors cannot take the place of this one's; use draft='int8'")
    if not payload.fits_any_length:
        raise ConfigError(
            f"draft with payload={payload.name!r}: drafts of an embedding are measured on one vector; set payload "
            "'mean', 'cls' or 'last', whichever you read"
        )


def _make_gate(trunk: Trunk, config: CacheConfig, tokenizer: Any) -> ContentGate | None:
    if config.gate is False:
        return None
    if tokenizer is None:
        raise ConfigError(f"gate={config.gate}: the gate compares words, so give wrap() the tokenizer")
    options = {} if config.gate is True else config.gate
    try:
        return ContentGate(tokenizer, id_dtype(vocabulary_size(trunk)), **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"gate: {options}: {error}") from error


def make_claim(
    config: CacheConfig,
    max_drop: float | None,
    delta: float | None,
    metric: MetricName | Metric,
    sources: Growth | None,
    seed: int,
) -> RiskTarget:
    """Return the risk target of a calibration; arguments that are None come from the settings."""
    risk_target = RiskTarget(
        config.max_drop if max_drop is None else max_drop,
        config.delta if delta is None else delta,
        metric,
        config.sources if sources is None else sources,
        seed,
    )
    if config.recalibrate is not None and risk_target.metric != "changed":
        raise ConfigError(
            f"recalibrate={config.recalibrate} with metric {risk_target.name!r}: requests in service have no "
            "labels; use metric 'changed', or leave recalibrate out"
        )
    return risk_target
