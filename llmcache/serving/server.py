"""What one server holds, and in which state it is. Routes find it as `request.app.state.server`."""

from typing import Any, Literal

from llmcache.cache import LLMCache
from llmcache.serving.decoder import Decoder
from llmcache.serving.model_thread import ModelThread
from llmcache.serving.refusals import Refusal
from llmcache.serving.settings import ServerSettings

Phase = Literal["starting", "ready", "draining", "stopped"]


class Server:
    """One model, its cache, and the thread that runs it."""

    def __init__(self, settings: ServerSettings, model: Any, tokenizer: Any, cache: LLMCache) -> None:
        """Hold what was loaded; `phase` is `starting` until `start`."""
        self.settings = settings
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.thread = ModelThread()
        self.phase: Phase = "starting"
        self.decoder: Decoder | None = None

    def needs(self, *kinds: str) -> None:
        """Refuse a route that the model cannot serve.

        Raises:
            Refusal: The model is of none of these kinds.
        """
        if "decoder" in kinds and self.decoder is None:
            raise Refusal("wrong_model", f"this route needs a causal language model; {self.settings.model} is none")
