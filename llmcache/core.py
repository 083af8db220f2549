"""The parts of a cache without `tau`, put together: what does not suit the model or the settings is refused here."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn

from llmcache.bank import Bank
from llmcache.calibrator import Calibrator
from llmcache.call import CachedForward, Rung
from llmcache.config import CacheConfig
from llmcache.counters import Counters
from llmcache.engines.compiled import CompiledTrunk
from llmcache.errors import ConfigError, UnsupportedModelError, WrapError
from llmcache.matching.answers import Reading
from llmcache.models.adapters import Trunk, device_of, locate, vocabulary_size
from llmcache.models.coupling import Coupling
from llmcache.models.heads import Head, find_head
from llmcache.models.hooks import HeadSwap, Installed, find_lm_head, is_wrapped
from llmcache.models.payloads import PAYLOADS, Payload
from llmcache.models.weights import Weights
from llmcache.policies import POLICIES
from llmcache.request.reading import RequestReader
from llmcache.reuse.prefix.block_pool import BlockPool
from llmcache.stats import Stats


class Core:
    """What hangs on one model."""

    def __init__(
        self,
        model: nn.Module,
        config: CacheConfig,
        tokenizer: Any,
        answer_of: Reading,
        rungs: Sequence[Callable[[Bank], Rung]],
    ) -> None:
        """Hang a cache on a model; see `LLMCache.wrap`."""
        self._model, self._config, self._tokenizer, self._answer_of = model, config, tokenizer, answer_of
        self.trunk, self.head, self.payload = inspect_model(model, config)
        if is_wrapped(self.trunk):
            raise WrapError("this model is already wrapped: use the existing cache, or call its unwrap() first")
        self.counters, self.weights = Counters(), Weights(self.trunk.module)
        self._coupling = Coupling(self.trunk, self.weights)
        with suppress(RuntimeError):  # weights that cannot be read yet are read at the first call that can
            digest = self.weights.digest()  # now, so that the first request does not wait for it
            if self.head.observed is not None:
                self.head.observed.was_of(digest)
            if self.weights.unreadable is None:
                self._coupling.reason(digest)
        self.blocks = self._make_blocks()
        max_bytes = config.max_bytes if self.blocks is None else max(1, config.max_bytes // 2)
        self.bank = Bank(config.policy.build(POLICIES), max_bytes, config.max_entries)
        reader = RequestReader(self.trunk, self.head, self.payload, tokenizer)
        self.installed = Installed()
        self.calibrator: Calibrator | None = None
        self._compiled: CompiledTrunk | None = None
        self.forward = CachedForward(
            self.trunk,
            self.head,
            self.payload,
            self.bank,
            reader,
            self.weights,
            self._coupling,
            self.counters,
            self.blocks,
            config.prefix,
        )
        self.installed.add(self.forward.remove)
        try:
            self.forward.rungs = (*self.forward.rungs, *(_make_own(make, self.bank) for make in rungs))
            if self.blocks is not None and (lm_head := find_lm_head(model, self.trunk)) is not None:
                self.installed.add(HeadSwap(lm_head, self.forward).remove)
            if self.head.pooled is not None and self.payload.name == "mean":
                self.installed.add(self.forward.veil.listen(self.head.pooled.pooling))
            if config.learn is not None:
                self.learn()
        except BaseException:
            self.installed.remove()
            raise

    def learn(self) -> Calibrator:
        """What calibrates this cache; made when it is first asked for."""
        if self.calibrator is None:
            self.calibrator = Calibrator(
                self._model,
                self._config,
                self.trunk,
                self.head,
                self.payload,
                self.weights,
                self._coupling,
                self.counters,
                self.bank,
                self.forward,
                self.installed,
                self._tokenizer,
                self._answer_of,
            )
        return self.calibrator

    def compile(
        self,
        lengths: Sequence[int],
        rows: Sequence[int],
        mode: str | None,
        backend: str | Callable[..., Any],
        max_padding: float,
    ) -> None:
        """Compute by graphs from now on; see `LLMCache.compile`."""
        forward, known = self.forward, (self.weights, self._coupling)
        made = CompiledTrunk(
            self.trunk, forward.eager, forward.arguments, *known, lengths, rows, mode, backend, max_padding
        )
        self._compiled = forward.engine = made

    def stats(self) -> Stats:
        """Counters since wrapping, and what is held now."""
        bank, blocks, last = self.bank, self.blocks, self.trunk.depth - 1
        calibrator = self.calibrator
        return self.counters.snapshot(
            n_entries={last: len(bank)},
            n_evicted={last: bank.n_evicted},
            n_expelled={last: bank.n_expelled},
            n_stored=len(bank) + (0 if blocks is None else blocks.n_tails),
            nbytes=bank.nbytes,
            nbytes_by_layer={last: bank.nbytes},
            max_nbytes_by_layer={last: bank.max_bytes},
            index_nbytes=0 if calibrator is None else calibrator.calibrated.fitter.sources.index_nbytes,
            n_blocks=0 if blocks is None else len(blocks),
            n_blocks_evicted=0 if blocks is None else blocks.n_evicted,
            prefix_nbytes=0 if blocks is None else blocks.nbytes,
            audit=None if calibrator is None else calibrator.audit.stats(),
            compiled=None if self._compiled is None else self._compiled.stats(),
        )

    def clear(self) -> None:
        """Forget all entries, and the calibration that rests on them."""
        self._forget(None)

    def purge(self, namespace: str) -> int:
        """Forget all entries of a namespace; returns how many requests they were."""
        return self._forget(namespace)

    def _forget(self, namespace: str | None) -> int:
        with nullcontext() if self.calibrator is None else self.calibrator.calibrated.held():
            n_requests = self.bank.clear(namespace)
            if self.calibrator is not None:
                self.calibrator.forget(namespace)
        if self.blocks is not None:
            if namespace is None:
                self.blocks.clear()
            else:
                n_requests += self.blocks.purge(namespace)
        return n_requests

    def drain(self) -> int:
        """Do now what waits for a moment without calls; returns how many jobs this thread did."""
        return 0 if self.calibrator is None else self.calibrator.audit.drain()

    def close(self) -> None:
        """Take everything off the model."""
        self.forward.is_retired = True
        if self.calibrator is not None:
            self.calibrator.audit.worker.close()
        self.installed.remove()
        if self._compiled is not None:
            self._compiled.close()

    def _make_blocks(self) -> BlockPool | None:
        """Where requests of calls that keep K/V are kept; None where the model makes no such calls."""
        config, trunk = self._config, self.trunk
        # Whether a trunk that was recognised by its shape ignores padding, and what else it puts out, is not known.
        if not trunk.makes_kv or trunk.adapter.is_guess or self.payload.fits_any_length:
            return None
        device = device_of(trunk.module) if config.device == "model" else torch.device("cpu")
        return BlockPool(config.prefix_block, config.max_bytes, device, config.policy.build(POLICIES))


def inspect_model(model: nn.Module, config: CacheConfig) -> tuple[Trunk, Head, Payload]:
    """The trunk of a model, the head that reads its output, and what entries keep for that."""
    trunk = locate(model, config.adapter)
    vocabulary_size(trunk)  # each call reads tokens by it
    head = find_head(model, trunk)
    payload = choose_payload(trunk, head, config)
    if len(set(trunk.layers)) < trunk.depth and trunk.makes_kv and not payload.fits_any_length:
        raise UnsupportedModelError(
            f"{type(trunk.module).__name__}: one layer is run at several places, so its K/V cannot be told apart; "
            "encoders that share layers, and classifiers, can be wrapped"
        )
    return trunk, head, payload


def choose_payload(trunk: Trunk, head: Head, config: CacheConfig) -> Payload:
    """What entries keep of hidden states: the setting, or what the head reads."""
    name: str = config.payload
    if name == "auto":
        # Embeddings served losslessly keep all tokens: the caller may ask for token embeddings too.
        wants_all = head.name == "sentence embedding" and config.learn is None
        name = "sequence" if wants_all or trunk.adapter.is_guess else head.payload
    if name == "mean" and trunk.adapter.is_guess:
        raise ConfigError(
            f"payload='mean': {type(trunk.module).__name__} is not in the adapter table, so whether a norm follows its "
            "last layer is unknown; register an adapter for it, or use payload='sequence'"
        )
    is_enough = name in ("sequence", head.payload) or head.reads == "states" or config.allow_unsafe
    if not is_enough:
        raise ConfigError(
            f"payload={name!r}: this model's {head.name} reads more than that; use payload={head.payload!r}, "
            "'sequence' or 'auto'"
        )
    return PAYLOADS[name]()


def _make_own(make: Callable[[Bank], Rung], bank: Bank) -> Rung:
    """A user's rung, if it has what a rung has."""
    try:
        rung = make(bank)
        if not (isinstance(rung.name, str) and isinstance(rung.is_lossless, bool) and callable(rung.look_up)):
            raise TypeError("name must be a text, is_lossless a truth value, look_up a function")
    except Exception as error:
        raise ConfigError(f"rungs: {make!r} makes no rung: {error!r}") from error
    return rung
