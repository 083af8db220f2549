"""Why a call cannot use the cache: by its arguments before the trunk runs, by its states once layer 0 is reached."""

from typing import Any

from torch import Tensor

from llmcache.execution.components import Components
from llmcache.execution.old_call import Call
from llmcache.models.adapters import CACHE
from llmcache.models.arguments import Arguments
from llmcache.models.intact import Layers
from llmcache.models.model_config import setting
from llmcache.request.bypass import find_reason, is_plain_cache


class BypassCheck:
    """Of one wrapped model. All methods give a key of `bypass.CURES`, or None where the cache can be used."""

    def __init__(self, parts: Components, arguments: Arguments) -> None:
        """Remember what was wrapped.

        Args:
            parts: What calls are served with.
            arguments: The trunk's.
        """
        self._components = parts
        self._arguments = arguments
        self._layers = Layers(parts.trunk)

    @property
    def keeps_no_kv(self) -> bool:
        """Whether the model would make K/V that its head never reads and entries do not hold."""
        return self._components.payload.fits_any_length and self._components.trunk.makes_kv

    def by_arguments(self, arguments: dict[str, Any]) -> str | None:
        """As far as it shows before the trunk runs."""
        trunk, pooled = self._components.trunk, self._components.head.pooled
        defaults = self._arguments.defaults
        reason = self._components.counters.find_reason("look at the arguments", find_reason, arguments, trunk, defaults)
        if reason is None and self.keeps_no_kv:
            reason = self._by_kv(arguments)
        if reason is None and pooled is not None and pooled.has_changed():
            return "other_pooling"
        return reason or self._layers.find_reason()

    def by_states(self, call: Call, hidden: Tensor, cannot_skip: bool) -> str | None:
        """As far as it shows only when the first layer is reached.

        Args:
            call: Its K/V cache is known by now.
            hidden: What enters layer 0.
            cannot_skip: What layers hand on is not understood.
        """
        if call.progress.kv_cache is not None and not is_plain_cache(call.progress.kv_cache):
            return "kv_cache_kind"
        if cannot_skip:
            return "unknown_output"
        if hidden.ndim != 3 or hidden.shape[:2] != call.inputs.arguments["input_ids"].shape:
            return "unknown_layout"
        return None

    def after_a_failure(self, is_retired: bool) -> str:
        """Why a call's layers were not run through all of the swaps, in order."""
        return "unwrapped" if is_retired else self._layers.find_reason() or "other_layers"

    def _by_kv(self, arguments: dict[str, Any]) -> str | None:
        """Why a call cannot be run without the K/V that the model would make."""
        if arguments.get("use_cache") or arguments.get(CACHE) is not None:
            return "kv_cache_with_pooled_payload"
        asked = arguments.get("use_cache")
        makes_kv = setting(self._components.trunk.config, "use_cache") if asked is None else asked
        # Without K/V models look at the positions for where a text begins, and hide the texts before from it.
        is_unmasked = arguments.get("attention_mask") is None and arguments.get("position_ids") is not None
        return "packed" if makes_kv and is_unmasked else None
