"""(4) Layer execution manager: stand-ins for the forwards of the trunk and of each layer.

Layers are swapped here and nowhere else: native hooks cannot skip one. Rows to compute are gathered, computed and
scattered; rows that skip a layer pass through it until the layer at which their stored state is put in. K/V of skipped
rows is written to the caller's cache, so that all layers have equal lengths after every call: a hole there would be
silently wrong one token later.

Sizes: B rows, R rows computed, T tokens, D hidden width, H K/V heads, n valid tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from llmcache.errors import WrapError
from llmcache.models.adapters import CACHE, Adapter, Trunk, repack, unpack
from llmcache.models.arguments import can_select_rows, select_rows
from llmcache.models.hooks import Installed, Swap, is_wrapped
from llmcache.models.packing import Payload
from llmcache.request.rows import Row

_WITHIN = -1  # a layer is running: others that run within it are none of the trunk's steps
_OUT_OF_ORDER = -2


@dataclass(slots=True)
class Reuse:
    """A stored state that stands for a layer's output in one row."""

    layer: int
    hidden: Tensor  # payload (R, D)
    keys: Tensor | None  # (S, H, n, D_h), of the layers that it makes its row skip, `layer` the last; None without K/V
    values: Tensor | None
    key: str  # of the request that stored it
    similarity: float


@dataclass(slots=True)
class Way:
    """Where a call of the trunk is on its way through the layers."""

    turn: int = 0  # layer that comes next; below 0 see above
    is_closed: bool = False  # it bypasses the cache: layers are plain
    rows: Sequence[Row] = ()
    reused: dict[int, Reuse] = field(default_factory=dict)  # the deepest so far, by row
    kv_cache: Any = None  # the caller's, if it is to hold K/V afterwards
    first_output: Any = None  # of layer 0, where it had to run before anything was looked up
    attention: Tensor | None = None  # output of its self-attention, likewise
    takes_all_rows: bool = False  # rows cannot be taken out of the batch
    n_skipped: int = 0  # layers, summed over rows


class Manager(Protocol):
    """Who is called: a `Layerwise`."""

    @property
    def last(self) -> Sequence[Any]: ...

    def call(self, swap: "TrunkForward", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The trunk's output."""

    def way(self) -> Way | None:
        """Of this thread's innermost call of the trunk."""

    def layer(self, swap: "LayerForward", number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Output of the layer whose turn it is."""


class TrunkForward(Swap):
    """Stands in for the trunk's forward."""

    is_of_trunk = True

    def __init__(self, module: nn.Module, manager: Manager) -> None:
        """Take the forward's place."""
        super().__init__(module, manager)
        self._manager = manager

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._manager.call(self, args, kwargs)


class LayerForward(Swap):
    """Stands in for one layer's forward."""

    def __init__(self, module: nn.Module, manager: Manager) -> None:
        """Take the forward's place."""
        super().__init__(module, manager)
        self._manager = manager
        self.numbers: list[int] = []  # places at which the trunk runs it: some share one layer

    def run(self, *args: Any, **kwargs: Any) -> Any:
        way = None if torch.compiler.is_compiling() else self._manager.way()
        if way is None or way.is_closed or way.turn == _WITHIN:
            return self.original(*args, **kwargs)
        number = way.turn
        if number not in self.numbers:  # replaced, added, deleted, or run by hand
            way.turn = _OUT_OF_ORDER
            return self.original(*args, **kwargs)
        way.turn = _WITHIN
        output = self._manager.layer(self, number, args, kwargs)
        way.turn = number + 1
        return output


def install(trunk: Trunk, manager: Manager) -> Installed:
    """Swap the forwards of the trunk and of every layer.

    Args:
        trunk: Where to install.
        manager: Receives the calls.

    Returns:
        What `remove()` takes off again. An error half-way takes off what was put on.

    Raises:
        WrapError: The trunk already carries a cache.
    """
    if is_wrapped(trunk):
        raise WrapError("this model is already wrapped: use the existing cache, or call its unwrap() first")
    installed, swaps = Installed(), dict[nn.Module, LayerForward]()
    try:
        for number, module in enumerate(trunk.layers):
            if module not in swaps:
                swaps[module] = LayerForward(module, manager)
                installed.add(swaps[module].remove)
            swaps[module].numbers.append(number)
        installed.add(TrunkForward(trunk.module, manager).remove)
    except BaseException:
        installed.remove()
        raise
    return installed


class Runner:
    """Runs layers for the rows that need it, and puts stored states in place of the rest."""

    def __init__(self, payload: Payload, adapter: Adapter) -> None:
        """Remember how states are put back.

        Args:
            payload: What entries keep.
            adapter: Knows what a skipped layer returns; if it does not, that is learned from the first one that runs.
        """
        self._payload = payload
        self._skipped = adapter.skipped
        self.cannot_skip = False  # known once a layer was seen to return more than hidden states

    def run(self, way: Way, swap: LayerForward, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output, packed as the layer would, before stored states are put in."""
        rows = [row.number for row in way.rows if not _skips(way.reused.get(row.number), number)]
        has_run = number == 0 and way.first_output is not None
        if has_run or len(rows) == len(way.rows) or self._skipped is None or (rows and way.takes_all_rows):
            output = way.first_output if has_run else swap.original(*args, **kwargs)
            if way.kv_cache is not None:
                _replace_kv(way, number)
            if self._skipped is None:
                self._skipped = _learn(output)
                self.cannot_skip = self._skipped is None
            return output
        hidden = swap.arguments.get(args, kwargs, swap.arguments.names[0])
        way.n_skipped += len(way.rows) - len(rows)
        if not rows:
            if way.kv_cache is not None:
                _fill_kv(way, number, hidden.shape[1], hidden.device)
            return self._skipped(hidden, swap.module, swap.arguments.bind(args, kwargs))
        index = torch.tensor(rows, device=hidden.device)
        args, kwargs = select_rows(swap.arguments, args, kwargs, index, len(way.rows))
        scratch = None
        if way.kv_cache is not None:
            scratch = _new_cache()  # the caller's takes all rows at once
            args, kwargs = swap.arguments.replace(args, kwargs, CACHE, scratch)
            mask = swap.arguments.get(args, kwargs, "attention_mask")
            if mask is not None:  # of a cache of fixed length it has columns for all of that
                args, kwargs = swap.arguments.replace(args, kwargs, "attention_mask", mask[..., : hidden.shape[1]])
        part = swap.original(*args, **kwargs)
        computed = unpack(part)
        if scratch is not None:
            _fill_kv(way, number, hidden.shape[1], hidden.device, rows, scratch.layers[number])
        return repack(part, hidden.to(computed.dtype, copy=True).index_copy_(0, index, computed))

    def place(self, way: Way, number: int, hidden: Tensor) -> Tensor:
        """Hidden states (B, T, D) with those put in that are reused at a layer; the input is not written."""
        placed = {row: reuse for row, reuse in way.reused.items() if reuse.layer == number}
        if not placed or self.cannot_skip:  # of the latter all was computed, for all rows
            return hidden
        if len(placed) == len(way.rows):
            hidden = hidden.new_empty(hidden.shape, dtype=next(iter(placed.values())).hidden.dtype)
        else:
            hidden = hidden.clone()
        for row, reuse in placed.items():
            valid, n_tokens = way.rows[row].valid, hidden.shape[1]
            hidden[row] = self._payload.place([reuse.hidden.to(hidden.device)], [valid], n_tokens)[0]
        return hidden


def can_take_rows(way: Way, swap: LayerForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether some rows of a call can be taken out of what a layer is passed."""
    return can_select_rows(swap.arguments, args, kwargs, len(way.rows))


def copy_kv(kv_cache: Any, row: Row, first: int, last: int) -> dict[str, Tensor]:
    """Copies of a row's `keys` and `values` (S, H, n, D_h) from one layer to another, that included."""
    layers = kv_cache.layers[first : last + 1]
    return {
        name: torch.stack([getattr(one, name)[row.number][:, row.valid] for one in layers])
        for name in ("keys", "values")
    }


def _learn(output: Any) -> Callable[[Tensor, Any, Mapping[str, Any]], Any] | None:
    """How a skipped layer of an unknown family packs its output; None when layers hand on more than hidden states."""
    if isinstance(output, Tensor):
        return lambda hidden, layer, passed: hidden
    kind = type(output)
    if kind not in (tuple, list) or any(part is not None for part in output[1:]):
        return None
    nothing = (None,) * (len(output) - 1)
    return lambda hidden, layer, passed: kind((hidden, *nothing))


def _skips(reuse: Reuse | None, number: int) -> bool:
    return reuse is not None and reuse.layer >= number


def _stored_kv(reuse: Reuse, number: int) -> tuple[Tensor, Tensor]:
    """K and V (H, n, D_h) of a layer that a row skips."""
    assert reuse.keys is not None and reuse.values is not None
    place = number - reuse.layer - 1  # from the end: the last is that of the layer reused
    return reuse.keys[place], reuse.values[place]


def _new_cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def _replace_kv(way: Way, number: int) -> None:
    """Write stored K/V over those that a layer run for all rows gave to rows that take its output from the store."""
    layer = way.kv_cache.layers[number]
    for row, reuse in way.reused.items():
        if _skips(reuse, number):
            for written, stored in zip((layer.keys, layer.values), _stored_kv(reuse, number), strict=True):
                written[row][:, way.rows[row].valid] = stored.to(written.device)


def _fill_kv(
    way: Way, number: int, n_tokens: int, device: torch.device, rows: Sequence[int] = (), computed: Any = None
) -> None:
    """Write K/V of a layer to the caller's cache: rows as computed, in a layer of a cache; the others as stored.

    Padding gets zeros.
    """
    skipping = {row: reuse for row, reuse in way.reused.items() if row not in rows}
    full = []
    for which, name in enumerate(("keys", "values")):
        sample = _stored_kv(next(iter(skipping.values())), number)[which]
        dtype = sample.dtype if computed is None else getattr(computed, name).dtype
        states = torch.zeros((len(way.rows), len(sample), n_tokens, sample.shape[-1]), dtype=dtype, device=device)
        if computed is not None:
            states[list(rows)] = getattr(computed, name)
        for row, reuse in skipping.items():
            states[row][:, way.rows[row].valid] = _stored_kv(reuse, number)[which].to(states)
        full.append(states)
    way.kv_cache.update(*full, number)
