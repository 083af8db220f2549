"""`LLMCache`, the public facade. `core` builds its parts (with `tau`, `paper` does); `call` has the path of a call."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn

from llmcache.advice.advice import Advice
from llmcache.advice.decoder import DecoderTrial
from llmcache.advice.encoder import MAX_DROPS, EncoderTrial
from llmcache.advice.trial import Trial
from llmcache.calls.calibrator import make_claim
from llmcache.calls.chunks import Chunks
from llmcache.calls.core import Core
from llmcache.calls.found import Explanation, Found, explain, look_up
from llmcache.calls.save import Saved
from llmcache.config import CacheConfig
from llmcache.errors import ConfigError, UnfitBankError, WrapError
from llmcache.memory.bank import Bank
from llmcache.models.arguments import takes_dict, takes_tokens
from llmcache.models.callables import CallableModel, enclosed, refuse_settings, release
from llmcache.models.sentences import tokenizer_of
from llmcache.paper.build import build as build_layerwise
from llmcache.paper.layerwise import Layerwise
from llmcache.request.outcome import Outcome
from llmcache.request.rows import checked_namespace
from llmcache.reuse.answers import Reading, read_logits
from llmcache.reuse.calibration.calibrated_reuse import CalibratedReuse
from llmcache.reuse.calibration.calibration import Calibration
from llmcache.reuse.calibration.inputs import Requests, encoded, is_text, prompts_of
from llmcache.reuse.calibration.risk_target import Metric
from llmcache.reuse.call import Rung
from llmcache.reuse.observation import Observation
from llmcache.stats import Stats
from llmcache.support.context import scoped


class LLMCache:
    """The cache of one wrapped model. Made by `wrap`, removed by `unwrap`.

    The model is called as before, from any number of threads. Lossless rungs are on from the start. Approximate reuse
    begins with a calibration (`calibrate`, or `learn` in the settings), or with a threshold `tau` that you choose.
    """

    def __init__(
        self,
        model: nn.Module,
        config: CacheConfig,
        tokenizer: Any = None,
        answer_of: Reading = read_logits,
        rungs: Sequence[Callable[[Bank], Rung]] = (),
    ) -> None:
        """Use `wrap` or `load` instead."""
        refuse_settings(model, config)
        self.model = model
        self.config = config
        self._tokenizer = tokenizer
        if isinstance(model, CallableModel) and answer_of is read_logits:
            answer_of = model.read
        self._backend: Core | Layerwise
        self._forward: Any  # the swap on the trunk's forward
        if config.tau is None:
            self._backend = Core(model, config, tokenizer, answer_of, rungs)
            self._forward = self._backend.forward
        elif rungs:
            raise ConfigError(f"rungs with tau={config.tau}: the paper's cache takes no rungs; leave rungs out, or tau")
        else:
            self._backend = self._forward = build_layerwise(model, config, tokenizer)

    @property
    def _core(self) -> Core:
        if isinstance(self._backend, Layerwise):
            raise ConfigError(f"not with tau={self.config.tau}: the paper's cache decides at each layer; leave tau out")
        return self._backend

    @property
    def _installed_core(self) -> Core:
        if self._core.installed.is_empty:
            raise WrapError("the cache was unwrapped: wrap the model again")
        return self._core

    @classmethod
    def wrap(
        cls,
        model: Any,
        *,
        config: CacheConfig | Mapping[str, Any] | str | Path | None = None,
        tokenizer: Any = None,
        answer_of: Reading = read_logits,
        rungs: Sequence[Callable[[Bank], Rung]] = (),
        digest: str | None = None,
        embeddings: Any = None,
        **settings: Any,
    ) -> Self:
        """Wrap a model in a cache.

        Args:
            model: A transformers model with or without a head, or a sentence-transformers model. Changed in place until
                `unwrap`. Or a model without a trunk: an `onnxruntime.InferenceSession`, an `ORTModel` of Optimum (also
                within a sentence-transformers model), or any callable that takes `input_ids` (B, T) by name and returns
                tensors or arrays with one row per request. It is called a few times here, with made-up tokens.
            config: Settings, as `CacheConfig`, a mapping or the path of a YAML file.
            tokenizer: It tokenises texts given to the cache, and fingerprints leave out its special tokens. None: the
                one that a sentence-transformers model holds. For other models texts are then refused, and fingerprints
                leave out the tokens that the model's config names, and for BERT-like models the usual ids.
            answer_of: `output -> logits (B, C)`: reads the answer from the model's output, if that is neither a tensor
                nor has `logits`. Used wherever answers are compared.
            rungs: Your own rungs: classes or functions that take the cache's `Bank` and return a `Rung`. They are asked
                after exact repeats and before approximate reuse.
            digest: For a model without a trunk: names its weights and all else that decides its answers. Change it with
                them: entries of one digest serve all callables with it. None: the SHA-256 of a session's file.
            embeddings: For a model without a trunk: a vector for each token (V, D), from which calibrated reuse makes
                fingerprints; None: made-up vectors, with which fewer requests may be served.
            **settings: Single settings, which override those of `config`; see `CacheConfig`.

        Returns:
            The cache.

        Raises:
            ConfigError: A setting is wrong, or does not suit the model.
            UnsafeReuseError: `tau` with a head that answers token by token.
            UnsupportedModelError: The layers were not found.
            WrapError: The model is wrapped already.
        """
        made = CacheConfig.make(config, **settings)
        tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
        with enclosed(model, digest, embeddings, tokenizer) as module:
            return cls(module, made, tokenizer, answer_of, rungs)

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
        digest: str | None = None,
        embeddings: Any = None,
        draft: Any = None,
        **settings: Any,
    ) -> Self:
        """Wrap a model with a saved cache's settings, entries and calibration.

        Entries purged from its store since the save are left out, and so is a calibration with such sources.

        Args:
            model: As for `wrap`.
            folder: A folder that `save` wrote.
            config: Settings that replace all saved ones, as for `wrap`. Only `policy`, `auto_bypass`, `engine` and
                budgets may differ; budgets of a calibrated cache may only be raised.
            tokenizer: As for `wrap`.
            answer_of: As for `wrap`.
            rungs: As for `wrap`; `save` does not write them.
            digest: As for `wrap`.
            embeddings: As for `wrap`.
            draft: The model that drafts, if the cache was wrapped with one; `save` does not write it. Or the setting.
            **settings: Single settings, which override those of `config`, or else of the save.

        Raises:
            UnfitBankError: It was saved from other weights, with another tokenizer, or by another version.
            BankFileError: The folder is incomplete or damaged.
            StoreError: It was replaced while it was read, and another save there does not end.
            ConfigError: The saved cache cannot be used with `config`.
            WrapError: The model is wrapped already.
        """
        if draft is not None and not isinstance(draft, nn.Module):
            settings["draft"], draft = draft, None
        given = None if config is None else CacheConfig.make(config, **settings)
        tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
        with enclosed(model, digest, embeddings, tokenizer) as module:
            saved = Saved(folder, module, tokenizer)
            try:
                if config is None and settings:
                    given = CacheConfig.make(saved.manifest.config, **settings)
                chosen = saved.settings(given)
                if draft is not None:
                    chosen = chosen.with_draft(draft)
                cache = cls(module, chosen, tokenizer, answer_of, rungs)
            except ConfigError as error:
                if given is not None:
                    raise
                raise UnfitBankError(
                    f"{folder}: its settings do not suit this model: {error}; or give another folder"
                ) from error
            try:
                cache._backend.restore(saved)
            except BaseException:
                cache.unwrap()
                raise
            return cache

    def save(self, folder: str | Path) -> None:
        """Write settings, entries and calibration to a folder, atomically, replacing an earlier save there.

        Threads and processes may save to one folder at once: saves are serialised, and the last one stays. Only files
        that `save` wrote are ever replaced or removed.

        Raises:
            StoreError: Writing failed, or the folder has another program's `manifest.json`. An earlier save is intact.
        """
        self._backend.save(folder, self.config)

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
        """Turn approximate reuse on, to the extent that these requests show its loss to be at most `max_drop`.

        All requests are computed. Some of them become sources; an earlier calibration ends.

        Args:
            requests: Tokenised inputs of the model, each with one or more requests; or texts, if `wrap` was given the
                tokenizer, cut as in calls. Requests must be drawn like those to come: the bound is for them.
            labels: The correct answer of each request, in order: a class number, or its name in the model's config.
            max_drop: Largest loss, a fraction of 1; None: as in the settings.
            delta: Probability that the loss is larger all the same, over 0, under 1; None: as in the settings.
            metric: `changed`: answers that differ from the model's own, as a share of all requests. `accuracy`: correct
                answers that become wrong, as a share of all requests; needs labels. Or a bounded `Metric` of your own.
            sources: `frozen`, or `growing`: later misses become sources, and no bound holds; None: as in the settings.
            seed: Seed of the split of the requests into three parts.

        Returns:
            The chosen limit and its evidence. If `chosen` is None, nothing is reused approximately.

        Raises:
            CalibrationError: There are too few requests for the claim (the message says how many are enough), the model
                rejects a request, a label is unknown, the metric failed, or a request has several rows and rows affect
                each other. Nothing is reused approximately then.
            ConfigError: A setting is wrong or rules out a bound, or `recalibrate` is set and the metric needs labels.
                An earlier calibration then stays.
            UnsafeReuseError: The head answers token by token.
            WrapError: The cache was unwrapped.
        """
        claim = make_claim(self.config, max_drop, delta, metric, sources, seed)
        return self._core.learn().calibrate(requests, labels, claim)

    def observe(self, requests: Requests, *, labels: Sequence[Any] | None = None) -> list[Observation]:
        """Compute requests once and return all that a calibration needs, so that `calibrated` can try many settings.

        No request is served from the cache or stored.

        Args:
            requests: As for `calibrate`.
            labels: As for `calibrate`.

        Raises:
            CalibrationError: A request could not be computed, or the number of labels differs from that of requests.
            ConfigError: A setting rules out a calibration.
            UnsafeReuseError: The head answers token by token.
            WrapError: The cache was unwrapped.
        """
        return self._core.learn().observe(requests, labels)

    def advise(
        self,
        requests: Requests,
        *,
        max_drop: float | None = None,
        max_drops: Sequence[float] = MAX_DROPS,
        seconds: float = 20.0,
        on_way: Callable[[Advice], object] | None = None,
    ) -> Advice:
        """Replay requests by each way to answer them, and recommend one; this cache is left as it is.

        Ways of an encoder: the model alone, ONNX Runtime in float32 and int8 without a cache, exact repeats, and
        calibrated reuse, with an int8 draft if the extra `onnx` is installed. Of a session: itself, an int8 copy of its
        file, and both kinds of reuse. Of a decoder: its prompts alone and with stored prefixes, one by one and eight a
        call. The first half of the requests, or as many as `max_drop` needs, is learned from. Other caches are made for
        the trial, with this one's settings and a memory of their own; graphs are kept as for the setting `engine`.

        Args:
            requests: As for `calibrate`, in the order of arrival, at least 200; for a decoder as for `prefill`.
            max_drop: Largest share of answers that the recommended way may change; None: as in the settings.
            max_drops: Shares for which calibrated reuse is tried, besides `max_drop`.
            seconds: Of the second half, as many requests are served as the model alone answers in this time, and at
                least 100, or 24 prompts.
            on_way: Called with the advice so far after each way.

        Raises:
            ConfigError: There are fewer than 200 requests, most of their tokens are unknown to the tokenizer, or the
                model's answers cannot be compared.
            CalibrationError: A request is not valid.
            WrapError: The cache was unwrapped.
        """
        core, drop = self._installed_core, self.config.max_drop if max_drop is None else max_drop
        about = core, self.config, list(requests), drop, seconds
        is_decoder = core.trunk.makes_kv and core.wrapped.head.name == "language-model head"
        trial: Trial = DecoderTrial(*about) if is_decoder else EncoderTrial(*about, sorted({*max_drops, drop}))
        return trial.advise(on_way)

    @property
    def calibrated(self) -> CalibratedReuse | None:
        """The steps of calibrated reuse, for replays. None before any request was observed or learned from."""
        return self._backend.reuse.calibrated if isinstance(self._backend, Core) else None

    @property
    def calibration(self) -> Calibration | None:
        """The calibration in force; None before the first, and after a failure or a second alarm."""
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
        """Compile the trunk: one graph for each bucket of `rows` by `lengths`.

        Lookups and decisions stay outside the graphs. The rows of a call without a hit are padded to the smallest
        bucket that holds them. All graphs are made and tried here, which takes seconds to minutes each; none is made in
        service. Calls that keep K/V or bypass the cache run eagerly, and so do calls that no graph fits, counted by
        reason in `stats().engine`. States computed by graphs are stored apart from the model's own, from which they
        differ by at most 1e-4 of the largest state (5e-2 below float32). A second call compiles and counts anew. Graphs
        are not saved.

        Args:
            lengths: Tokens of a row, padding included. Lengths beyond the model's positions are left out.
            rows: Rows of a call.
            mode: Of `torch.compile`, for the backend `inductor`. With CUDA graphs, only this thread's calls use them.
            backend: Of `torch.compile`.
            max_padding: Largest share of a bucket's tokens that may be padding, 0 to 1; beyond it, calls run eagerly.

        Raises:
            ConfigError: An argument is wrong; the cache has `tau`; the model is in training mode; its rows affect each
                other; a module's forward was replaced; or no bucket could be compiled. Earlier graphs then stay. If
                only some buckets fail, the failures are counted and logged.
            WrapError: The cache was unwrapped.
        """
        self._installed_core.compile(lengths, rows, mode, backend, max_padding)

    def build_engine(self) -> None:
        """Make the graph of the setting `engine` anew for the present weights, after an edit; some seconds or more.

        With `engine="eager"` nothing is done. If no graph can be made, calls run eagerly, and a warning says why.

        Raises:
            ConfigError: The cache has `tau`, or a package of the extra `onnx` is not installed.
            WrapError: The cache was unwrapped.
        """
        core = self._installed_core
        core.recheck()
        core.build_engine()

    def unwrap(self) -> Any:
        """Remove the cache, restoring the model exactly, and return what was wrapped. A second call does nothing.

        Waiting audits are dropped. A call under way in another thread still returns the right answer; if its skipped
        layers can no longer be replaced, the model is run again.

        Raises:
            WrapError: Another forward was put on top of one of the cache's; remove that, then call this again.
        """
        self._backend.close()
        return release(self.model)

    def drain(self) -> int:
        """Do all background work now, and return how many jobs this thread did.

        A job is the audit of a hit or the renewal of a calibration. No job is waiting or under way afterwards, except
        audits of hits served under other weights, which wait until those are back. This also waits for a calibration
        that `learn` has begun and for writes to a store, and publishes or adopts a shared calibration.
        """
        return self._backend.drain()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.unwrap()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model in inference mode, in which the cache can serve.

        Args:
            *args: The model's arguments; or one text or list of texts, if there is a tokenizer (see `wrap`). Texts are
                padded, and cut at the most tokens that the model takes.
            **kwargs: The model's arguments.

        Raises:
            ConfigError: A text, without the tokenizer.
        """
        args, kwargs = self._arguments(args, kwargs)
        with torch._C._InferenceMode(True):  # cold, `torch.inference_mode` takes twice as long
            return self.model(*args, **kwargs)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call, with texts tokenised unless the model's forward takes them itself."""
        if not (len(args) == 1 and is_text(args[0]) and takes_tokens(self.model)):
            return args, kwargs
        inputs = encoded(args[0], self._tokenizer, self._backend.trunk)
        return ((inputs,), kwargs) if takes_dict(self.model) else ((), {**inputs, **kwargs})

    def prefill(self, prompts: str | Sequence[Any] | torch.Tensor) -> int:
        """Compute what prompts will begin with, such as a system prompt or documents, and keep it for them.

        Each counts as a request. It is kept in the current namespace, and evicted like any other prompt.

        Args:
            prompts: A text, to which the tokenizer adds its special tokens; token ids, a sequence or tensor of integers
                (T,); messages, which the chat template formats without the start of an answer; or a list of these. The
                last token of a text may be another one where text follows.

        Returns:
            How many tokens are held now, of each prompt from its first token on, summed over the prompts. Fewer than
            they have if `max_bytes` does not suffice.

        Raises:
            ConfigError: A text or messages without the tokenizer (see `wrap`); an empty prompt; the cache has `tau` or
                holds no prefixes; or the call bypasses the cache.
            WrapError: The cache was unwrapped.
            Exception: Any error that the model raises.
        """
        return self._installed_core.prefill(prompts_of(prompts, self._tokenizer))

    def stats(self) -> Stats:
        """Return counters since wrapping or `restart_stats`, and the present contents of the cache."""
        return self._backend.stats()

    def restart_stats(self) -> None:
        """Reset requests, hits and times in `stats`, after a warm-up, say.

        Failures stay counted, and so do the counts of the bank, the audit, graphs and a store.
        """
        self._backend.restart_stats()

    @property
    def payload(self) -> str:
        """The hidden states that an entry keeps: `sequence`, `cls`, `last` or `mean`; `row`: a callable's output."""
        return self._backend.payload.name

    @property
    def last(self) -> tuple[Outcome, ...]:
        """The outcome of each row of this thread's last call, in order.

        Includes bypassed calls but not decode steps: after `generate()` it holds the last prefill. Empty before the
        first call and after a call that raised. For nested calls it holds the outer one. Async tasks of a thread share
        it: read it before an `await`.
        """
        outcomes: tuple[Outcome, ...] = self._forward.last
        return outcomes

    def clear(self) -> None:
        """Forget all entries and the calibration. Counters and fitted codecs stay.

        With a store, this applies to all caches that share it.

        Raises:
            StoreError: The store could not be cleared. This cache's memory has been cleared all the same.
        """
        self._backend.clear()

    def purge(self, *, namespace: str) -> int:
        """Forget all entries of a namespace, and return how many requests were in memory.

        A calibration with sources in the namespace ends, and nothing more is learned from its requests. With a store,
        this applies to all caches that share it: none serves any of these entries once this has returned.

        Raises:
            StoreError: The store could not be purged. This cache's memory has been purged all the same.
            ConfigError: `namespace` is not a plain `str`, or is not valid Unicode.
        """
        return self._backend.clear(checked_namespace(namespace))

    def forget(self, *args: Any, **kwargs: Any) -> int:
        """Forget the entries that serve a call, because its answer is wrong, say. Takes the model's arguments.

        Nothing is computed, except with `tau`: then the call is made, to find what serves it at each layer.

        The call's requests are computed and stored anew when they come again. For a prompt, blocks that it shares with
        other prompts are forgotten too. Sources that served it approximately serve no other request from now on; the
        calibration stays. Applies to the current namespace and, with a store, to all caches that share it. No call that
        began before this returns brings any of it back.

        Returns:
            How many requests were in memory.

        Raises:
            StoreError: The store could not forget them. This cache's memory has forgotten them all the same.
        """
        return self._forget_all([partial(self, *args, **kwargs)])

    def _forget_all(self, calls: Iterable[Callable[[], object]]) -> int:
        """Forget what serves calls of this cache, at once: a store on Redis waits once; see `forget`."""
        return self._backend.forget(calls)

    @contextmanager
    def namespace(self, name: str, *, prefixes_from: str | None = None) -> Iterator[Self]:
        """Within a `with` block, store requests in this namespace and serve them from it only.

        Applies to this thread and async task, and to tasks started in it. A thread started inside (an executor's, say)
        begins in the default namespace: enter the namespace there, or run it in a copy of the context. Blocks may end
        in any order; the newest open block applies. A generator that yields within a block shares it with its caller.

        Args:
            name: The namespace.
            prefixes_from: A second namespace, whose stored prefixes are used if they are longer: for public text such
                as a system prompt. It is only read. Tokens computed after such a prefix are stored in `name`, with a
                copy of the prefix, and whole requests are served from `name` alone.

        Raises:
            ConfigError: A namespace is not a plain `str`, or is not valid Unicode.
        """
        name, shared = checked_namespace(name), None if prefixes_from is None else checked_namespace(prefixes_from)
        own = scoped(self._forward.namespace, name)
        with own, nullcontext() if shared is None else scoped(self._core.forward.prefixes_from, shared):
            yield self

    def look_up(self, batch: Mapping[str, Any]) -> Found:
        """Look a batch up without running the model.

        Each part of the result can be run once, in the same namespace, without a second lookup. Hits are discarded with
        the result, and looked up again if weights, entries, calibration or inputs changed meanwhile. Nothing is counted
        here; running a part counts its rows as usual. `last` is empty afterwards.

        Args:
            batch: Tokenised inputs of the model by name: `input_ids` (B, T), other tensors (B, ...), other values.

        Returns:
            The rows that the cache serves and the missing rows. All rows are missing if the call keeps K/V, bypasses
            the cache, or reaches the trunk with tensors other than the batch's.

        Raises:
            ConfigError: There are no `input_ids`.
            Exception: Any error that the model raises before its layers run.
        """
        return look_up(self.model, self._core.forward, batch)

    def explain(self, *args: Any, **kwargs: Any) -> tuple[Explanation, ...]:
        """Tell what `cache(...)` would do with a call, and why; the model does not run. Takes what `cache(...)` takes.

        Nothing is counted in `stats` or stored; a draft runs. `last` is empty afterwards.

        Returns:
            An `Explanation` for each row, in order; `str` makes a sentence of it.

        Raises:
            ConfigError: The cache has `tau`; a text, without the tokenizer; or the model does not reach its trunk.
            WrapError: The cache was unwrapped.
            Exception: Any error that the model raises before its layers run.
        """
        return explain(self._installed_core.forward, lambda: self(*args, **kwargs))

    @contextmanager
    def only_if_cached(self) -> Iterator[Self]:
        """Within a `with` block, answer calls from the cache or raise before the layers run. Per thread and async task.

        A call that raises is not counted: the later call that computes its requests is.

        Raises:
            NotCachedError: In a call, if a request is not in the cache, the call must bypass it, or the audit takes a
                hit back: after a drift, or while too many hits wait to be recomputed.
        """
        with scoped(self._forward.is_only_if_cached, True):
            yield self

    @contextmanager
    def chunked(self, n_tokens: int, between: Callable[[], None]) -> Iterator[Self]:
        """Within a `with` block, run the uncached part of a prompt in chunks, with a callback between two chunks.

        For servers, which run other requests between chunks. Applies to calls with a K/V cache and no mask. The whole
        prompt is looked up and stored as usual; outputs differ from those of a single run in the last bits only. A call
        that bypasses the cache is run at once, and so are tokens of several rows that are computed in one row: at most
        256, on an accelerator 2,048. Per thread and async task.

        Args:
            n_tokens: Tokens per chunk, at least 1.
            between: Called in this thread, within the model's forward. If it raises, the call ends with an empty K/V
                cache and nothing stored.

        Raises:
            ConfigError: `n_tokens` is less than 1.
        """
        if n_tokens < 1:
            raise ConfigError(f"n_tokens={n_tokens}: a chunk has at least 1 token")
        with scoped(self._core.forward.chunks, Chunks(n_tokens, between)):
            yield self

    @contextmanager
    def disabled(self) -> Iterator[Self]:
        """Within a `with` block, compute as if the model were not wrapped. Per thread and async task."""
        with scoped(self._forward.is_disabled, True):
            yield self

    def __repr__(self) -> str:
        rungs, held = "paper", ""
        if isinstance(self._backend, Core):
            stats, blocks = self.stats(), () if self._backend.blocks is None else ("prefix",)
            rungs = "+".join([*(rung.name for rung in self._backend.rungs), *blocks])
            if blocks:
                most = stats.prefix_max_nbytes / 1e6
                held = f", blocks='{stats.n_blocks:,}, {stats.prefix_nbytes / 1e6:,.1f} of {most:,.1f} MB'"
        return f"LLMCache({type(self.model).__name__}, payload={self.payload!r}, rungs={rungs!r}{held})"
