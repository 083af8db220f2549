"""What a cache is made of, put together once and handed to those who serve calls with it."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import nn

from llmcache.audit.audit import Audit
from llmcache.banks.cache_banks import CacheBanks
from llmcache.banks.stores.base import Bytes, StoreKey
from llmcache.banks.tier import Tier
from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.observer import Observer
from llmcache.calibration.sharing import SharedCalibration
from llmcache.counters import Counters
from llmcache.execution.cost import CostModel
from llmcache.execution.recorder import BypassRecorder
from llmcache.execution.store_queue import StoreQueue
from llmcache.fingerprint import Fingerprint
from llmcache.matching.content_gate import ContentGate
from llmcache.models.adapters import Trunk
from llmcache.models.coupling import Coupling
from llmcache.models.heads import Head
from llmcache.models.payloads import Payload
from llmcache.models.weights import Weights
from llmcache.reuse.base import Rung
from llmcache.reuse.prefix.block_pool import BlockPool
from llmcache.reuse.semantic import Semantic
from llmcache.stats import Stats


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What calibrated reuse adds to the parts of a cache.

    Attributes:
        fingerprint: Not fitted yet.
        observer: Reads the model's answers.
        calibrated: Not calibrated yet.
        audit: Looks into what it will serve.
        sharing: Has one calibration for all on a store; None where each has its own.
    """

    fingerprint: Fingerprint
    observer: Observer
    calibrated: CalibratedReuse
    audit: Audit
    sharing: SharedCalibration | None

    def add_to(self, parts: "Components") -> None:
        """Serve calls with it from now on. Nothing is reused approximately until it is calibrated."""
        parts.fingerprint, parts.observer = self.fingerprint, self.observer
        parts.rungs = [*parts.rungs, Semantic(parts.banks, self.calibrated.chooser, self.calibrated)]
        parts.calibrated, parts.audit, parts.sharing = self.calibrated, self.audit, self.sharing
        if self.sharing is not None and parts.cost is not None:
            self.sharing.on_taken_up = parts.cost.restart


@dataclass(slots=True, weakref_slot=True)
class Components:
    """What a call is served with.

    Attributes:
        trunk: What is hooked.
        head: What reads the trunk's output.
        payload: What of a state is kept.
        banks: What is remembered.
        rungs: Ways to serve a row, in the order in which they are asked.
        fingerprint: How requests are compared; None when nothing is reused approximately.
        is_per_layer: Each layer's bank is searched with the fingerprint of the states that enter the layer.
        attention: The first layer's self-attention where the fingerprint reads it, else None.
        weights: What states depend on.
        coupling: Tells whether rows of a call affect each other.
        gate: Compares tokens after a neighbour was chosen, or None.
        prefix: What was computed for the beginnings of requests; None where the prefix rung is off.
        is_in_blocks: It also holds the requests that the exact rung serves, which then need no entries.
        observer: Reads the model's answers, where decisions compare them; else None.
        tier: The store behind memory; None without one.
        calibrated: Approximate reuse that is calibrated, or None.
        cost: Tells when the cache is not worthwhile; None without auto-bypass.
        audit: Looks into what it serves; None without.
        sharing: Shares its calibration on the store; None without.
        recorder: Outputs of bypassed calls; None where none is recorded.
        store_queue: Calls that are to be stored; None until calls are listened to.
        counters: What was done.
    """

    trunk: Trunk
    head: Head
    payload: Payload
    banks: CacheBanks
    rungs: Sequence[Rung]
    fingerprint: Fingerprint | None
    is_per_layer: bool
    attention: nn.Module | None
    weights: Weights
    coupling: Coupling
    gate: ContentGate | None
    prefix: BlockPool | None = None
    is_in_blocks: bool = False
    observer: Observer | None = None
    tier: Tier | None = None
    calibrated: CalibratedReuse | None = None
    cost: CostModel | None = None
    audit: Audit | None = None
    sharing: SharedCalibration | None = None
    recorder: BypassRecorder | None = None
    store_queue: StoreQueue | None = None
    counters: Counters = field(default_factory=Counters)

    @property
    def serves_repeats(self) -> bool:
        """Whether requests that come again are served from their own states."""
        return any(rung.name == "exact" for rung in self.rungs)

    @property
    def is_collecting(self) -> bool:
        """Whether the call under way is computed to be shown: neither served nor stored, and no request of a user's."""
        return self.observer is not None and self.observer.collected.get() is not None

    @property
    def hears(self) -> bool:
        """Whether requests that others stored may serve here: those of a frozen calibration are joined by no other."""
        has_entries = self.banks.elsewhere is not None and self.fingerprint is not None
        return has_entries and (self.calibrated is None or self.calibrated.is_growing)

    def follow(self) -> None:
        """Hear what happened in the store: what was purged is forgotten before this returns."""
        if self.tier is not None:
            self.tier.follow(self.forget, self.hear if self.hears or self.sharing is not None else None)

    def share(self) -> None:
        """Publish or take up a calibration now, where that is to be done."""
        if self.sharing is not None:
            self.sharing.settle(self.follow)

    def hear(self, told: Sequence[tuple[StoreKey, Bytes]]) -> None:
        """Take in what others announced on the store."""
        if self.hears:
            self.banks.hear(told)
        if self.sharing is not None:
            self.sharing.hear(told)

    def holds(self, key: str) -> bool:
        """Whether something is held of a request that could serve it."""
        is_held = bool(self.banks.held(key)) or (self.prefix is not None and key in self.prefix)
        return is_held or (self.store_queue is not None and self.store_queue.holds(key))

    def settle(self) -> None:
        """Store what waits for it: somebody is about to look at what is held, or to change it."""
        if self.store_queue is not None:
            self.store_queue.settle("asked")

    def stats(self) -> Stats:
        """Counters since wrapping, and what is held now."""
        self.settle()
        banks, prefix = self.banks, self.prefix
        return self.counters.snapshot(
            n_let_pass=0 if self.cost is None else self.cost.n_let_pass,
            n_blocks=0 if prefix is None else len(prefix),
            n_blocks_evicted=0 if prefix is None else prefix.n_evicted,
            prefix_nbytes=0 if prefix is None else prefix.nbytes,
            n_entries={layer: len(bank) for layer, bank in banks.layer_banks.items()},
            n_evicted={layer: bank.n_evicted for layer, bank in banks.layer_banks.items()},
            n_expelled={layer: bank.n_expelled for layer, bank in banks.layer_banks.items()},
            n_stored=len(banks) + (0 if prefix is None else prefix.n_tails),
            nbytes=banks.nbytes,
            nbytes_by_layer={layer: bank.nbytes for layer, bank in banks.layer_banks.items()},
            max_nbytes_by_layer={layer: bank.max_bytes for layer, bank in banks.layer_banks.items()},
            index_nbytes=banks.index_nbytes,
            reconstruction_error={layer: loss.relative_error for layer, loss in banks.layer_banks.losses.items()},
            reconstruction_distance={layer: loss.cosine_distance for layer, loss in banks.layer_banks.losses.items()},
            cost=() if self.cost is None else self.cost.rows(),
            audit=None if self.audit is None else self.audit.stats(),
            compiled=None,
            store=None if self.tier is None else self.tier.stats(),
        )

    def restart_stats(self) -> None:
        """Count anew what becomes of requests."""
        self.settle()
        self.counters.restart()
        if self.cost is not None:
            self.cost.recount()

    def clear(self) -> None:
        """Forget all entries, and the calibration that rests on them; counters and what codecs learned stay."""
        self.settle()
        if self.tier is None:
            self.forget(None)
        else:
            self.tier.remove(None, self.forget)

    def purge(self, namespace: str) -> int:
        """Forget all entries of a namespace, likewise, and return how many requests of it were in memory."""
        self.settle()
        if self.tier is None:
            return self.forget(namespace)
        n_requests = Counter[str | None]()

        def forget(name: str | None) -> None:
            n_requests[name] += self.forget(name)

        self.tier.remove(namespace, forget)
        return n_requests[namespace]

    def forget(self, namespace: str | None) -> int:
        """Let what is in memory of a namespace go, None: all, and return how many requests of one it was."""
        self.banks.purges.tell(namespace)  # first: what comes in from now on is compared with it
        if self.audit is not None:
            self.audit.forget(namespace)
        n_requests = 0
        with self._calibration_held():
            if namespace is None:
                self.banks.clear()
            else:
                n_requests += self.banks.purge(namespace)
            if self.calibrated is not None:
                self.calibrated.forget(namespace)
        if self.sharing is not None:
            self.sharing.forget(namespace)
        if self.prefix is not None:
            if namespace is None:
                self.prefix.clear()
            else:
                n_requests += self.prefix.clear(namespace)
        if self.cost is not None:
            if namespace is None:
                self.cost.restart()
            else:
                self.cost.forget()
        if self.recorder is not None:
            self.recorder.clear(namespace)
        return n_requests

    def _calibration_held(self) -> AbstractContextManager[object]:
        """Within: no save finds a calibration whose requests are gone, as a cache could not be loaded from it."""
        return nullcontext() if self.calibrated is None else self.calibrated.held()
