"""`LLMCache`: what a user holds. `core` puts its parts together, with `tau` `paper` does; `call` tells how calls go."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from llmcache.answers import Reading, read_logits
from llmcache.bank import Bank
from llmcache.calibration.calibrated_reuse import CalibratedReuse
from llmcache.calibration.calibration import Calibration
from llmcache.calibration.inputs import Requests
from llmcache.calibration.risk_target import Metric
from llmcache.calibrator import make_claim
from llmcache.config import CacheConfig
from llmcache.core import Core
from llmcache.errors import ConfigError, UnfitBankError, WrapError
from llmcache.found import Found, look_up
from llmcache.paper.build import build as build_layerwise
from llmcache.paper.layerwise import Layerwise
from llmcache.prefix.chunks import Chunks
from llmcache.request.call import Rung
from llmcache.request.observation import Observation
from llmcache.request.outcome import Outcome
from llmcache.request.rows import checked_namespace
from llmcache.request.variables import setting
from llmcache.save import Saved
from llmcache.stats import Stats


class LLMCache:
    """The cache of one wrapped model. Made by `wrap`; `unwrap` takes it off again.

    The model is used as before, from any number of threads. Lossless rungs are on from the start; approximate reuse
    begins with a calibration (`calibrate`, or `learn` in the settings), or with a threshold `tau` of one's own choice.
    """

    def __init__(
        self,
        model: nn.Module,
        config: CacheConfig,
        tokenizer: Any = None,
        answer_of: Reading = read_logits,
        rungs: Sequence[Callable[[Bank], Rung]] = (),
    ) -> None:
        """Use `wrap` or `load`."""
        self.model = model
        self.config = config
        self._tokenizer = tokenizer
        self._way: Core | Layerwise
        self._forward: Any  # what holds the context of calls
        if config.tau is None:
            self._way = Core(model, config, tokenizer, answer_of, rungs)
            self._forward = self._way.forward
        elif rungs:
            raise ConfigError(f"rungs with tau={config.tau}: the paper's cache serves alone; leave one of them out")
        else:
            self._way = self._forward = build_layerwise(model, config, tokenizer)

    @property
    def _core(self) -> Core:
        if isinstance(self._way, Layerwise):
            raise ConfigError(f"not with tau={self.config.tau}: the paper's cache decides at each layer; leave tau out")
        return self._way

    @classmethod
    def wrap(
        cls,
        model: nn.Module,
        *,
        config: CacheConfig | Mapping[str, Any] | str | Path | None = None,
        tokenizer: Any = None,
        answer_of: Reading = read_logits,
        rungs: Sequence[Callable[[Bank], Rung]] = (),
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
            rungs: Classes of your own, or functions that take the cache's `Bank` and return a `Rung`. They are asked
                after exact repeats and before approximate reuse.
            **settings: Single settings, before those of `config`; see `CacheConfig`.

        Returns:
            The cache.

        Raises:
            ConfigError: A setting is wrong, or does not suit the model.
            UnsafeReuseError: `tau` with a head that answers token by token.
            UnsupportedModelError: The layers were not found.
            WrapError: The model is wrapped already.
        """
        return cls(model, CacheConfig.make(config, **settings), tokenizer, answer_of, rungs)

    @classmethod
    def load(
        cls,
        model: nn.Module,
        folder: str | Path,
        *,
        config: CacheConfig | Mapping[str, Any] | str | Path | None = None,
        tokenizer: Any = None,
        answer_of: Reading = read_logits,
        rungs: Sequence[Callable[[Bank], Rung]] = (),
    ) -> Self:
        """Wrap a model with a saved cache's settings, entries and calibration.

        What was purged in its store since it was saved is left out, with a calibration that rests on it.

        Args:
            model: As of `wrap`.
            folder: That `save` wrote.
            config: Settings in place of the saved ones, as of `wrap`; `policy`, `auto_bypass` and budgets may differ,
                budgets of a calibrated cache be raised.
            tokenizer: As of `wrap`.
            answer_of: As of `wrap`.
            rungs: As of `wrap`; a save does not keep them.

        Raises:
            UnfitBankError: It was saved from other weights, with another tokenizer, or by another version.
            BankFileError: The folder is incomplete or damaged.
            ConfigError: What was saved cannot be served with `config`.
            WrapError: The model is wrapped already.
        """
        given = None if config is None else CacheConfig.make(config)
        saved = Saved(folder, model, tokenizer)
        try:
            cache = cls(model, saved.settings(given), tokenizer, answer_of, rungs)
        except ConfigError as error:
            if given is not None:
                raise
            raise UnfitBankError(f"{folder}: its settings do not suit this model: {error}") from error
        try:
            cache._way.restore(saved)
        except BaseException:
            cache.unwrap()
            raise
        return cache

    def save(self, folder: str | Path) -> None:
        """Write settings, entries and calibration to a folder, atomically; an earlier save there is replaced.

        Threads and processes may save to one folder at once: one after the other does, and the last one stays. Only
        files that `save` wrote are ever replaced or removed.

        Raises:
            StoreError: Writing failed, or the folder has a `manifest.json` that is none of ours. An earlier save is
                still whole.
        """
        self._way.save(folder, self.model, self.config, self._tokenizer)

    def calibrate(
        self,
        requests: Requests,
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
                tokenizer; none is cut. They must be drawn like the requests to come: the bound is on their kind.
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
            CalibrationError: The requests cannot carry the claim (it says how many can), or one is nothing that the
                model takes, or a label is unknown, or the metric failed. Nothing is reused approximately then.
            ConfigError: A setting is wrong, or rules out a bound, or `recalibrate` is set and the metric needs labels;
                what was calibrated before then stays.
            UnsafeReuseError: The head answers token by token.
            WrapError: The cache was unwrapped.
        """
        claim = make_claim(self.config, max_drop, delta, metric, sources, seed)
        return self._core.learn().calibrate(requests, labels, claim)

    def observe(self, requests: Requests, *, labels: Sequence[Any] | None = None) -> list[Observation]:
        """Compute requests, and keep all that a calibration looks at: `calibrated` tries many on one pass of the model.

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
        return self._core.learn().observe(requests, labels)

    @property
    def calibrated(self) -> CalibratedReuse | None:
        """What is reused approximately, step by step: for replays. None before anything was observed or learned."""
        calibrator = self._way.calibrator if isinstance(self._way, Core) else None
        return None if calibrator is None else calibrator.calibrated

    @property
    def calibration(self) -> Calibration | None:
        """What approximate reuse rests on; None before one, and after a failure or a second alarm."""
        return None if self.calibrated is None else self.calibrated.calibration

    def compile(
        self,
        lengths: Sequence[int] = (32, 64, 128),
        rows: Sequence[int] = (1, 2, 4, 8),
        *,
        mode: str | None = None,
        backend: str | Callable[..., Any] = "inductor",
        max_padding: float = 0.5,
    ) -> None:
        """Compile what calls compute: one graph of the trunk for each bucket of `rows` by `lengths`.

        Decisions stay outside of the graphs. The rows of a call that nothing serves are padded to the smallest bucket
        that holds them. All graphs are made and tried here, which takes seconds to minutes each; none is made in
        service. Calls that keep K/V or bypass the cache run eagerly, and so do others that no graph fits, counted by
        reason in `stats().compiled`. What graphs compute is stored apart from what the model computes: its states are
        within 1e-4 of the largest (5e-2 below float32). Called again, it makes and counts anew. Not saved.

        Args:
            lengths: Tokens of a row, padding included; what is beyond the model's positions is left out.
            rows: Rows of a call.
            mode: Of `torch.compile`, for the backend `inductor`. Those with CUDA graphs serve this thread's calls only.
            backend: Of `torch.compile`.
            max_padding: Largest share of a bucket's tokens that may be padding, 0 to 1; beyond it, calls run eagerly.

        Raises:
            ConfigError: An argument is wrong; the cache has `tau`; the model is in training mode; its rows affect each
                other; a part's forward was replaced; or no bucket could be compiled. Earlier graphs stay then. Where
                some could be compiled, failures are counted and logged.
            WrapError: The cache was unwrapped.
        """
        if self._core.installed.is_empty:
            raise WrapError("the cache was unwrapped: wrap the model again")
        self._core.compile(lengths, rows, mode, backend, max_padding)

    def unwrap(self) -> nn.Module:
        """Take the cache off the model, which is then exactly as before, and return the model. Twice does nothing.

        What waits to be audited is dropped. A call that another thread is making ends with the answer that it would
        have had; where layers were skipped that can no longer be stood in for, the model is run again for it.

        Raises:
            WrapError: Somebody put another forward on top of one of ours; remove that, then call this again.
        """
        self._way.close()
        return self.model

    def drain(self) -> int:
        """Do now the work that waits for a moment without calls, and return how many jobs this thread did.

        Jobs are hits that the audit drew, and renewals of a calibration. None is left or under way afterwards. Hits
        that were served with other weights than the present ones wait until these are back. The call also waits for a
        calibration that `learn` has begun and for writes to a store, and publishes or takes up a shared calibration.
        """
        return self._way.drain()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.unwrap()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model in inference mode, where the cache can serve."""
        with torch.inference_mode():
            return self.model(*args, **kwargs)

    def stats(self) -> Stats:
        """Counters since wrapping or `restart_stats`, and what is held now."""
        return self._way.stats()

    def restart_stats(self) -> None:
        """Count requests, hits and times in `stats` from here on, after a warm-up, say.

        Failures stay counted. What the bank, the audit, graphs and a store count goes on.
        """
        self._way.restart_stats()

    @property
    def payload(self) -> str:
        """What each entry keeps of a request's hidden states: `sequence`, `cls`, `last` or `mean`."""
        return self._way.payload.name

    @property
    def last(self) -> tuple[Outcome, ...]:
        """What became of each row of this thread's last call, in order.

        Bypassed calls are recorded too, decode steps not: after `generate()` it tells of the last prefill. Empty before
        the first call and after one that raised; of calls made within one another it tells of the outer one. Async
        tasks of a thread share it: read it before an `await`.
        """
        outcomes: tuple[Outcome, ...] = self._forward.last
        return outcomes

    def clear(self) -> None:
        """Forget all entries, and the calibration that rests on them; counters, and what codecs learned, stay.

        With a store, this holds for all caches that share it.

        Raises:
            StoreError: The store could not be cleared. Nothing of it is in this cache's memory any more.
        """
        self._way.clear()

    def purge(self, *, namespace: str) -> int:
        """Forget all entries of a namespace and return how many requests they were, of those in memory.

        A calibration that rests on any of them ends, and nothing is learned from them. With a store, that holds for
        all caches that share it: none serves any of it once this has returned.

        Raises:
            StoreError: The store could not be purged. Nothing of it is in this cache's memory any more.
            ConfigError: `namespace` is not a string, or one of a class of its own, or no Unicode text.
        """
        return self._way.clear(checked_namespace(namespace))

    def forget(self, *args: Any, **kwargs: Any) -> int:
        """Forget what serves a call: a wrong answer, say. It takes what the model takes.

        Nothing is computed, but with `tau`, where the call is made to see what serves it at each layer.

        Its requests are computed when they come again, and remembered anew; of a prompt the blocks that it shares with
        others go as well. Requests of others that served it approximately serve no other request from now on, and a
        calibration stays. It holds for the namespace that it is called in and, with a store, for all caches that share
        it.

        Returns:
            How many requests were in memory.

        Raises:
            StoreError: The store could not forget them. They are in this cache's memory no more.
        """
        return self._way.forget(lambda: self(*args, **kwargs))

    @contextmanager
    def namespace(self, name: str, *, prefixes_from: str | None = None) -> Iterator[Self]:
        """Within: requests are stored in, and served from, this namespace only, but for prefixes that may be shared.

        Holds for this thread and async task, and for tasks begun in it. A thread started inside (an executor's, say)
        begins in the default namespace: enter the namespace there, or run it in a copy of the context. Blocks may end
        in any order; the last one that is still open holds. A generator that yields within one shares it with whoever
        runs the generator.

        Args:
            name: The namespace.
            prefixes_from: Another one, whose stored prefixes serve where they reach further: what all may know, such as
                a system prompt. It is only read. What is computed after such a prefix is stored in `name`, with a copy
                of the prefix, and whole requests are served from `name` alone.

        Raises:
            ConfigError: A namespace is not a string, or one of a class of its own, or no Unicode text.
        """
        name, shared = checked_namespace(name), None if prefixes_from is None else checked_namespace(prefixes_from)
        with setting(self._forward.namespace, name):
            if shared is None:
                yield self
            else:
                with setting(self._core.forward.prefixes_from, shared):
                    yield self

    def look_up(self, batch: Mapping[str, Any]) -> Found:
        """Look a batch up without running the model.

        Each part of the result can be run once, in the same namespace, without a second look-up. What was found is
        dropped with the result, and looked up anew where weights, entries, calibration or inputs changed meanwhile.
        Nothing is counted here; running a part counts its rows as usual. `last` is empty afterwards.

        Args:
            batch: Tokenised inputs of the model by name: `input_ids` (B, T), and tensors (B, ...) or others.

        Returns:
            Rows that are served and rows that are missing. Of calls that keep K/V, bypass the cache, or reach the trunk
            with other tensors than those of the batch, all rows are missing.

        Raises:
            ConfigError: There are no `input_ids`.
            Exception: What the model raises for the batch before its layers run.
        """
        return look_up(self.model, self._core.forward, batch)

    @contextmanager
    def only_if_cached(self) -> Iterator[Self]:
        """Within: a call is answered from the cache, or raises before the layers run. Per thread and async task.

        A call that raised is not counted: the one that computes its requests counts them.

        Raises:
            NotCachedError: In a call, where one of its requests is not in the cache, or the call must bypass it.
        """
        with setting(self._forward.is_only_if_cached, True):
            yield self

    @contextmanager
    def chunked(self, n_tokens: int, between: Callable[[], None]) -> Iterator[Self]:
        """Within: what a prompt has left to run is run in chunks, and something is done between two of them.

        Meant for servers, which let others have the model meanwhile. Holds for calls with a K/V cache and no mask; the
        whole prompt is looked up and stored as ever, and outputs are those of one run within the last bits. A call that
        bypasses the cache is run at once. Per thread and async task.

        Args:
            n_tokens: Of a chunk, at least 1.
            between: Called in this thread, within the model's forward. What it raises ends the call, which leaves its
                K/V cache empty and nothing stored.

        Raises:
            ConfigError: A chunk has no token.
        """
        if n_tokens < 1:
            raise ConfigError(f"n_tokens={n_tokens}: a chunk has 1 token at least")
        with setting(self._core.forward.chunks, Chunks(n_tokens, between)):
            yield self

    @contextmanager
    def disabled(self) -> Iterator[Self]:
        """Within: the model computes as if it were not wrapped. Per thread and async task."""
        with setting(self._forward.is_disabled, True):
            yield self

    def __repr__(self) -> str:
        rungs = "paper"
        if isinstance(self._way, Core):
            blocks = () if self._way.blocks is None else ("prefix",)
            rungs = "+".join([*(rung.name for rung in self._way.forward.rungs), *blocks])
        return f"LLMCache({type(self.model).__name__}, payload={self.payload!r}, rungs={rungs!r})"
