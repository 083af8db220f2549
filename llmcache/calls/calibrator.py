"""Calibrates a wrapped model: runs requests through it, and passes its answers to the parts that learn from them."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from llmcache.calls.call import CachedForward, Collecting
from llmcache.calls.wrapped import Wrapped
from llmcache.config import CacheConfig, DraftOptions
from llmcache.engines.onnx import OnnxGraph
from llmcache.errors import CalibrationError, ConfigError, WrapError
from llmcache.memory.bank import Bank
from llmcache.memory.index import AutoIndex
from llmcache.memory.stores.tier import Tier
from llmcache.models.adapters import Trunk, special_ids, vocabulary_size
from llmcache.models.arguments import names_of, takes_dict
from llmcache.models.hooks import Installed, ModelForward
from llmcache.models.packing import Payload
from llmcache.models.twin import make_replicas, run_uncached
from llmcache.models.weights import Weights
from llmcache.request.rows import id_dtype
from llmcache.reuse.answers import Answers, Embeddings, find_answers
from llmcache.reuse.approximate import Approximate
from llmcache.reuse.audit.audit import Audit
from llmcache.reuse.audit.recompute import RecomputeQueue
from llmcache.reuse.audit.recomputer import Recomputer
from llmcache.reuse.calibration.calibrated_reuse import CalibratedReuse
from llmcache.reuse.calibration.calibration import Calibration, check_size
from llmcache.reuse.calibration.inputs import Requests, batches, n_rows, numbered, tokenised
from llmcache.reuse.calibration.observer import Observer, collect
from llmcache.reuse.calibration.requirements import check_settings, refuse_coupled
from llmcache.reuse.calibration.risk_target import Growth, Metric, MetricName, RiskTarget
from llmcache.reuse.calibration.sharing import SharedCalibration
from llmcache.reuse.calibration.token_vectors import TokenVectors
from llmcache.reuse.calibration.training import CalibrationFitter
from llmcache.reuse.content_gate import ContentGate
from llmcache.reuse.decide import NeighbourChooser, Semantic
from llmcache.reuse.draft import Draft
from llmcache.reuse.drafters import Drafter, GraphDrafter, ModelDrafter, check_model, try_head
from llmcache.reuse.fingerprint import LearnedFingerprint
from llmcache.reuse.observation import Observation
from llmcache.reuse.search_cost import SearchCost
from llmcache.reuse.sources import Sources
from llmcache.support.context import scoped
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

N_TIMED = 16  # requests that are computed once more, each alone


class Calibrator:
    """Calibrates the model of one cache. One thread at a time calibrates or observes; others wait."""

    def __init__(
        self,
        wrapped: Wrapped,
        bank: Bank,
        forward: CachedForward,
        installed: Installed,
        tier: Tier | None,
        make_graph: Callable[[str], OnnxGraph],
    ) -> None:
        """Install what a calibration needs. Nothing is reused approximately until the model is calibrated.

        `make_graph` makes a draft's graph of the trunk; given the digest of the head, of the model.

        Raises:
            ConfigError: A setting or the model rules out a calibration.
            UnsafeReuseError: The head answers token by token.
        """
        self._wrapped, self._bank, self._forward, self._installed = wrapped, bank, forward, installed
        self._model, self._trunk, self._weights = wrapped.model, wrapped.trunk, wrapped.weights
        # Reentrant: the given iterable of requests may itself call `observe`.
        self._lock: AbstractContextManager[Any] = forkable(threading.RLock(), is_waited_for=False)
        config, model, trunk, counters = wrapped.config, wrapped.model, wrapped.trunk, wrapped.counters
        check_settings(wrapped.head, config)
        names = names_of(model.forward)
        if config.audit and names is not None and "input_ids" not in names:
            raise ConfigError(
                f"audit={config.audit.rate}: the audit recomputes a hit from input_ids, which {type(model).__name__}."
                f"forward() does not take ({', '.join(sorted(names)) or 'nothing'}): rename its argument or set audit=0"
            )
        tokens = TokenVectors(trunk, wrapped.payload, partial(run_uncached, trunk.module))
        fingerprint = LearnedFingerprint(tokens.embed, tokens.contextual, **config.fingerprint_component.options)
        answers = find_answers(
            config.answer, wrapped.head, model, None if config.draft is None else config.draft.min_cosine
        )
        sources = Sources(AutoIndex, wrapped.keeps_tokens)
        bank.watch(sources.remove)
        chooser = NeighbourChooser(sources, answers, _make_gate(trunk, config, wrapped.tokenizer))
        is_steady, may_answer = try_head(model, trunk, wrapped.read)
        self._head = Weights(model, trunk.module, has_values=is_steady)
        self._may_answer = may_answer and not answers.reads_payload  # logits, for the whole model
        semantic = Semantic(bank, sources, fingerprint, chooser, self._head, counters)
        draft = None
        if config.draft is not None:
            draft = self._make_draft(config.draft, answers, semantic, make_graph)
        fitter = CalibrationFitter(bank, sources, fingerprint, tokens, chooser, answers, draft, self._may_answer)
        calibrated = CalibratedReuse(fitter, semantic, counters, config)
        self._observer = Observer(answers, wrapped.read, self._head, draft, counters)
        queue = RecomputeQueue(getattr(trunk.config, "pad_token_id", None) or 0, names)
        recomputer = Recomputer(trunk, self._weights, calibrated, self._observer, counters, self._compute_again, queue)
        audit = Audit(recomputer, semantic, config)
        sharing = None
        if config.share_calibration and tier is not None:
            special = special_ids(trunk, wrapped.tokenizer)
            sharing = SharedCalibration(tier, calibrated, audit.alarm, counters, config, special)
        if not (answers.reads_payload and (model is trunk.module or takes_dict(model))):
            self._watch(model, trunk, forward)
        # With a draft the calibration has weighed searches, and rows that are not searched could not be drafted.
        search_cost = SearchCost() if config.auto_bypass and draft is None else None
        self.reuse = Approximate(calibrated, audit, sharing, search_cost)
        forward.use(self.reuse)

    def calibrate(self, requests: Requests, labels: Sequence[Any] | None, risk_target: RiskTarget) -> Calibration:
        """Compute requests, learn from some of them, and choose the limit; see `LLMCache.calibrate`."""
        with self._lock:
            self._check_installed()
            reuse = self.reuse
            reuse.calibrated.end()
            if reuse.draft is not None:
                reuse.draft.refresh()
            inputs = self._tokenised(requests)
            n = sum(map(n_rows, inputs))
            known = numbered(labels, n, self._model)
            check_size(n, risk_target.max_drop, risk_target.delta, risk_target.metric)
            # The first answer alone shows some errors: raise them before computing the rest takes minutes.
            first = collect(self._compute, self._observer, inputs[:1], is_learned_from=True)
            reuse.calibrated.check(first[0], known, risk_target)
            return self.choose(_labelled(self._observe_all(inputs), known), risk_target)

    def choose(self, observed: Sequence[Observation], risk_target: RiskTarget) -> Calibration:
        """Calibrate on requests that were observed."""
        reuse = self.reuse
        with self._lock:
            with reuse.held():  # no purge in between
                made = reuse.calibrated.calibrate(reuse.calibrated.remaining(observed), risk_target)
            if reuse.sharing is not None:
                reuse.sharing.settle()
            return made

    @property
    def head(self) -> str:
        """Digest of the weights outside the trunk, if logits answer for the whole model.

        Raises:
            ConfigError: They do not.
        """
        if not self._may_answer:
            raise ConfigError(
                "no graph can be made of the whole model: its head returns more than logits, or mixes rows"
            )
        return self._head.digest()

    def _tokenised(self, requests: Requests) -> list[Mapping[str, Any]]:
        """Return the model's inputs for each request. If rows of a call affect each other, none is batched."""
        inputs = list(tokenised(requests, self._wrapped.tokenizer, self._trunk))
        digest = self._weights.digest()
        coupling = self._wrapped.coupling.reason(digest) if self._weights.unreadable is None else ""
        refuse_coupled(coupling, inputs)
        return [dict(request) for request in inputs] if coupling else inputs  # `batches` joins `Tokenised` alone

    def _observe_all(self, inputs: Sequence[Mapping[str, Any]]) -> list[Observation]:
        """Compute requests, and return their observations in order, with the model's own where an engine computes."""
        observed = self._observe(inputs)
        if engine := self._forward.engine.name:  # what it changes counts
            for case, own in zip(observed, self._observe(inputs, engine), strict=True):
                case.own = own
        if self.reuse.draft is not None:  # rungs are weighed by times of single calls
            alone = [collect(self._compute, self._observer, [request])[0].seconds for request in inputs[:N_TIMED]]
            self.reuse.calibrated.fitter.model_s = median(alone)
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

    def _make_draft(
        self, options: DraftOptions, answers: Answers, semantic: Semantic, make_graph: Callable[[str], OnnxGraph]
    ) -> Draft:
        wrapped, forward = self._wrapped, self._forward
        if isinstance(answers, Embeddings):
            _check_draft_of_embedding(options, wrapped.payload)
        make = partial(self._make_drafter, options.model, answers, make_graph)
        draft = Draft(
            answers,
            wrapped.read,
            forward.rows.packings,
            semantic,
            make,
            wrapped.device,
            forward.model_call,
            wrapped.counters,
        )
        draft.refresh()
        return draft

    def _make_drafter(
        self,
        other: nn.Module | None,
        answers: Answers,
        make_graph: Callable[[str], OnnxGraph],
        before: Drafter | None,
    ) -> Drafter:
        """Return what drafts with the present weights; a graph made before is kept if it is of these."""
        read, payload = self._wrapped.read, self._wrapped.payload
        if other is not None:
            check_model(other, self._model, self._trunk, read)
            return ModelDrafter(other, self._model, self._trunk, self._forward.arguments)
        graph, head = before.engine if isinstance(before, GraphDrafter) else None, self._head.digest()
        if graph is not None and (not graph.n_graphs or graph.twin.head not in ("", head)):
            graph = None
        if graph is None or not graph.is_of(self._weights.digest()):
            try:
                graph = make_graph(head if self._may_answer else "")
            except Exception as error:  # an exporter may raise anything
                if not self._may_answer:
                    raise
                logger.info("llmcache: the draft leaves the head to the model, which could not be exported: %s", error)
                graph = make_graph("")
        kept = payload if answers.reads_payload else None
        return GraphDrafter(self._model, self._trunk, read, kept, graph, head)

    def _check_installed(self) -> None:
        if self._installed.is_empty:
            raise WrapError("this cache was unwrapped: wrap the model again, and calibrate that cache")

    def _compute(self, inputs: Mapping[str, Any], model: nn.Module | None = None) -> Any:
        """Return the model's output for tokenised inputs."""
        model = self._model if model is None else model
        with torch.inference_mode():
            return model(dict(inputs)) if takes_dict(model) else model(**inputs)

    def _compute_again(self, namespace: str, engine: str, inputs: Mapping[str, Any], is_eager: bool = False) -> Any:
        with scoped(self._forward.namespace, namespace):
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
        wrapped, graph = replace(self._wrapped, trunk=twin), self._forward.engine
        forward = CachedForward(wrapped, self._bank, twin_of=self._forward, engine=engine)
        forward.use(Collecting(self._observer))
        if isinstance(graph, OnnxGraph) and graph.n_graphs and graph.name == engine and not is_eager:
            forward.compute_by(graph)
        if not self._observer.answers.reads_payload:
            self._watch(replicas[self._model], twin, forward, is_kept=False)
        return replicas[self._model]

    def _give_way(self, module: nn.Module, args: Any) -> None:
        self.reuse.audit.worker.give_way()

    def _watch(self, model: nn.Module, trunk: Trunk, forward: CachedForward, is_kept: bool = True) -> None:
        """Swap the model's forward, so that the observer gets its output.

        Raises:
            ConfigError: The model is its trunk, which returns states and no answer.
        """
        if model is trunk.module:
            raise ConfigError("answer: a model without a head returns states and no answer: set answer='auto'")
        swap = ModelForward(model, forward, is_kept and self._may_answer)
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
