"""Compiled graphs of the trunk for calls whose decisions are made before the layers.

No decision enters a graph. What is left to compute when the rungs were asked, the rows that nothing serves, is padded
to a bucket, that is, to so many rows of so many tokens, and run by the graph of that bucket. Graphs are made of a twin
of the trunk, which has its tensors and none of its hooks, before they are needed; none is made in service. Where no
graph can stand for the trunk, the trunk is run as it is, which is counted by reason.

A graph sees edits of weights in place. Everything else that the digest of the weights covers is part of a graph, so
that all are dropped when it changes.

Sizes: B rows, T tokens of a call; R rows, L tokens of a bucket.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmcache.errors import ConfigError
from llmcache.execution.eager import Conditions, torch_settings
from llmcache.execution.frames import Frame
from llmcache.execution.graphs import Bucket, Graph, Maker
from llmcache.execution.model_process import ModelProcess
from llmcache.execution.old_call import Call
from llmcache.models.adapters import device_of
from llmcache.models.arguments import Arguments
from llmcache.models.hooks import parts_of
from llmcache.models.mark import Mark
from llmcache.models.model_config import setting
from llmcache.models.rope import changes_with_length
from llmcache.request.bypass import CURES
from llmcache.request.rows import Scope
from llmcache.stats import CompileStats
from llmcache.threads import forkable

if TYPE_CHECKING:  # who import `parts`, which holds this
    from llmcache.execution.components import Components
    from llmcache.execution.lookup import Lookup

logger = logging.getLogger("llmcache")

#: Calls that bypass the cache for these reasons run a graph all the same.
_BYPASSES = ("not_worthwhile", "compared")
_EQUAL_BYPASSES = (*_BYPASSES, "disabled")  # and for these the process, which puts out the very same
_OWNING_MODES = ("reduce-overhead", "max-autotune")  # whose graphs write each output to the same memory


@dataclass(frozen=True, slots=True)
class Compiled:
    """Graphs that are in force.

    Attributes:
        graphs: By bucket.
        maker: Made them, and their inputs.
        mark: Of the weights that they were made of.
        attention: Implementation that they were made with.
        conditions: Under which they stand for the trunk.
        max_padding: Largest share of a bucket's tokens that may be padding.
        process: Runs calls of all shapes as they are, in place of graphs.
    """

    graphs: dict[Bucket, Graph]
    maker: Maker
    mark: Mark
    attention: str
    conditions: Conditions
    max_padding: float
    process: ModelProcess | None = None

    def find(self, bucket: Bucket) -> Graph:
        """What runs calls of a bucket."""
        return self.graphs[bucket] if self.process is None else self.process

    def fit(self, n_rows: int, n_tokens: int) -> Bucket | None:
        """The smallest bucket that holds so many rows of so many tokens, if not too much of it were padding."""
        if self.process is not None:
            return Bucket(n_rows, n_tokens)
        holding = [one for one in list(self.graphs) if one.rows >= n_rows and one.length >= n_tokens]
        bucket = min(holding, key=lambda one: (one.rows * one.length, one.rows), default=None)
        if bucket is None or n_rows * n_tokens < (1 - self.max_padding) * bucket.rows * bucket.length:
            return None
        return bucket


class CompiledTrunk:
    """Runs one wrapped model's trunk by graphs where it can. Thread-safe: graphs are exchanged as a whole."""

    def __init__(self, parts: "Components", arguments: Arguments, lookup: "Lookup") -> None:
        """Begin without graphs.

        Args:
            parts: What calls are served with.
            arguments: The trunk's.
            lookup: Knows where decisions are made.
        """
        self._components = parts
        self._arguments = arguments
        self._lookup = lookup
        self._compiled: Compiled | None = None
        self._digest = ""  # the latest of weights that differ from those compiled in their values alone
        self._making = forkable(threading.Lock(), is_waited_for=False)
        self._lock = forkable(threading.Lock())
        self._eager: Counter[str] = Counter()
        self._n_requests = self._n_failed = self._n_dropped = 0
        self._was_made = False

    @property
    def is_on(self) -> bool:
        """Whether graphs are in force."""
        return self._compiled is not None

    def stats(self) -> CompileStats | None:
        """What was done by graphs, and what was not; None before any were made."""
        compiled = self._compiled
        with self._lock:
            if not self._was_made:
                return None
            n_graphs = 0 if compiled is None else len(compiled.graphs)
            has_process = compiled is not None and compiled.process is not None
            counts = self._n_requests, dict(self._eager), self._n_failed, self._n_dropped
            return CompileStats(n_graphs, *counts, has_process)

    # -- making --------------------------------------------------------------------------------------------------------

    def make(self, buckets: Sequence[Bucket], mode: str | None, backend: Any, max_padding: float) -> None:
        """Make a graph for each bucket, and put them in force; those of before leave first."""
        with self._making:
            self.close()
            self._refuse()
            maker = self._maker(mode, backend)
            owns = mode in _OWNING_MODES and device_of(self._components.trunk.module).type == "cuda"
            mark = self._mark()
            thread = threading.get_ident() if owns else None
            self._put_in_force(maker, mark, self._make_graphs(buckets, maker), max_padding, thread)

    def start_process(self) -> None:
        """Have a process of its own run the trunk from now on; see `LLMCache.start_model_process`."""
        device = device_of(self._components.trunk.module).type
        if device != "cpu":
            raise ConfigError(f"start_model_process: the model is on {device!r}, which computes beside Python anyway")
        with self._making:
            self.close()
            self._refuse()
            maker = self._maker(None, "inductor")
            try:
                process = ModelProcess(maker.run)  # moves the weights, so their mark is taken afterwards
            except Exception as error:  # of whatever is to be handed over
                raise ConfigError(f"start_model_process: {type(error).__name__}: {error}") from error
            try:
                maker.check_equal(process)
                self._put_in_force(maker, self._mark(), {}, 0.0, None, process)
            except Exception as error:
                process.close()
                raise ConfigError(f"start_model_process: {error}") from error

    def _maker(self, mode: str | None, backend: Any) -> Maker:
        trunk = self._components.trunk
        return Maker(trunk, trunk.norm is not None and not self._components.payload.after_norm, mode, backend)

    def _mark(self) -> Mark:
        """Of the weights as they are, whose digest is taken as well."""
        weights = self._components.weights
        digest = weights.digest()
        mark = weights.mark_of(digest)
        if weights.refusal is not None or mark is None:
            reason = weights.refusal
            raise ConfigError(f"compile: {'weights change' if reason is None else CURES[reason]}")
        if coupling := self._components.coupling.reason(digest):
            raise ConfigError(f"compile: rows that are padded to a bucket would not come out the same: {coupling}")
        self._digest = digest
        return mark

    def _put_in_force(
        self,
        maker: Maker,
        mark: Mark,
        graphs: dict[Bucket, Graph],
        max_padding: float,
        thread: int | None,
        process: ModelProcess | None = None,
    ) -> None:
        trunk = self._components.trunk
        conditions = Conditions(
            trunk,
            self._arguments.defaults,
            maker.output.takes_types,
            torch_settings(),
            [trunk.module, *parts_of(trunk.module)],
            thread,
        )
        with self._lock:
            self._was_made = True
        self._compiled = Compiled(graphs, maker, mark, trunk.attention, conditions, max_padding, process)
        if self._components.cost is not None:
            self._components.cost.restart()  # a call takes another time now

    def close(self) -> None:
        """Run all calls eagerly from now on."""
        compiled, self._compiled = self._compiled, None
        if compiled is not None and compiled.process is not None:
            compiled.process.close()

    def _refuse(self) -> None:
        """Refuse a model whose calls would never come to a graph."""
        trunk = self._components.trunk
        if trunk.adapter.is_guess:
            raise ConfigError(
                f"compile: what padding does to a {type(trunk.module).__name__} is not known: register an adapter"
            )
        if not self._lookup.decides_early:
            raise ConfigError(
                "compile: decisions are made within the layers: for K/V, a fingerprint of states, entries of several "
                "layers or mode='paper'. Graphs are for encoders and classifiers that keep the last layer, with "
                "fingerprint 'learned' or 'minhash'"
            )
        if self._components.weights.is_training:
            raise ConfigError("compile: the model is in training mode: call model.eval() first")
        if any(map(changes_with_length, trunk.module.modules())):
            raise ConfigError("compile: this model's RoPE changes with the length of a call, which no graph follows")

    def _make_graphs(self, buckets: Sequence[Bucket], maker: Maker) -> dict[Bucket, Graph]:
        graphs: dict[Bucket, Graph] = {}
        first: Exception | None = None
        with self._lock:
            self._was_made = True
        for bucket in buckets:
            try:
                graphs[bucket] = maker.make(bucket)
            except Exception as error:  # a compiler may raise anything
                first = first or error
                self._note_failure(bucket, error)
        if not graphs:
            raise ConfigError(f"compile: no graph could be made, see the log; the first failed with: {first}")
        return graphs

    # -- serving -------------------------------------------------------------------------------------------------------

    def covers(self, call: Call, scope: Scope) -> bool:
        """Whether graphs may run a call like this one, so that its key must be another than that of eager calls."""
        compiled = self._compiled
        if compiled is None or not self._is_in_force(compiled, scope.weights) or compiled.process is not None:
            return False  # what the process puts out is what eager calls do
        arguments = dict(call.inputs.arguments)
        if arguments.get("use_cache") is None:
            arguments["use_cache"] = False  # where it makes K/V that nobody asked for, that is turned off
        return call.inputs.mask_4d is None and compiled.conditions.take(arguments)

    def stand_in(self, forward: Callable[..., Any], frame: Frame) -> Callable[..., Any]:
        """What to run in place of the trunk's forward in a call; the forward itself without graphs."""
        compiled, call = self._compiled, frame.call
        if compiled is None or self._components.is_collecting:
            return forward
        if call is None:
            reasons = _BYPASSES if compiled.process is None else _EQUAL_BYPASSES
            is_covered = bool(frame.last) and frame.last[0].bypassed in reasons
            return partial(self._run, compiled, forward, frame, None) if is_covered else forward
        if frame.template is None:
            self._count("layers", len(call.inputs.arguments["input_ids"]))
            return forward
        return partial(self._run, compiled, forward, frame, call)

    def _run(
        self,
        compiled: Compiled,
        forward: Callable[..., Any],
        frame: Frame,
        call: Call | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The trunk's output for the rows that are passed."""
        arguments = self._arguments.bind(args, kwargs)
        ids = arguments.get("input_ids")
        n_rows = len(ids) if isinstance(ids, Tensor) and ids.ndim else 1
        reason, output, error = self._find_reason(compiled, arguments, call), None, None
        if reason is None:
            bucket = compiled.fit(*arguments["input_ids"].shape)
            if bucket is None:
                reason = "shape"
            else:
                try:
                    output = self._replay(compiled, bucket, frame, arguments)
                except Exception as raised:  # the trunk will tell whether it is the input that is wrong
                    error, reason = raised, "failed"
        if output is None:
            output = forward(*args, **kwargs)
        if error is not None and bucket is not None:
            self._leave_out(compiled, bucket, error)
        self._count(reason, n_rows)
        return output

    def _replay(self, compiled: Compiled, bucket: Bucket, frame: Frame, arguments: dict[str, Any]) -> Any:
        """The trunk's output, cut to the call's rows and tokens."""
        maker = compiled.maker
        is_owned = compiled.conditions.thread is not None  # by the graph, whose next run writes over it
        with torch.inference_mode(False), torch.no_grad():  # under which it was made
            if is_owned:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            made = compiled.find(bucket)(maker.inputs(bucket, arguments))
            cut = maker.output.cut(made, *arguments["input_ids"].shape)
            cut = [one.clone() if is_owned else one.contiguous() for one in cut]
        if maker.output.has_entering:
            frame.entered_norm = cut[-1]
        asked = arguments.get("return_dict")
        has_names = setting(self._components.trunk.config, "return_dict") if asked is None else asked
        return maker.output.pack(cut, has_names is not False)

    def _find_reason(self, compiled: Compiled, arguments: dict[str, Any], call: Call | None) -> str | None:
        """Why no graph can stand for the trunk in a call, or None."""
        weights = self._components.weights
        if self._compiled is not compiled:
            return "dropped"
        if call is None and not self._is_in_force(compiled, weights.digest()):
            return "dropped"
        return compiled.conditions.find_reason(arguments, call, weights.is_training)

    # -- dropping ------------------------------------------------------------------------------------------------------

    def _is_in_force(self, compiled: Compiled, digest: str) -> bool:
        """Whether graphs still are of the trunk as it is, whose weights have this digest; if not, they are dropped."""
        if digest == self._digest and compiled.attention == self._components.trunk.attention:
            return True
        with self._lock:
            if self._compiled is not compiled:
                return False
            has_stayed = self._components.weights.differs_in_values(compiled.mark)
            if has_stayed and compiled.attention == self._components.trunk.attention:
                self._digest = digest
                return True
            self._compiled = None
            self._n_dropped += 1
        what, again = "compiled graphs were dropped", "compile"
        if compiled.process is not None:
            compiled.process.close()
            what, again = "the model's process was ended", "start_model_process"
        logger.warning(
            "llmcache: %s, since the model was edited otherwise than in place; calls run eagerly until cache.%s() is "
            "called again",
            what,
            again,
        )
        if self._components.cost is not None:
            self._components.cost.restart()
        return False

    # -- counting ------------------------------------------------------------------------------------------------------

    def _count(self, reason: str | None, n_rows: int) -> None:
        with self._lock:
            if reason is None:
                self._n_requests += n_rows
            else:
                self._eager[reason] += n_rows

    def _leave_out(self, compiled: Compiled, bucket: Bucket, error: Exception) -> None:
        """Use a graph no more, or the process."""
        if compiled.process is not None:
            if self._compiled is compiled:
                self.close()
                self._note_failure(bucket, error)
        elif compiled.graphs.pop(bucket, None) is not None:  # else another thread did it
            self._note_failure(bucket, error)

    def _note_failure(self, bucket: Bucket, error: Exception) -> None:
        with self._lock:
            self._n_failed += 1
        logger.warning("llmcache: no graph for %d rows of %d tokens; such calls run eagerly", *bucket, exc_info=error)
