"""Keeps the hits of calls that are looked up before they are made, until the call is made or the hits are discarded.

A call is recognised by the identity of its token ids. Its hits are valid only while its arguments, the weights and the
namespace are unchanged.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from torch import Tensor, nn

from llmcache.models.arguments import DECIDING
from llmcache.request.reading import Requests
from llmcache.request.rows import Scope
from llmcache.reuse.calibration.calibration import Calibration
from llmcache.reuse.call import Bypass, Call, Hit
from llmcache.reuse.sources import Choice
from llmcache.support.arrays import Floats
from llmcache.support.context import scoped

T = TypeVar("T")


@dataclass(slots=True, weakref_slot=True)
class Prepared:
    """The hits of rows that were looked up, for a call on `inputs` that is not made yet."""

    inputs: Mapping[str, Any]  # the model's
    versions: tuple[int, ...]  # version counters of the tensors in `inputs`
    when: tuple[Scope, tuple[Any, ...], int, int]  # scope, kind, generation and store's epoch of the call
    requests: Requests
    calibration: Calibration | None
    hits: dict[int, Hit]
    choices: dict[int, Choice]
    vectors: dict[int, Floats]
    forecasts: dict[int, Floats]
    lookup_s: float

    def resume(self, call: Call) -> None:
        """Give a call what was found for its rows."""
        call.hits, call.choices, call.vectors, call.forecasts = self.hits, self.choices, self.vectors, self.forecasts
        call.calibration, call.lookup_s, call.is_looked_up = self.calibration, self.lookup_s, True


class PreparedCalls:
    """The calls of one trunk that were looked up but not made yet. Thread-safe."""

    def __init__(self, adapted: Callable[[], Sequence[nn.Module]]) -> None:
        """Keep nothing yet; `adapted` returns PEFT's layers, see `Weights.adapted`."""
        self._adapted = adapted
        self.kept: WeakValueDictionary[int, Prepared] = WeakValueDictionary()  # by identity of their input_ids
        self.is_on: ContextVar[bool] = ContextVar("llmcache_preparing", default=False)

    def look_up(self, run: Callable[[], object]) -> Call | Bypass | None:
        """Return the looked-up trunk call that `run` makes, without running the trunk; None if it makes none."""
        before = [(layer, {*layer._forward_pre_hooks}) for layer in self._adapted()]
        try:
            with scoped(self.is_on, True):
                run()
        except _LookedUp as prepared:
            for layer, hooks in before:  # PEFT removes its own only after a forward that ends
                for hook in layer._forward_pre_hooks.keys() - hooks:
                    del layer._forward_pre_hooks[hook]
                    layer._forward_pre_hooks_with_kwargs.pop(hook, None)
            return prepared.call
        return None

    def stop(self, call: Call | Bypass) -> None:
        """Abort the model's forward, which `look_up` started."""
        raise _LookedUp(call)

    def keep(self, call: Call, numbers: Sequence[int], inputs: dict[str, Any]) -> Prepared:
        """Keep the hits of rows until the model runs on `inputs` or what is returned is freed.

        Row `numbers[i]` of the call becomes row i.
        """
        place = {number: new for new, number in enumerate(numbers)}

        def take(found: Mapping[int, T]) -> dict[int, T]:
            return {place[number]: value for number, value in found.items() if number in place}

        kept = Prepared(
            inputs,
            _versions(inputs),
            (call.scope, call.kind, call.generation, call.epoch),
            call.requests.take(numbers),
            call.calibration,
            take(call.hits),
            take(call.choices),
            take(call.vectors),
            take(call.forecasts),
            call.lookup_s * len(numbers) / len(call.rows),
        )
        self.kept[id(inputs["input_ids"])] = kept
        return kept

    def take(self, arguments: Mapping[str, Any], when: tuple[Scope, tuple[Any, ...], int, int]) -> Prepared | None:
        """Remove and return what was prepared for a call, if arguments, weights and namespace are unchanged."""
        known, scope = self.kept.get(id(arguments["input_ids"])), when[0]
        if known is None or (known.when[0] != scope and scope.engine):
            return None  # unknown, or known under another engine's scope, which the call may yet take
        self.kept.pop(id(arguments["input_ids"]), None)
        if any(arguments.get(name) is not known.inputs.get(name) for name in DECIDING):
            return None
        return known if known.versions == _versions(known.inputs) and known.when == when else None


class _LookedUp(BaseException):
    """Aborts the model's forward before the trunk runs, in a call that is only looked up."""

    def __init__(self, call: Call | Bypass) -> None:
        super().__init__("looked up")
        self.call = call


def _versions(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the version counters of tensors; tensors made in inference mode have none."""
    return tuple(
        tensor._version for tensor in inputs.values() if isinstance(tensor, Tensor) and not tensor.is_inference()
    )
