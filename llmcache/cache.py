"""`LLMCache`: what a user holds. Its parts are put together in `assembly`; the order of a call is in `flow`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from llmcache.adapters import locate, special_ids
from llmcache.assembly import assemble
from llmcache.config import CacheConfig
from llmcache.errors import ConfigError
from llmcache.flow import Flow
from llmcache.hooks import install
from llmcache.outcome import Outcome
from llmcache.stats import Stats
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
        self._parts = assemble(model, config)
        self._flow = Flow(self._parts, tokenizer)
        with suppress(RuntimeError):  # weights that cannot be read yet are read at the first call that can
            self._parts.weights.digest()  # now, so that the first request does not wait for it
        self._installed = install(self._parts.trunk, self._flow, self._parts.attention)

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
            n_expelled={layer: bank.n_expelled for layer, bank in library.banks.items()},
            n_stored=len(library),
            nbytes=library.nbytes,
            index_nbytes=library.index_nbytes,
            reconstruction_error={layer: loss.relative_error for layer, loss in library.losses.items()},
            reconstruction_distance={layer: loss.cosine_distance for layer, loss in library.losses.items()},
        )

    @property
    def payload(self) -> str:
        """What each entry keeps of a request's hidden states: `sequence`, `cls`, `last` or `mean`."""
        return self._parts.payload.name

    @property
    def last(self) -> tuple[Outcome, ...]:
        """What became of each row of this thread's last call, in order.

        Bypassed calls are noted too, but not decode steps: after `generate()` it tells of the last prefill. Empty
        before the first call and after one that raised. Async tasks of a thread share it: read it before an `await`.
        """
        return self._flow.last

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
