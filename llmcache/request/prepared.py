"""Calls that are looked up before they are made: what was found is kept until the call comes, or is thrown away.

A call is recognised by the identity of its token ids. What is kept of it counts only while its arguments, the weights
and the namespace are as they were.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from llmcache.models.arguments import DECIDING
from llmcache.request.call import Call
from llmcache.request.variables import setting


class Prepared:
    """The calls of one trunk that were looked up and not made yet. Thread-safe."""

    def __init__(self) -> None:
        """Begin with none."""
        self.kept: WeakValueDictionary[int, Call] = WeakValueDictionary()  # by identity of their input_ids
        self.is_on: ContextVar[bool] = ContextVar("llmcache_preparing", default=False)

    def look_up(self, run: Callable[[], object]) -> Call | None:
        """Look up the trunk call that `run` makes, without running the trunk; None if it makes none."""
        try:
            with setting(self.is_on, True):
                run()
        except _LookedUp as prepared:
            return prepared.call
        return None

    def stop(self, call: Call) -> None:
        """End the forward of the model, within `look_up`."""
        raise _LookedUp(call)

    def keep(self, call: Call, numbers: Sequence[int], inputs: dict[str, Any]) -> Call:
        """Keep the hits of some rows until the model is run on `inputs`, or the returned call is garbage-collected."""
        kept = Call((), {}, call.namespace, scope=call.scope, kind=call.kind, inputs=inputs)
        kept.generation, kept.number, kept.versions = call.generation, call.number, _versions(inputs)
        kept.take_over(call, numbers)
        self.kept[id(inputs["input_ids"])] = kept
        return kept

    def take(self, call: Call) -> Call | None:
        """Remove and return what was kept of a call, if its arguments, weights and namespace are as they were."""
        known = self.kept.pop(id(call.arguments["input_ids"]), None)
        if known is None or any(call.arguments.get(name) is not known.inputs.get(name) for name in DECIDING):
            return None
        before = known.versions, known.generation, known.number, known.scope, known.kind
        now = _versions(known.inputs), call.generation, call.number, call.scope, call.kind
        return known if before == now else None


class _LookedUp(BaseException):
    """Ends the model's forward before the trunk runs, in a call that is only looked up."""

    def __init__(self, call: Call) -> None:
        super().__init__("looked up")
        self.call = call


def _versions(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """Version counters of tensors; those made in inference mode have none."""
    return tuple(one._version for one in inputs.values() if isinstance(one, Tensor) and not one.is_inference())
