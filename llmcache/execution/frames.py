"""Which forwards of one wrapped model are under way, innermost first.

A forward may be made within another one: by a hook, or by a module of one's own. Each begins on top of the one that it
finds, and puts that back when it ends, so the frames of Python are the stack. It hangs on the context, not the thread:
tasks, and greenlets that take turns within a forward, have contexts of their own. A generator cannot leave a forward
half-way, since a forward is no generator.
"""

import threading
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from llmcache.execution.old_call import Call
from llmcache.request.outcome import Outcome

if TYPE_CHECKING:  # what it looks at knows the hooks, which know this
    from llmcache.audit.audit import Audit
    from llmcache.execution.fast_path import OutputTemplate


@dataclass(slots=True)
class Frame:
    """A forward of the trunk, or of the whole model around it, that is under way.

    Attributes:
        outer: The forward of the same wrapped model within which this one is made, or None.
        last: What `LLMCache.last` is to say when it has ended.
        call: What a forward of the trunk knows, while it may use the cache; else None.
        template: How the output is packed, where all was decided before the layers; else None.
        entered_norm: What entered the final norm of a trunk that was run as it is, where entries keep that; else None.
        passing: A forward of the trunk that bypasses the cache, if somebody wants to know how it comes out.
        audit: Told that the processor is needed, or None.
        ended: Of a whole model: the calls of the trunk made directly within, None for each that bypassed the cache.
    """

    outer: "Frame | None"
    last: tuple[Outcome, ...]
    call: Call | None = None
    template: "OutputTemplate | None" = None
    entered_norm: Tensor | None = None
    passing: Call | None = None
    audit: "Audit | None" = None
    ended: list[Call | None] | None = None

    @property
    def is_outermost(self) -> bool:
        """Whether a forward of the trunk is made within no other one, but that of the model around it."""
        outer = self.outer
        return outer is None or (outer.ended is not None and outer.outer is None)


class Frames:
    """Those of one wrapped model, and how each thread's last one ended. Thread-safe."""

    def __init__(self) -> None:
        """None is under way."""
        self._innermost: ContextVar[Frame | None] = ContextVar("llmcache_frame", default=None)
        self._thread = threading.local()
        #: The innermost forward of this context, or None.
        self.innermost = self._innermost.get

    @property
    def last(self) -> tuple[Outcome, ...]:
        """Outcome of each row of this thread's last call; see `LLMCache.last`."""
        last: tuple[Outcome, ...] = getattr(self._thread, "last", ())
        return last

    @last.setter
    def last(self, outcomes: tuple[Outcome, ...]) -> None:
        self._thread.last = outcomes

    def begin(self, is_whole: bool) -> Frame:
        """Put a forward on top."""
        frame = Frame(self._innermost.get(), self.last, ended=[] if is_whole else None)
        self._innermost.set(frame)
        return frame

    def end(self, frame: Frame) -> None:
        """Put back what was below."""
        self._innermost.set(frame.outer)
