"""What engines of graphs share: the twin that graphs are made of, and which calls a graph covers.

A graph is made of a twin, which shares the trunk's tensors and has no hooks, and is compared with it before use.

Sizes: B rows, T tokens of a call; D hidden width.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llmcache.engines.engine import Eager, Engine
from llmcache.errors import ConfigError
from llmcache.models.adapters import Trunk, device_of, vocabulary_size
from llmcache.models.arguments import Arguments, names_of
from llmcache.models.causal_trial import Causality
from llmcache.models.coupling import Coupling
from llmcache.models.model_config import setting
from llmcache.models.packing import make_output
from llmcache.models.rope import changes_with_length
from llmcache.models.twin import make_twin
from llmcache.models.weights import Snapshot, Weights
from llmcache.request.bypass import CURES
from llmcache.request.reading import Requests
from llmcache.request.rows import Row
from llmcache.stats import EngineStats
from llmcache.support.threads import forkable

logger = logging.getLogger("llmcache")

STATES, TYPES, LOGITS = "last_hidden_state", "token_type_ids", "logits"
#: Largest difference from the trunk's own output, as a share of its largest value: float32 or wider; narrower dtypes.
TOLERANCE, TOLERANCE_OF_HALVES = 1e-4, 5e-2
_GRAPH_ARGUMENTS = frozenset({"input_ids", "attention_mask", TYPES, "return_dict", "use_cache"})


class GraphTwin:
    """A copy of a trunk to make graphs of, which turns tensors of graphs into the trunk's output.

    Attributes:
        place: Path of the trunk in `module`; "" for `module` itself.
        head: Digest of the weights outside the trunk that are part of the graphs; "" for none.
    """

    place = head = ""

    def __init__(self, trunk: Trunk, weights: Weights, coupling: Coupling, causality: Causality) -> None:
        """Make the copy; `ConfigError` with the reason if no graph can replace this trunk."""
        if obstacle := _find_obstacle(trunk, weights, causality):
            raise ConfigError(f"no graph can be made: {obstacle}")
        self.trunk, self.attention, self.weights = trunk, trunk.attention, weights
        self.module = make_twin(trunk.module)
        self.digest = weights.digest()
        snapshot = weights.snapshot_of(self.digest)
        if weights.refusal is not None or snapshot is None:
            why = "weights change" if weights.refusal is None else CURES[weights.refusal]
            raise ConfigError(f"no graph can be made: {why}")
        if reason := coupling.reason(self.digest):
            raise ConfigError(f"no graph can be made: rows of a call affect each other: {reason}")
        self.snapshot: Snapshot = snapshot
        self.arguments = Arguments(self.module.forward)
        names = self.arguments.names
        self._fixed = {"return_dict": True, **({"use_cache": False} if "use_cache" in names else {})}
        #: Whether token types are an input. Types of 0 must equal no types, since one graph serves both.
        self.takes_types = False
        with torch.inference_mode(False), torch.no_grad():
            ids = self.inputs(1, 2)["input_ids"]
            output = self.module(input_ids=ids, **self._fixed)
            named = dict(output.items()) if isinstance(output, Mapping) else {}
            #: Of the tensors that a graph returns.
            self.names = tuple(name for name, value in named.items() if value is not None)
            if self.names not in ((STATES,), (STATES, "pooler_output")):
                found = ", ".join(self.names) or type(output)
                raise ConfigError(f"no graph can be made: the trunk returns {found}, not states alone")
            self._kind = type(output)
            if TYPES in names:
                typed = self.module(input_ids=ids, token_type_ids=ids * 0, **self._fixed)
                self.takes_types = torch.equal(typed[STATES], named[STATES])

    def run(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the twin's own output for inputs of a graph."""
        output = self.module(**inputs, **self._fixed)
        return tuple(output[name] for name in self.names)

    def pack(self, made: Sequence[Tensor], arguments: Mapping[str, Any]) -> Any:
        """Return the trunk's output for a call, of the tensors of a graph: a `ModelOutput`, or a tuple if asked for."""
        asked = arguments.get("return_dict")
        has_names = setting(self.trunk.config, "return_dict") if asked is None else asked
        return tuple(made) if has_names is False else make_output(self._kind, dict(zip(self.names, made, strict=True)))

    def inputs(self, n_rows: int, n_tokens: int) -> dict[str, Tensor]:
        """Return a graph's inputs (B, T) to try it on: whole rows of tokens of type 0, the same each time."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary_size(self.trunk), (n_rows, n_tokens), generator=generator, device="cpu")
        ids = ids.to(device_of(self.module))
        types = {TYPES: torch.zeros_like(ids)} if self.takes_types else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types}

    def compare(self, found: Sequence[Tensor], inputs: Mapping[str, Tensor]) -> None:
        """Compare a graph's output for inputs with a mask with the twin's; `ValueError` if they differ."""
        for name, one, other in zip(self.names, found, self.run(inputs), strict=True):
            where = inputs["attention_mask"].bool() if name == STATES else slice(None)
            one, other = one[where], other[where]
            allowed = TOLERANCE if torch.finfo(one.dtype).bits >= 32 else TOLERANCE_OF_HALVES
            difference = (one - other).abs().max()
            if not bool(difference <= allowed * other.abs().max().clamp(min=1)):
                n_rows, n_tokens = inputs["input_ids"].shape
                raise ValueError(f"its {name} is {difference:.3g} off for {n_rows} rows of {n_tokens} tokens")


class AnswerTwin(GraphTwin):
    """A copy of a whole model, whose graphs return its logits (B, C) alone."""

    def __init__(
        self,
        model: nn.Module,
        trunk: Trunk,
        weights: Weights,
        coupling: Coupling,
        causality: Causality,
        read: Callable[[Any], Tensor],
        head: str,
    ) -> None:
        """Copy `model`, of whose weights outside the trunk `head` is the digest; `read` finds logits in its output."""
        super().__init__(trunk, weights, coupling, causality)
        self.place = next(name for name, part in model.named_modules() if part is trunk.module)
        self.module, self.names, self.head, self._read = make_twin(model), (LOGITS,), head, read
        names = names_of(self.module.forward)
        self.takes_types &= names is None or TYPES in names
        self._fixed = {"use_cache": False} if "use_cache" in Arguments(self.module.forward).names else {}

    def run(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        return (self._read(self.module(**inputs, **self._fixed)),)


def _find_obstacle(trunk: Trunk, weights: Weights, causality: Causality) -> str | None:
    """Return why no graph can follow a trunk, and the cure if there is one; None if one may."""
    if weights.is_training:
        return "the model is in training mode: call model.eval() first"
    if any(map(changes_with_length, trunk.module.modules())):
        return "this model's RoPE changes with the length of a call"
    if trunk.adapter.is_guess and not causality.of(weights.digest()).knows_padding:
        return f"the effect of padding on a {type(trunk.module).__name__} is not known: register an adapter"
    return None


class GraphEngine(Engine):
    """Computes by graphs. Calls that no graph covers run eagerly, under the scope of the trunk itself. Thread-safe."""

    def __init__(self, twin: GraphTwin, eager: Eager) -> None:
        """Take the twin that the graphs are made of, and what runs other calls."""
        self.twin, self._eager = twin, eager
        self._digest = twin.digest
        self._lock = forkable(threading.Lock())
        self._n_requests = self._n_failed = self._n_dropped = 0
        self._n_eager = Counter[str]()

    @property
    def n_graphs(self) -> int:
        """Number of graphs in use."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """Return counts of graphs, and of requests that ran by graphs or eagerly."""
        with self._lock:
            return EngineStats(
                self.name, self.n_graphs, self._n_requests, dict(self._n_eager), self._n_failed, self._n_dropped
            )

    def close(self) -> None:
        """Run all calls eagerly from now on."""
        raise NotImplementedError

    def choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], digest: str, keeps_kv: bool) -> Engine:
        """Return itself; for a call that no graph covers, an eager engine, which counts the reason."""
        is_fit = self.is_of(digest)
        if not self.n_graphs:
            return self._eager
        if not is_fit:
            reason: str | None = "weights"
        else:
            reason = "kv_cache" if keeps_kv else self._find_reason(self.twin.arguments.bind(args, kwargs))
        return self if reason is None else EagerCall(self, reason)

    def covering(self, requests: Requests) -> Engine:
        """Return itself; an eager engine if the model may refuse them, or if no graph covers a row's padding."""
        if requests.may_be_refused():  # a graph may wrap an index round where the model raises
            return EagerCall(self, "arguments")
        return self if all(map(self._covers, requests.rows)) else EagerCall(self, "padding")

    def run_eagerly(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        """Run the trunk's own forward, and count the reason."""
        output = self._eager.run(args, kwargs, rows)
        with self._lock:
            self._n_eager[reason] += len(rows)
        return output

    def _find_reason(self, arguments: dict[str, Any]) -> str | None:
        """Return why no graph covers a call, a key of the eager counts; None if one may."""
        if arguments.get(TYPES) is not None and not self.twin.takes_types:
            return "arguments"
        return find_reason(self.twin.trunk, self.twin.arguments, arguments)

    def _covers(self, row: Row) -> bool:
        """Whether the mask of a row holds only 0 and 1, and nothing reads states at padding, where a graph differs."""
        return row.bypass_reason in ("", "no_content") and row.n_valid > 0 and not row.is_misread

    def is_of(self, digest: str) -> bool:
        """Whether the graphs are valid for weights with this digest, and the present attention implementation."""
        return digest == self._digest and self.twin.attention == self.twin.trunk.attention


def find_reason(trunk: Trunk, arguments: Arguments, given: Mapping[str, Any]) -> str | None:
    """Return why the arguments given to a trunk cannot be passed to other code; a key of the eager counts, or None."""
    mask, shape = given.get("attention_mask"), given["input_ids"].shape
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == shape):
        return "arguments"
    for one in given.keys() - _GRAPH_ARGUMENTS:
        if not (one in trunk.more_outputs or given[one] is None or given[one] is arguments.defaults.get(one)):
            return "arguments"
    return "torch_settings" if torch.is_autocast_enabled(given["input_ids"].device.type) else None


class EagerCall(Engine):
    """The engine of one call that no graph covers."""

    def __init__(self, engine: GraphEngine, reason: str) -> None:
        self._engine, self._reason = engine, reason

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Sequence[Row]) -> Any:
        return self._engine.run_eagerly(self._reason, args, kwargs, rows)
