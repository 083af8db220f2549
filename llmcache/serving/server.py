"""State of one server: model, cache, phase. Routes get it as `request.app.state.server`."""

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter, time
from typing import Literal, TypeVar

from torch import Tensor

from llmcache.cache import LLMCache
from llmcache.models.arguments import takes_dict
from llmcache.serving.decoder import Decoder
from llmcache.serving.encoder import Encoder
from llmcache.serving.history import History
from llmcache.serving.loading import NAMES, Kind, Served
from llmcache.serving.metrics import Metrics
from llmcache.serving.model_thread import ModelThread
from llmcache.serving.refusals import Refusal, stopping
from llmcache.serving.saving import Saves
from llmcache.serving.settings import ServerSettings
from llmcache.serving.shared import Shared
from llmcache.serving.tokenizing import Tokenizing

logger = logging.getLogger("llmcache.serving")

Phase = Literal["starting", "ready", "draining", "stopping", "stopped"]
_T = TypeVar("_T")
_WARM_UP = "llmcache warm-up"  # not a valid namespace of a key
_N_INPUTS, _N_ANSWERS = 2048, 32  # maximum per request by default: OpenAI's, and of a decoder's answers to its prompts


class Server:
    """One model, its cache, and the thread that runs the model."""

    def __init__(self, settings: ServerSettings, served: Served, cache: LLMCache, saves: Saves) -> None:
        """Make a server of loaded parts; its `phase` is `starting` until `start` has ended."""
        self.settings, self.served, self.cache, self.saves = settings, served, cache, saves
        self.name = settings.model
        self.names = tuple(dict.fromkeys((self.name, *settings.model_alias)))
        self.max_inputs = settings.max_client_batch_size or (_N_ANSWERS if served.kind == "decoder" else _N_INPUTS)
        self.model, self.tokenizer = served.model, served.tokenizer
        parameter = next(served.model.parameters())
        self.dtype, self.device = str(parameter.dtype).removeprefix("torch."), parameter.device
        self.thread = ModelThread()
        self.phase: Phase = "starting"
        self.started_at = int(time())
        self.metrics = Metrics(settings.model, cache, lambda: self.n_waiting)
        self.history = History()
        self.is_disabled = False  # by an operator
        vocabulary = int(served.config.get_text_config().vocab_size)
        self.tokenizing = Tokenizing(
            served.tokenizer, served.max_length, vocabulary, served.prompts.values(), served.is_prompt_pooled
        )
        self.encoder: Encoder | None = None
        self.decoder: Decoder | None = None
        self._part: Encoder | Decoder

        def is_caching() -> bool:
            return settings.cache and not self.is_disabled

        shared = Shared(cache, self.thread, settings, self.metrics, is_caching)
        if served.kind == "decoder":
            self._part = self.decoder = Decoder(shared, served.tokenizer)
        else:
            self._part = self.encoder = Encoder(shared, served, self.tokenizing)

    @property
    def n_waiting(self) -> int:
        """Number of inputs or generations waiting for the model."""
        return self._part.n_waiting

    def engine_name(self) -> str:
        """Return the name of what computes misses. May block while `cache.stats()` waits for the cache."""
        engine = self.cache.stats().engine
        return engine.name if engine is not None and engine.n_graphs else "eager"

    @property
    def draft_name(self) -> str | None:
        """What drafts at present: `int8`; None if no calibration lets a draft serve."""
        draft, made = self.cache.config.draft, self.cache.calibration
        return None if draft is None or made is None or "draft" not in made.limits else draft.precision

    async def purge(self, namespace: str) -> int:
        """Purge a namespace with its tokenised prompts; later requests join no flight in it. See `LLMCache.purge`."""
        return await self._drop(partial(self.cache.purge, namespace=namespace), namespace)

    async def forget(self, inputs: Sequence[Mapping[str, Tensor]], namespace: str) -> int:
        """Remove the entries of each of these model inputs from a namespace; see `LLMCache.forget`."""
        is_dict, cache = takes_dict(self.model), self.cache

        def work() -> int:
            with cache.namespace(namespace):
                return cache._forget_all(
                    partial(cache, dict(one)) if is_dict else partial(cache, **one) for one in inputs
                )

        return await self._drop(work, namespace)

    async def clear(self) -> None:
        """Remove all entries of all namespaces; see `LLMCache.clear`."""
        await self._drop(self.cache.clear, None)

    async def _drop(self, work: Callable[[], _T], namespace: str | None) -> _T:
        """Run `work`, which drops entries of a namespace (None: all), beside the model: it may wait for a store."""
        self._part.forget(namespace)
        await self.thread.run(lambda: None)  # steps that came before end first, so that what they stored is dropped
        return await asyncio.to_thread(work)

    def check_ready(self) -> None:
        """Raise `Refusal` unless the server is ready."""
        if self.phase in ("stopping", "stopped"):
            raise stopping()
        if self.phase != "ready":
            raise Refusal("unhealthy", f"the server is {self.phase}", retry_after_s=1)

    def drain(self) -> None:
        """Refuse new requests and finish accepted ones, until `resume` or until the server stops."""
        if self.phase == "ready":
            self.phase = "draining"

    def resume(self) -> None:
        """Accept requests again. Has no effect on a server that is stopping."""
        if self.phase == "draining":
            self.phase = "ready"

    def refuse_waiting(self) -> None:
        """Begin to stop: refuse new requests and waiting generations, which could wait for long."""
        self.phase = "stopping"
        if self.decoder is not None:
            self.decoder.refuse_waiting()

    def refuse_all(self) -> None:
        """End running generations with a refusal. An encoder's batch ends soon by itself."""
        if self.decoder is not None:
            self.decoder.refuse_all()

    def check_name(self, name: str | None) -> None:
        """Raise `Refusal` if a request names another model than the served one; None and "" are accepted."""
        if name not in (None, "", *self.names):
            raise Refusal("not_found", f"this server has one model: {self.name}", param="model")

    def needs(self, kind: Kind) -> None:
        """Raise `Refusal` if the served model is not of the kind that the route needs."""
        own = self.served.kind
        if own != kind:
            raise Refusal("wrong_model", f"this route needs {NAMES[kind]}; {self.name} is {NAMES[own]}")

    async def start(self) -> None:
        began = perf_counter()
        await self.thread.run(self._warm_up)
        logger.info("warmed up in %.1f s", perf_counter() - began)
        gc.collect()
        gc.freeze()  # exclude long-lived objects of the model and libraries: a collection over them takes 0.3 s
        self.phase = "ready"

    async def stop(self) -> None:
        """Save the cache, shut the threads down and unwrap the model. Call it after the last request has ended."""
        self.phase = "stopping"
        await asyncio.to_thread(self.saves.try_to_save, self.cache)
        self._part.close()
        await asyncio.to_thread(self.thread.close)
        await asyncio.to_thread(self.cache.unwrap)
        self.phase = "stopped"

    def _warm_up(self) -> None:
        """Run short and long inputs, so that no request pays for first-run work; they are not counted in statistics."""
        n_tokens = min(self.settings.warmup_tokens, self.served.max_length)
        if n_tokens:
            self._part.warm_up(n_tokens, _WARM_UP)
            self.cache.purge(namespace=_WARM_UP)
            self.cache.restart_stats()
