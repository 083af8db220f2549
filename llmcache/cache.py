"""`LLMCache`: what a user holds. It puts the parts together; the order of a call is in `flow`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from llmcache.adapters import Trunk, device_of, locate, special_ids
from llmcache.bank import Bank
from llmcache.compression import CODECS, Codec
from llmcache.config import CacheConfig
from llmcache.decide import thresholds
from llmcache.errors import ConfigError, UnsafeReuseError
from llmcache.fingerprint import FINGERPRINTS, Fingerprint
from llmcache.flow import Flow, Parts
from llmcache.heads import Head, find_head
from llmcache.hooks import install
from llmcache.index import INDEXES
from llmcache.library import Library
from llmcache.payloads import PAYLOADS, Payload
from llmcache.policies import POLICIES
from llmcache.reuse import Rung
from llmcache.reuse.exact import Exact
from llmcache.reuse.paper import Paper
from llmcache.reuse.semantic import Semantic
from llmcache.stats import Stats
from llmcache.stores.memory import MemoryStore
from llmcache.weights import Weights


class LLMCache:
    """A cache hung on a model. Made by `wrap`; `unwrap` takes it off again.

    The model is used as before, from any number of threads. Lossless rungs are on from the start; approximate reuse
    needs a threshold `tau`, which is the user's own choice.
    """

    def __init__(self, model: nn.Module, config: CacheConfig, tokenizer: Any = None) -> None:
        """Use `wrap` or `load`.

        Args:
            model: Wrapped at once.
            config: Checked settings.
            tokenizer: Names the special tokens.
        """
        self.model = model
        self.config = config
        self._tokenizer = tokenizer
        self._parts = _assemble(model, config)
        self._flow = Flow(self._parts, tokenizer)
        self._installed = install(self._parts.trunk, self._flow)

    @classmethod
    def wrap(
        cls,
        model: nn.Module,
        *,
        config: CacheConfig | Mapping[str, Any] | str | Path | None = None,
        tokenizer: Any = None,
        **settings: Any,
    ) -> Self:
        """Make a model remember.

        Args:
            model: A transformers model with or without a head, or a sentence-transformers model. Changed in place until
                `unwrap`.
            config: Settings, as `CacheConfig`, a mapping or the path of a YAML file.
            tokenizer: Its special tokens are left out of fingerprints. Without one, those that the model's config
                names, and for BERT's relatives the customary ids.
            **settings: Single settings, before those of `config`; see `CacheConfig`.

        Returns:
            The cache.

        Raises:
            ConfigError: A setting is wrong, or does not suit the model.
            UnsafeReuseError: `tau` with a head that answers token by token.
            UnsupportedModelError: The layers were not found.
            WrapError: The model is wrapped already.
        """
        return cls(model, CacheConfig.make(config, **settings), tokenizer)

    @classmethod
    def load(cls, model: nn.Module, folder: str | Path, *, tokenizer: Any = None) -> Self:
        """Wrap a model with a saved cache's settings and entries.

        Raises:
            BankFileError: The folder is incomplete, damaged, or was saved from other weights or another tokenizer.
            WrapError: The model is wrapped already.
        """
        from llmcache import persist

        manifest = persist.read_manifest(folder)
        trunk = locate(model)
        weights = Weights(trunk.module).digest()
        persist.check(manifest, weights, special_ids(trunk, tokenizer), folder)
        cache = cls(model, CacheConfig.make(manifest.config), tokenizer)
        try:
            persist.restore(cache._parts.library, weights, manifest, folder)
        except BaseException:
            cache.unwrap()
            raise
        return cache

    def save(self, folder: str | Path) -> None:
        """Write settings and entries to a folder, atomically; an earlier save there is replaced.

        Raises:
            StoreError: Writing failed; an earlier save is still whole.
        """
        from llmcache import persist

        specials = special_ids(self._parts.trunk, self._tokenizer)
        persist.save(self._parts.library, self._parts.weights.digest(), self.config, specials, folder)

    def unwrap(self) -> nn.Module:
        """Take the cache off the model, which is then exactly as before, and return the model. Twice does nothing.

        Raises:
            WrapError: Somebody put another forward on top of one of ours; remove that, then call this again.
        """
        self._installed.remove()
        return self.model

    def __enter__(self) -> Self:
        """Return the cache."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Unwrap."""
        self.unwrap()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model in inference mode, where the cache can serve."""
        with torch.inference_mode():
            return self.model(*args, **kwargs)

    def stats(self) -> Stats:
        """Counters since wrapping, and what is held now."""
        library = self._parts.library
        return self._parts.counters.snapshot(
            n_entries={layer: len(bank) for layer, bank in library.banks.items()},
            n_evicted={layer: bank.n_evicted for layer, bank in library.banks.items()},
            n_stored=len(library),
            nbytes=library.nbytes,
            reconstruction_error={n: packer.loss.relative_error for n, packer in library.packers.items()},
            reconstruction_distance={n: packer.loss.cosine_distance for n, packer in library.packers.items()},
        )

    def clear(self) -> None:
        """Forget all entries; counters and what fingerprint and codecs learned stay."""
        self._parts.library.clear()

    def purge(self, *, namespace: str) -> int:
        """Forget all entries of a namespace and return how many requests they were."""
        return self._parts.library.purge(namespace)

    @contextmanager
    def namespace(self, name: str) -> Iterator[Self]:
        """Within: requests are stored in, and served from, this namespace only.

        Holds for this thread and async task, and for tasks begun in it. A thread started inside (an executor's, say)
        begins in the default namespace: enter the namespace there, or run it in a copy of the context.

        Raises:
            ConfigError: `name` is not a string.
        """
        if not isinstance(name, str):
            raise ConfigError(f"namespace: give a string (got {name!r})")
        token = self._flow.namespace.set(name)
        try:
            yield self
        finally:
            self._flow.namespace.reset(token)

    @contextmanager
    def disabled(self) -> Iterator[Self]:
        """Within: the model computes as if it were not wrapped. Per thread and async task."""
        token = self._flow.is_disabled.set(True)
        try:
            yield self
        finally:
            self._flow.is_disabled.reset(token)

    def __repr__(self) -> str:
        """Model, payload and rungs."""
        rungs = "+".join(rung.name for rung in self._parts.rungs)
        return f"LLMCache({type(self.model).__name__}, payload={self._parts.payload.name!r}, rungs={rungs!r})"


def _assemble(model: nn.Module, config: CacheConfig) -> Parts:
    """Build the parts that the settings and the model ask for."""
    trunk = locate(model)
    head = find_head(model, trunk.adapter.family)
    _refuse_unsafe(head, config)
    payload = _choose_payload(trunk, head, config)
    layers = _choose_layers(trunk, payload, config)
    codec: Codec = config.compression.build(CODECS, "compression")
    # Built in any case, so that a wrong name is told now and not at the first request that needs it.
    fingerprint: Fingerprint = config.fingerprint.build(FINGERPRINTS, "fingerprint")
    config.index_component.build(INDEXES, "index", 8)
    if config.max_entries is not None and config.max_entries < fingerprint.n_fit:
        raise ConfigError(
            f"max_entries={config.max_entries}: fingerprint {config.fingerprint.name!r} is fitted on "
            f"{fingerprint.n_fit} stored requests, which would never be there; raise it, or lower fit_on"
        )
    searched_by = None if config.tau is None else fingerprint
    library = Library(
        {layer: _make_bank(trunk, config, len(layers)) for layer in layers},
        lambda: config.compression.build(CODECS, "compression"),
        searched_by,
        lambda dim: config.index_component.build(INDEXES, "index", dim),
        by_length=not payload.fits_any_length,
        by_layer=config.mode == "paper",
    )
    rungs = _choose_rungs(library, trunk, config, codec)
    return Parts(trunk, head, payload, library, rungs, searched_by, Weights(trunk.module))


def _refuse_unsafe(head: Head, config: CacheConfig) -> None:
    if config.tau is None or not head.why_unsafe or config.allow_unsafe:
        return
    raise UnsafeReuseError(
        f"tau={config.tau} with a model that has a {head.name}: reusing a layer's whole output replaces everything "
        f"above it by what the stored request computed. {head.why_unsafe} Leave tau out (exact repeats are still "
        "served), or set allow_unsafe=True to measure what that costs."
    )


def _choose_payload(trunk: Trunk, head: Head, config: CacheConfig) -> Payload:
    name: str = config.payload
    if name == "auto":
        # Embeddings served losslessly keep all tokens: the caller may ask for token embeddings too.
        wants_all = config.mode == "paper" or (head.name == "sentence embedding" and config.tau is None)
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


def _choose_layers(trunk: Trunk, payload: Payload, config: CacheConfig) -> list[int]:
    """Stored layers, first to last."""
    last = trunk.depth - 1
    if config.layers == "all" or (config.layers == "auto" and config.mode == "paper" and not payload.fits_any_length):
        chosen = list(range(trunk.depth))
    elif config.layers in ("last", "auto"):
        chosen = [last]
    else:
        chosen = sorted({int(layer) + trunk.depth * (int(layer) < 0) for layer in config.layers})
    if not chosen or chosen[0] < 0 or chosen[-1] > last:
        raise ConfigError(f"layers={config.layers}: this model has layers 0 to {last}; name at least one of them")
    if payload.fits_any_length and chosen != [last]:
        raise ConfigError(
            f"layers={config.layers}: payload {payload.name!r} keeps one vector, from which no further layer can be "
            "computed; store the last layer only, or use payload='sequence'"
        )
    return chosen


def _make_bank(trunk: Trunk, config: CacheConfig, n_banks: int) -> Bank:
    device = device_of(trunk.module) if config.device == "model" else torch.device("cpu")
    policy = config.policy.build(POLICIES, "policy")
    return Bank(MemoryStore(device), policy, max(1, config.max_bytes // n_banks), config.max_entries)


def _choose_rungs(library: Library, trunk: Trunk, config: CacheConfig, codec: Codec) -> list[Rung]:
    """Rungs in the order in which rows are offered to them, safest first."""
    try:
        tau = thresholds(config.tau, library.layers, trunk.depth)
    except ValueError as error:
        raise ConfigError(f"tau: {error}") from error
    rungs: list[Rung] = []
    if config.serves_exact and codec.is_lossless(next(trunk.module.parameters()).dtype):
        rungs.append(Exact(library))
    if tau:
        rungs.append(Paper(library, tau) if config.mode == "paper" else Semantic(library, tau))
    if not rungs:
        raise ConfigError(
            f"no rung is left: exact={config.serves_exact}, tau={config.tau}, compression={config.compression.name!r} "
            "(lossless rungs do not serve states that compression changed); set tau, or compression 'none'"
        )
    return rungs
