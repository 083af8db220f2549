"""Keeps the hits of calls that are looked up before they are made, until the call is made or the hits are discarded.

A call is recognised by the identity of its token ids. Its hits are valid only while its arguments, the weights and the
namespace are unchanged.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from llmcache.models.arguments import DECIDING
from llmcache.reuse.call import Call
from llmcache.support.context import setting


class Prepared:
    """The calls of one trunk that were looked up but not made yet. Thread-safe."""

    def __init__(self) -> None:
        self.kept: WeakValueDictionary[int, Call] = WeakValueDictionary()  # by identity of their input_ids
        self.is_on: ContextVar[bool] = ContextVar("llmcache_preparing", default=False)

    def look_up(self, run: Callable[[], object]) -> Call | None:
        """Return the looked-up trunk call that `run` makes, without running the trunk; None if it makes none."""
        try:
            with setting(self.is_on, True):
                run()
        except _LookedUp as prepared:
            return prepared.call
        return None

    def stop(self, call: Call) -> None:
        """Abort the model's forward, which `look_up` started."""
        raise _LookedUp(call)

    def keep(self, call: Call, numbers: Sequence[int], inputs: dict[str, Any]) -> Call:
        """Keep the hits of rows, by number, until the model runs on `inputs` or the returned call is freed."""
        kept = Call((), {}, call.namespace, scope=call.scope, kind=call.kind, inputs=inputs)
        kept.generation, kept.epoch, kept.versions = call.generation, call.epoch, _versions(inputs)
        kept.take_over(call, numbers)
        self.kept[id(inputs["input_ids"])] = kept
        return kept

    def take(self, call: Call) -> Call | None:
        """Remove and return the prepared call for this call, if arguments, weights and namespace are unchanged."""
        known = self.kept.get(id(call.arguments["input_ids"]))
        if known is None or (known.scope != call.scope and call.engine is not None and call.engine.name):
            return None  # unknown, or known under another engine's scope, which the call may yet take
        self.kept.pop(id(call.arguments["input_ids"]), None)
        if any(call.arguments.get(name) is not known.inputs.get(name) for name in DECIDING):
            return None
        before = known.versions, known.generation, known.epoch, known.scope, known.kind
        now = _versions(known.inputs), call.generation, call.epoch, call.scope, call.kind
        return known if before == now else None


class _LookedUp(BaseException):
    """Aborts the model's forward before the trunk runs, in a call that is only looked up."""

    def __init__(self, call: Call) -> None:
        super().__init__("looked up")
        self.call = call


def _versions(inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the version counters of tensors; tensors made in inference mode have none."""
    return tuple(one._version for one in inputs.values() if isinstance(one, Tensor) and not one.is_inference())
