"""Builds a cache without `tau` from its parts. Rejects models and settings that do not fit together."""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from llmcache.calls.calibrator import Calibrator
from llmcache.calls.call import CachedForward, Off
from llmcache.calls.save import CALIBRATED, Saved, Section, save
from llmcache.calls.snapshots import Restoring
from llmcache.calls.wrapped import Wrapped
from llmcache.config import CacheConfig, PrefixOptions
from llmcache.engines.compiled import CompiledTrunk, make_buckets
from llmcache.engines.graphs import AnswerTwin, GraphEngine, GraphTwin
from llmcache.engines.onnx import OnnxGraph, Precision, engine_name, find_missing, is_faster
from llmcache.errors import ConfigError
from llmcache.memory.bank import Bank
from llmcache.memory.blocks.block_pool import BlockPool
from llmcache.memory.policies import POLICIES
from llmcache.memory.purges import Purges
from llmcache.memory.stores import MEMORY, STORES
from llmcache.memory.stores.base import Memory
from llmcache.memory.stores.seal import SECRET, Seal
from llmcache.memory.stores.tier import Tier
from llmcache.models.adapters import Trunk, device_of, find_others
from llmcache.models.callables import CallableTrunk
from llmcache.models.hooks import (
    GraphedModel,
    HeadSwap,
    Installed,
    Listener,
    LogitsSwap,
    Passed,
    Swap,
    find_lm_head,
    find_logits,
)
from llmcache.models.output_formats import OutputFormats
from llmcache.models.packing import Payload
from llmcache.models.sentences import SentenceSwap
from llmcache.request.bypass import CURES
from llmcache.request.rows import Scope
from llmcache.reuse.answers import Reading
from llmcache.reuse.approximate import Approximate
from llmcache.reuse.calibration.calibration import Calibration
from llmcache.reuse.call import Call, Rung
from llmcache.reuse.drafters import check_model
from llmcache.stats import EngineStats, Stats

logger = logging.getLogger("llmcache")

_SOURCE = "a."  # prefix of the name of a source that would have served a forgotten request: its entry stays


class Core:
    """The parts of one wrapped model's cache."""

    def __init__(
        self,
        model: nn.Module,
        config: CacheConfig,
        tokenizer: Any,
        answer_of: Reading,
        rungs: Sequence[Callable[[Bank], Rung]],
    ) -> None:
        """Wrap a model; see `LLMCache.wrap`."""
        self.wrapped = wrapped = Wrapped.of(model, config, tokenizer, answer_of)
        trunk, head = wrapped.trunk, wrapped.head
        if config.draft is not None and config.draft.engine == "model":
            check_model(config.draft.model, model, trunk, answer_of)
        self.tier = _open_tier(wrapped, self)
        # One budget, `max_bytes`: the bank may use half of it, blocks all that the bank does not use. Copies of K/V
        # caches are in the bank.
        purges = Purges()
        self.blocks = _make_blocks(wrapped, purges, lambda: self.bank.nbytes)
        has_no_blocks = self.blocks is None or (wrapped.causal.copies and config.prefix is not None)
        max_bytes = config.max_bytes if has_no_blocks else max(1, config.max_bytes // 2)
        make_way = None if self.blocks is None else self.blocks.make_way
        self.bank = Bank(lambda: config.policy.build(POLICIES), max_bytes, config.max_entries, make_way, purges)
        self.installed = Installed()
        self._calibrator: Calibrator | None = None
        self._graphs: GraphEngine | None = None
        self._n_failed = 0  # engines that could not be made
        own = [_make_own(make, self.bank) for make in rungs]
        self.forward = CachedForward(wrapped, self.bank, self.blocks, self.tier, own)
        self.installed.add(self.forward.remove)
        try:
            if self.blocks is not None and (lm_head := find_lm_head(model, trunk)) is not None:
                self.installed.add(
                    HeadSwap(lm_head, self.forward, self.forward.n_read.set, self.forward.distinct).remove
                )
                if (logits := find_logits(lm_head)) is not None:
                    self.installed.add(LogitsSwap(logits, self.forward, self.forward.distinct).remove)
            if head.pooled is not None and not wrapped.keeps_tokens:
                swap = SentenceSwap(head.pooled.parent, self.forward, self.forward.pooled)
                self.installed.add(swap.remove)
            pass_others(model, trunk, self.forward, self.installed)
            if config.engine.name != "eager" and model is not trunk.module:
                self.installed.add(GraphedModel(model, self.forward).remove)
            self.build_engine()
            if config.learn is not None or config.share_calibration:
                self.learn()
        except BaseException:
            self.installed.remove()
            raise

    @property
    def reuse(self) -> Off | Approximate:
        """Approximate reuse."""
        return self.forward.reuse

    @property
    def rungs(self) -> Sequence[Rung]:
        """The rungs, safest first."""
        return (*self.forward.rows.rungs, *self.reuse.rungs)

    @property
    def trunk(self) -> Trunk:
        """The trunk of the model."""
        return self.wrapped.trunk

    @property
    def payload(self) -> Payload:
        """The hidden states that entries keep."""
        return self.wrapped.payload

    def learn(self) -> Calibrator:
        """Return the calibrator, created at the first call."""
        if self._calibrator is None:
            make_graph = partial(self._make_onnx, "int8")
            self._calibrator = Calibrator(self.wrapped, self.bank, self.forward, self.installed, self.tier, make_graph)
        return self._calibrator

    def compile(
        self,
        lengths: Sequence[int],
        rows: Sequence[int],
        mode: str | None,
        backend: str | Callable[..., Any],
        max_padding: float,
    ) -> None:
        """Compile graphs and compute with them from now on; see `LLMCache.compile`."""
        if isinstance(self.wrapped.trunk.module, CallableTrunk):
            raise ConfigError("compile: a callable or a session has no modules to compile; hand over a compiled one")
        forward, buckets = self.forward, make_buckets(lengths, rows, self.wrapped.trunk.config)
        twin = self._make_twin()
        self._graphs = CompiledTrunk(twin, forward.eager, buckets, mode, backend, max_padding)
        forward.compute_by(self._graphs)
        self.reuse.check_engine(forward.engine.name)

    def build_engine(self, is_sure: bool = False) -> None:
        """Make the graph of the setting `engine` for the present weights; see `LLMCache.build_engine`.

        `is_sure`: with `auto`, take it even if it is not faster.
        """
        forward, options, draft = self.forward, self.wrapped.config.engine, self.wrapped.config.draft
        is_drafting = draft is not None and draft.engine == "onnxruntime"
        if options.name == "eager" and not is_drafting:
            return
        missing = find_missing()
        if missing and not (options.name == "auto" and not is_drafting):
            asked = "draft='int8'" if is_drafting else "engine='onnxruntime'"
            raise ConfigError(f"{asked} needs {missing}: pip install 'llmcache-torch[onnx]'")
        if options.name == "eager" or missing:
            return
        self._graphs = None
        try:
            made = self._make_onnx("float32")
            if is_sure or options.name == "onnxruntime" or is_faster(made):
                self._graphs = made
        except Exception as error:  # an exporter may raise anything
            self._n_failed += 1
            logger.warning("llmcache: calls run eagerly, since no graph of ONNX Runtime could be made: %s", error)
        forward.compute_by(self._graphs)
        self.reuse.check_engine(forward.engine.name)

    def _make_twin(self, head: str = "") -> GraphTwin:
        """Return a twin of the trunk; given the digest of a head, of the model."""
        of = self.wrapped
        about = of.trunk, of.weights, of.coupling, of.causality
        return AnswerTwin(of.model, *about, of.read, head) if head else GraphTwin(*about)

    def make_answer_graph(self, precision: Precision) -> OnnxGraph:
        """Return a graph of the whole model, which returns logits; the exporter may raise anything.

        Raises:
            ConfigError: The head cannot be part of a graph, or a setting rules out a calibration.
        """
        return self._make_onnx(precision, self.learn().head)

    def _make_onnx(self, precision: Precision, head: str = "") -> OnnxGraph:
        return OnnxGraph(self._make_twin(head), self.forward.eager, self.wrapped.config.engine.folder, precision)

    def stats(self) -> Stats:
        """Return counters since wrapping or `restart_stats`, and the present contents of the cache."""
        bank, blocks, last = self.bank, self.blocks, self.wrapped.trunk.depth - 1
        counted = self.wrapped.counters.snapshot(
            n_entries={last: len(bank)},
            n_evicted={last: bank.n_evicted},
            n_expelled={last: bank.n_expelled},
            n_stored=len(bank) + (0 if blocks is None else blocks.n_tails),
            nbytes=bank.nbytes,
            nbytes_by_layer={last: bank.nbytes},
            max_nbytes_by_layer={last: bank.max_bytes},
            index_nbytes=self.reuse.index_nbytes,
            n_blocks=0 if blocks is None else len(blocks),
            n_blocks_evicted=0 if blocks is None else blocks.n_evicted,
            prefix_nbytes=0 if blocks is None else blocks.nbytes,
            prefix_max_nbytes=0 if blocks is None else blocks.max_bytes - bank.nbytes,
            audit=self.reuse.audit_stats(),
            store=None if self.tier is None else self.tier.stats(),
            engine=self._engine_stats(),
        )
        by_layer = {last: n_hits} if (n_hits := counted.n_layers_skipped // self.wrapped.trunk.depth) else {}
        return replace(counted, hits_by_layer=by_layer, reuses_by_layer=by_layer)

    def prefill(self, prompts: Iterable[Sequence[int]]) -> int:
        """Compute prompts with their K/V; return how many of their first tokens are held. See `LLMCache.prefill`."""
        forward, n_held = self.forward, 0
        if (prefix := forward.prefix) is None or self.wrapped.config.prefix is None:
            raise ConfigError("prefill: this cache holds no prefixes: wrap a causal model, without prefix=False")
        for ids in prompts:
            inputs = {"input_ids": torch.tensor([ids], device=device_of(self.trunk.module)), "use_cache": True}
            run = partial(self.trunk.module, **inputs)
            with torch.inference_mode():
                run()
                if (reason := forward.last[0].bypassed) is not None:
                    raise ConfigError(f"prefill: not kept ({reason}): {CURES[reason]}")
                call = forward.prepared.look_up(run)
            if isinstance(call, Call):
                plan = call.plan
                n_held += (
                    plan.n_known if isinstance(plan, Restoring) else prefix.n_held(call.rows[0], call.blocks_scope)
                )
        return n_held

    def clear(self, namespace: str | None = None) -> int:
        """Forget a namespace (None: all) and any calibration with sources in it; return the number of requests.

        Raises:
            StoreError: The store could not be purged. Memory has been purged all the same.
        """
        if namespace is None:
            self.recheck()
        if self.tier is not None:
            return self.tier.purge(namespace)
        return self.drop(namespace)

    def recheck(self) -> None:
        """Hash all weights again in the next call: an edit may have left no trace."""
        self.wrapped.weights.recheck()
        self.reuse.recheck()

    def forget(self, calls: Iterable[Callable[[], object]]) -> int:
        """Forget the entries and blocks that may serve calls, all of one namespace; return how many requests were held.

        Raises:
            StoreError: As `clear`.
        """
        named: dict[Scope, list[str]] = {}
        for call in calls:
            opened = self.forward.prepared.look_up(call)
            if isinstance(opened, Call):
                names = self._names_of(opened)
                for scope in {opened.scope, opened.blocks_scope}:
                    named.setdefault(scope, []).extend(names)
        if not named:
            return 0
        namespace = next(iter(named)).namespace
        if self.tier is not None:
            return self.tier.forget(namespace, named)
        return self.drop_names(namespace, [name for names in named.values() for name in names])

    def _names_of(self, call: Call) -> list[str]:
        """Return the names of all that may serve a call: entries, blocks, and sources that would serve its rows."""
        sources = (f"{_SOURCE}{key}" for key in self.reuse.sources_of(call))
        return [*call.path.names(call), *sources]

    def restart_stats(self) -> None:
        """Reset the counts of requests, hits and times."""
        self.wrapped.counters.restart()

    def drop(self, namespace: str | None) -> int:
        """Forget a namespace in memory (None: all), not in the store; return the number of requests."""
        self.forward.follower.discard(namespace)
        with self.reuse.held():
            n_requests = self.bank.clear(namespace)
            self.reuse.forget(namespace)
        self.reuse.forget_waiting(namespace)
        return n_requests + (0 if self.blocks is None else self.blocks.clear(namespace))

    def drop_names(self, namespace: str, names: Sequence[str]) -> int:
        """Forget entries and blocks in memory by name, and bury sources, not in the store; return how many requests."""
        self.forward.follower.discard(namespace)
        every = {name.partition(".")[2] for name in names}
        keys = [name.partition(".")[2] for name in names if not name.startswith(_SOURCE)]
        n_requests = self.bank.forget(keys) + (0 if self.blocks is None else self.blocks.forget(keys))
        self.reuse.bury(namespace, every)
        return n_requests

    def namespaces(self) -> set[str]:
        """Return the namespaces with entries or blocks in memory."""
        return {*self.bank.namespaces(), *(() if self.blocks is None else self.blocks.namespaces())}

    def save(self, folder: str | Path, config: CacheConfig) -> None:
        """See `LLMCache.save`."""
        numbers = None if self.tier is None else self.tier.numbers()  # read first: a purge may follow
        self.forward.follower.settle()
        kinds = {name: kinds.state() for name, kinds in self._kinds().items()}
        save(folder, self.wrapped, config, self._sections(), kinds, numbers)

    def restore(self, saved: Saved) -> None:
        """Fill the empty cache from a save, except namespaces purged in its store since."""
        sections = self._sections()
        if CALIBRATED in saved.sections:
            sections[CALIBRATED] = self.learn().reuse.calibrated
        saved.restore(self.wrapped.payload.name, sections)
        if self.forward.snapshots is not None:
            self.forward.snapshots.notice()
        for name, kinds in self._kinds().items():
            for described in saved.manifest.kinds.get(name, ()):
                kinds.add_described(*described)
        if self.reuse.calibrated is not None:
            self._keep_engine_of(self.reuse.calibrated.calibration)
            self.reuse.check_engine(self.forward.engine.name)
        if self.tier is not None:
            numbers = saved.manifest.numbers or {}
            for name in self.namespaces() - {*numbers}:
                self.drop(name)
            self.tier.expect(numbers)
            self.tier.follow()

    def _keep_engine_of(self, made: Calibration | None) -> None:
        """With `auto`, take the engine of a restored calibration, faster or not: no other finds its sources."""
        if made is None or self.wrapped.config.engine.name != "auto":
            return
        if not made.engine:
            self._graphs = None
            self.forward.compute_by(None)
        elif not (self.forward.engine.name or find_missing()) and made.engine == engine_name():
            self.build_engine(is_sure=True)

    def _sections(self) -> dict[str, Section]:
        sections: dict[str, Section] = {"bank": self.bank}
        if self.blocks is not None:
            sections["blocks"] = self.blocks
        if self.reuse.calibrated is not None and self.reuse.calibrated.calibration is not None:
            sections[CALIBRATED] = self.reuse.calibrated
        return sections

    def _kinds(self) -> dict[str, OutputFormats[Any]]:
        prefix = self.forward.prefix
        return {"packings": self.forward.rows.packings} | ({} if prefix is None else {"prefix": prefix.blocks.kinds})

    def drain(self) -> int:
        """Do all background work now; return how many jobs this thread did."""
        n_done = self.reuse.settle()
        if self.tier is not None:
            self.tier.drain()
        return n_done

    def close(self) -> None:
        """Remove all swaps from the model, and close threads and connections."""
        self.forward.is_retired = True
        self.reuse.close()
        self.installed.remove()
        self.forward.follower.close()
        if self.tier is not None:
            self.tier.close()
        if self._graphs is not None:
            self._graphs.close()
        self.reuse.close_draft()

    def _engine_stats(self) -> EngineStats | None:
        if self._graphs is not None:
            return self._graphs.stats()
        return EngineStats(self.forward.eager.name or "eager", 0, n_failed=self._n_failed) if self._n_failed else None


def _make_blocks(wrapped: Wrapped, purges: Purges, spent: Callable[[], int]) -> BlockPool | None:
    """Return a block pool for a model that makes K/V; None if it makes none, or no call would be served from it."""
    config = wrapped.config
    if not (wrapped.trunk.makes_kv and (wrapped.keeps_tokens or (config.prefix is not None and wrapped.causal.cuts))):
        return None
    make_policy = partial(config.policy.build, POLICIES)
    return BlockPool(_block_of(config), config.max_bytes, wrapped.device, make_policy, spent, purges)


def _block_of(config: CacheConfig) -> int:
    """Return the tokens per block. Calls that keep K/V are stored in blocks even with `prefix=False`."""
    return (config.prefix or PrefixOptions()).block


def _open_tier(wrapped: Wrapped, memory: Memory) -> Tier | None:
    """Open the store behind memory; None if the setting is `memory`."""
    config = wrapped.config
    if config.store.name == MEMORY:
        if options := config.store.model_fields_set - {"name"}:
            raise ConfigError(f"store: {MEMORY!r} takes no options: name another, or leave out {', '.join(options)}")
        return None
    if POLICIES.find(config.policy.name).lets_entries_leave_early:
        raise ConfigError(
            f"store={config.store.name!r} with policy {config.policy.name!r}: entries that expire in memory would "
            "come back from the store; use another policy"
        )
    settings = {
        "payload": wrapped.payload.name,
        "prefix_block": _block_of(config),
        "device": device_of(wrapped.trunk.module).type,
        "versions": [torch.__version__, transformers.__version__],
    }
    seal = Seal.from_environment()  # first: if it raises, no store is left open
    if config.store.name == "redis" and not seal.is_authentic:
        logger.warning(
            "llmcache: values on Redis are not signed, so whoever can write to it can forge answers: set %s", SECRET
        )
    return Tier(
        config.store.build(STORES), seal, json.dumps(settings), wrapped.counters, memory, config.store.least_tokens
    )


def pass_others(model: nn.Module, trunk: Trunk, cache: Listener, installed: Installed) -> None:
    """Have the calls of a model's further encoders counted, which are not cached; a warning names them."""
    others = find_others(model, trunk).items()
    names = [name for name, part in others if not isinstance(vars(part).get("forward"), Swap)]  # else it is wrapped
    for name in names:
        installed.add(Passed(model.get_submodule(name), cache).remove)
    if names:
        logger.warning("llmcache: %s: not cached, but counted: %s", ", ".join(names), CURES["other_encoder"])


def _make_own(make: Callable[[Bank], Rung], bank: Bank) -> Rung:
    """Return the rung that a user's factory makes, after checking its attributes."""
    try:
        rung = make(bank)
        if not (isinstance(rung.name, str) and isinstance(rung.is_lossless, bool) and callable(rung.look_up)):
            raise TypeError("name must be a str, is_lossless a bool, look_up callable")
    except Exception as error:
        raise ConfigError(f"rungs: {make!r} makes no rung: {error!r}") from error
    return rung
