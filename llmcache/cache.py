"""`LLMCache`: what a user holds. Its parts are put together in `assembly`; the order of a call is in `flow`."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from llmcache.adapters import locate, special_ids
from llmcache.answers import Reading, read_logits
from llmcache.assembly import assemble
from llmcache.calibration import Calibration
from llmcache.claim import Claim, Metric
from llmcache.config import CacheConfig
from llmcache.errors import ConfigError, WrapError
from llmcache.flow import Flow
from llmcache.hooks import install, listen, watch
from llmcache.learning import make_learning
from llmcache.observation import Observation, Observer, collect, tokenised, with_labels
from llmcache.outcome import Outcome
from llmcache.stats import Stats
from llmcache.trust import Trust
from llmcache.weights import Weights


class LLMCache:
    """A cache hung on a model. Made by `wrap`; `unwrap` takes it off again.

    The model is used as before, from any number of threads. Lossless rungs are on from the start; approximate reuse
    begins with a calibration (`calibrate`, or `learn` in the settings), or with a threshold `tau` of one's own choice.
    """

    def __init__(
        self, model: nn.Module, config: CacheConfig, tokenizer: Any = None, answer_of: Reading = read_logits
    ) -> None:
        """Use `wrap` or `load`.

        Args:
            model: Wrapped at once.
            config: Checked settings.
            tokenizer: Names the special tokens.
            answer_of: Finds the answer in what the model returned.
        """
        self.model = model
        self.config = config
        self._tokenizer = tokenizer
        self._answer_of = answer_of
        self._parts = assemble(model, config, tokenizer, answer_of)
        self._flow = Flow(self._parts, tokenizer)
        with suppress(RuntimeError):  # weights that cannot be read yet are read at the first call that can
            self._parts.weights.digest()  # now, so that the first request does not wait for it
        self._installed = install(self._parts.trunk, self._flow, self._parts.attention)
        self._calibrating = threading.RLock()  # requests that are given may be made by observing others
        try:
            if self._parts.observer is not None:
                self._watch(self._parts.observer)
            if config.learn is not None:
                self._begin_learning()
        except BaseException:
            self._installed.remove()
            raise

    @classmethod
    def wrap(
        cls,
        model: nn.Module,
        *,
        config: CacheConfig | Mapping[str, Any] | str | Path | None = None,
        tokenizer: Any = None,
        answer_of: Reading = read_logits,
        **settings: Any,
    ) -> Self:
        """Make a model remember.

        Args:
            model: A transformers model with or without a head, or a sentence-transformers model. Changed in place until
                `unwrap`.
            config: Settings, as `CacheConfig`, a mapping or the path of a YAML file.
            tokenizer: Its special tokens are left out of fingerprints. Without one, those that the model's config
                names, and for BERT's relatives the customary ids.
            answer_of: `output -> logits (B, C)`: finds the answer in what the model returned, where it is neither a
                tensor nor has `logits`. Decisions that compare answers use it.
            **settings: Single settings, before those of `config`; see `CacheConfig`.

        Returns:
            The cache.

        Raises:
            ConfigError: A setting is wrong, or does not suit the model.
            UnsafeReuseError: `tau` with a head that answers token by token.
            UnsupportedModelError: The layers were not found.
            WrapError: The model is wrapped already.
        """
        return cls(model, CacheConfig.make(config, **settings), tokenizer, answer_of)

    @classmethod
    def load(
        cls, model: nn.Module, folder: str | Path, *, tokenizer: Any = None, answer_of: Reading = read_logits
    ) -> Self:
        """Wrap a model with a saved cache's settings, entries and calibration.

        Raises:
            BankFileError: The folder is incomplete, damaged, or was saved from other weights or another tokenizer.
            WrapError: The model is wrapped already.
        """
        from llmcache import persist

        manifest = persist.read_manifest(folder)
        trunk = locate(model)
        weights = Weights(trunk.module).digest()
        persist.check(manifest, weights, special_ids(trunk, tokenizer), folder)
        cache = cls(model, CacheConfig.make(manifest.config), tokenizer, answer_of)
        try:
            if manifest.calibration is not None and cache._parts.trust is None:
                cache._begin_learning()
            persist.restore(cache._parts, manifest, folder)
        except BaseException:
            cache.unwrap()
            raise
        return cache

    def save(self, folder: str | Path) -> None:
        """Write settings, entries and calibration to a folder, atomically; an earlier save there is replaced.

        Raises:
            StoreError: Writing failed; an earlier save is still whole.
        """
        from llmcache import persist

        specials = special_ids(self._parts.trunk, self._tokenizer)
        persist.save(self._parts, self.config, specials, folder)

    def calibrate(
        self,
        requests: Iterable[Mapping[str, Any] | str],
        *,
        labels: Sequence[Any] | None = None,
        max_drop: float | None = None,
        delta: float | None = None,
        metric: Literal["changed", "accuracy"] | Metric = "changed",
        sources: Literal["frozen", "growing"] | None = None,
        seed: int = 0,
    ) -> Calibration:
        """Turn approximate reuse on, as far as these requests show that it loses no more than allowed.

        All of them are computed. Part of them serve from then on; what was calibrated before no longer does.

        Args:
            requests: Tokenised inputs of the model, each with one request or several; or texts, if `wrap` was given the
                tokenizer. They must be drawn like the requests to come: the bound is on requests of their kind.
            labels: What each should be answered, in order: a class's number, or its name in the model's config.
            max_drop: Largest loss, a fraction of 1; None: as in the settings.
            delta: Chance that it is larger all the same, over 0, under 1; None: as in the settings.
            metric: `changed`: answers that are not what the model computes, as a share of all requests. `accuracy`:
                right answers that become wrong, likewise; needs labels. Or a bounded `Metric` of your own.
            sources: `frozen`, or `growing`: later misses serve, too, and no bound holds; None: as in the settings.
            seed: Of the draw of the three parts.

        Returns:
            What was chosen, and what it rests on. Nothing is reused approximately where `chosen` is None.

        Raises:
            CalibrationError: The requests cannot carry the claim (it says how many can), or one could not be computed,
                or a label is unknown, or the metric failed. Nothing is reused approximately then.
            ConfigError: A setting is wrong, or rules out a bound, or `recalibrate` is set and the metric needs labels;
                what was calibrated before then stays.
            UnsafeReuseError: The head answers token by token.
            WrapError: The cache was unwrapped.
        """
        claim = Claim(
            self.config.max_drop if max_drop is None else max_drop,
            self.config.delta if delta is None else delta,
            metric,
            self.config.sources if sources is None else sources,
            seed,
        )
        if self.config.recalibrate is not None and claim.metric != "changed":
            raise ConfigError(
                f"recalibrate={self.config.recalibrate} with metric {claim.name!r}: requests in service come without "
                "labels; use metric 'changed', or leave recalibrate out"
            )
        with self._calibrating:
            trust, observer = self._learners()
            trust.end()
            if self._parts.cost is not None:
                self._parts.cost.restart()  # what was seen so far does not hold of what can be served afterwards
            return trust.calibrate(with_labels(self._collect(observer, requests), labels, self.model), claim)

    def observe(
        self, requests: Iterable[Mapping[str, Any] | str], *, labels: Sequence[Any] | None = None
    ) -> list[Observation]:
        """Compute requests, and keep all that a calibration looks at: on one pass of the model, `trust` tries many.

        None is served, and none stored.

        Args:
            requests: See `calibrate`.
            labels: Likewise.

        Raises:
            CalibrationError: One could not be computed, or there are more or fewer labels than requests.
            ConfigError: A setting rules out a calibration.
            UnsafeReuseError: The head answers token by token.
            WrapError: The cache was unwrapped.
        """
        with self._calibrating:
            return with_labels(self._collect(self._learners()[1], requests), labels, self.model)

    @property
    def trust(self) -> Trust | None:
        """What is reused approximately, step by step: for replays. None before anything was observed or learned."""
        return self._parts.trust

    @property
    def calibration(self) -> Calibration | None:
        """What approximate reuse rests on; None before one, and after a failure or a second alarm."""
        return None if self._parts.trust is None else self._parts.trust.calibration

    @contextmanager
    def tightened(self, limit: float) -> Iterator[Self]:
        """Within: no reuse whose doubt exceeds `limit`, nor what the calibration allows. Per thread and async task.

        The doubt of `risk` is the estimated chance that reuse changes the answer, 0 to 1.
        """
        if not isinstance(limit, int | float) or limit != limit:
            raise ConfigError(f"limit: give a number (got {limit!r})")
        if self._parts.trust is None:
            raise ConfigError("nothing is reused approximately by a calibration: call calibrate() first, or set learn")
        token = self._parts.trust.tightened.set(min(limit, self._parts.trust.tightened.get()))
        try:
            yield self
        finally:
            self._parts.trust.tightened.reset(token)

    def unwrap(self) -> nn.Module:
        """Take the cache off the model, which is then exactly as before, and return the model. Twice does nothing.

        What waits to be looked into is dropped.

        Raises:
            WrapError: Somebody put another forward on top of one of ours; remove that, then call this again.
        """
        if self._parts.audit is not None:
            self._parts.audit.shadow.close()
        self._installed.remove()
        return self.model

    def drain(self) -> int:
        """Do now what waits for a moment without calls, and return how many jobs this thread did.

        Jobs are hits that the audit looks into, and renewals of a calibration. None is left or under way afterwards: a
        timing that is to include that work ends after this.
        """
        return 0 if self._parts.audit is None else self._parts.audit.shadow.drain()

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
        library, prefix = self._parts.library, self._parts.prefix
        return self._parts.counters.snapshot(
            n_blocks=0 if prefix is None else len(prefix),
            n_blocks_evicted=0 if prefix is None else prefix.n_evicted,
            prefix_nbytes=0 if prefix is None else prefix.nbytes,
            n_entries={layer: len(bank) for layer, bank in library.banks.items()},
            n_evicted={layer: bank.n_evicted for layer, bank in library.banks.items()},
            n_expelled={layer: bank.n_expelled for layer, bank in library.banks.items()},
            n_stored=len(library),
            nbytes=library.nbytes,
            index_nbytes=library.index_nbytes,
            reconstruction_error={layer: loss.relative_error for layer, loss in library.banks.losses.items()},
            reconstruction_distance={layer: loss.cosine_distance for layer, loss in library.banks.losses.items()},
            cost=() if self._parts.cost is None else self._parts.cost.rows(),
            audit=None if self._parts.audit is None else self._parts.audit.stats(),
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
        """Forget all entries, and the calibration that rests on them; counters and what codecs learned stay."""
        if self._parts.audit is not None:
            self._parts.audit.forget()
        self._parts.library.clear()
        if self._parts.prefix is not None:
            self._parts.prefix.clear()
        if self._parts.trust is not None:
            self._parts.trust.forget()
        if self._parts.cost is not None:
            self._parts.cost.restart()
        self._flow.forget()

    def purge(self, *, namespace: str) -> int:
        """Forget all entries of a namespace and return how many requests they were.

        A calibration that rests on any of them ends, and nothing is learned from them.
        """
        if self._parts.audit is not None:
            self._parts.audit.forget(namespace)
        n_requests = self._parts.library.purge(namespace)
        if self._parts.prefix is not None:
            self._parts.prefix.purge(namespace)
        if self._parts.trust is not None:
            self._parts.trust.forget(namespace)
        if self._parts.cost is not None:
            self._parts.cost.forget()
        return n_requests

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

    def _learners(self) -> tuple[Trust, Observer]:
        """Who learns from requests, and who sees them."""
        if self._installed.is_empty:
            raise WrapError("this cache was unwrapped: wrap the model again, and calibrate that cache")
        if self._parts.trust is None:
            self._begin_learning()
        assert self._parts.trust is not None and self._parts.observer is not None
        return self._parts.trust, self._parts.observer

    def _collect(self, observer: Observer, requests: Iterable[Mapping[str, Any] | str]) -> list[Observation]:
        return collect(self._compute, observer, tokenised(requests, self._tokenizer, self._parts.trunk))

    def _compute(self, inputs: Mapping[str, Any]) -> Any:
        """Call the model with tokenised inputs, which sentence-transformers takes in one argument."""
        return self(dict(inputs)) if self._parts.head.name == "sentence embedding" else self(**inputs)

    def _compute_in(self, namespace: str, inputs: Mapping[str, Any]) -> Any:
        """The same in a namespace."""
        with self.namespace(namespace):
            return self._compute(inputs)

    def _begin_learning(self) -> None:
        """Make the cache ready to be calibrated: first hook what it must hear of the model, then rely on that."""
        learning = make_learning(self._parts, self.model, self.config, self._answer_of, self._compute_in)
        self._watch(learning.observer)
        if learning.attention is not None:
            self._installed.add(listen(learning.attention, self._flow))
        learning.add_to(self._parts)

    def _watch(self, observer: Observer) -> None:
        """See what the whole model puts out, where answers are read from that."""
        if not observer.answers.reads_payload:
            self._installed.add(watch(self.model, self._flow, self._parts.trunk).remove)

    def __repr__(self) -> str:
        """Model, payload and rungs."""
        names = [rung.name for rung in self._parts.rungs]
        rungs = "+".join(names if self._parts.prefix is None else [*names, "prefix"])
        return f"LLMCache({type(self.model).__name__}, payload={self._parts.payload.name!r}, rungs={rungs!r})"
