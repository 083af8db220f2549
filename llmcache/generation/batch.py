"""Decode steps of several streams in one forward of the model.

Each row of the joint K/V cache has its own length: K/V begins in the first column, and the mask covers the columns
after a row's newest token. So a stream joins and leaves between two steps without moving the tokens of others.

Sizes: B rows, H K/V heads, S columns in use, C columns allocated, D_h width of a head.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from llmcache.errors import UnsupportedModelError
from llmcache.generation.kv_caches import has_window, held_nbytes
from llmcache.generation.results import Token
from llmcache.generation.steps import run_columns
from llmcache.generation.stream import Stream
from llmcache.generation.validation import decoder_config
from llmcache.models.adapters import locate
from llmcache.models.coupling import find_coupling
from llmcache.models.hooks import Listener, listener_of
from llmcache.models.rope import steady_length

_N_SPARE = 64  # columns allocated ahead


class Batch:
    """Advances streams of one model together, each by a token per step. One thread at a time.

    Streams take turns within a step if rows of the model cannot differ in length: it has windows, states other than
    K/V, a RoPE that depends on the longest row, takes no `position_ids`, or its rows affect each other.
    """

    def __init__(self, model: Any) -> None:
        """Hold no streams; `model` is a causal language model in eval mode, wrapped or not."""
        self._model = model
        self._is_joint = _takes_rows(model)
        self._weights_nbytes = sum(one.nbytes for one in model.parameters())
        self._groups: list[_Group] = []

    def step(self, streams: Sequence[Stream]) -> list[Token | Exception]:
        """Compute the next token of each stream.

        From its first step on, a stream is continued by this batch alone. The K/V of streams that are not passed again
        is freed.

        Args:
            streams: Streams that are not finished, each once. Those that have not begun run their prompt, one by one.

        Returns:
            The token of each stream, or the error that ended it. An error of the model in a joint forward ends all
            streams of that forward.
        """
        taken: dict[Stream, Token | Exception] = {}
        for group in self._groups:
            group.drop(stream for stream in group.streams if stream not in streams)
        held = {stream for group in self._groups for stream in group.streams}
        for stream in streams:
            if stream not in held and self._is_joint and _is_plain(stream):
                self._join(stream)
            elif stream not in held:
                taken[stream] = _result(stream.__next__)
        for group in self._groups:
            taken |= group.step(self._model)
        self._groups = [group for group in self._groups if group.streams]
        return [taken[stream] for stream in streams]

    def _join(self, stream: Stream) -> None:
        """Add a stream to a group; padding may take the bytes of the weights, which each further group reads."""
        for group in self._groups:
            if group.padding_nbytes(stream) <= self._weights_nbytes:
                break
        else:
            group = _Group()
            self._groups.append(group)
        group.add(stream)


class _Group:
    """Streams whose newest tokens are run in one forward."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self._lengths: list[int] = []  # tokens held of each
        self._sources: list[tuple[Any, int]] = []  # K/V cache and row of each
        self._kv_cache: Any = DynamicCache()
        self._is_laid = False  # the joint cache holds these rows and no others
        self._token_nbytes = 0

    def add(self, stream: Stream) -> None:
        """Take a stream over with its K/V."""
        self._token_nbytes = held_nbytes(stream.kv_cache) // stream.n_held
        self.streams.append(stream)
        self._lengths.append(stream.n_held)
        self._sources.append((stream.kv_cache, 0))
        stream.close()
        self._is_laid = False

    def drop(self, streams: Iterable[Stream]) -> None:
        for number in sorted(map(self.streams.index, streams), reverse=True):
            for rows in (self.streams, self._lengths, self._sources):
                del rows[number]
            self._is_laid = False
        if not self.streams:
            self._kv_cache = DynamicCache()

    def padding_nbytes(self, stream: Stream) -> int:
        """Return the bytes of padding with one more stream."""
        lengths = [*self._lengths, stream.n_held]
        return (max(lengths) * len(lengths) - sum(lengths)) * self._token_nbytes

    def step(self, model: Any) -> dict[Stream, Token | Exception]:
        """Return the next token of each stream, or its error, and let finished streams go."""
        streams = [*self.streams]
        if not streams:
            return {}
        try:
            logits = self._run(model)
        except Exception as error:
            self.drop(streams)
            return dict.fromkeys(streams, error)
        nbytes = [self._token_nbytes * length for length in self._lengths]
        steps = zip(streams, logits, nbytes, strict=True)
        taken = {stream: _result(partial(stream.take, *of_row)) for stream, *of_row in steps}
        self.drop(stream for stream in streams if stream.stopped_by or isinstance(taken[stream], Exception))
        return taken

    def _run(self, model: Any) -> Tensor:
        """Return the logits (B, 1, V) after the newest tokens; their K/V is then held."""
        if not self._is_laid:
            self._lay(listener_of(model))
        ids = torch.stack([stream.newest for stream in self.streams])
        lengths = torch.tensor(self._lengths, device=ids.device)
        for layer in self._kv_cache.layers:
            layer.lengths = lengths
        mask = (torch.arange(max(self._lengths) + 1, device=ids.device) <= lengths[:, None]).long()
        logits = run_columns(model, ids, mask, self._kv_cache, 1)
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    def _lay(self, listener: Listener | None) -> None:
        """Copy the K/V of all rows into a new joint cache, and tell the cache on the model, if any."""
        first, _ = self._sources[0]
        kv_cache = DynamicCache()
        for number in range(len(first.layers)):
            held = [(source.layers[number], row) for source, row in self._sources]
            kv_cache.layers.append(_Layer(held, self._lengths))
        if listener is not None:
            listener.join(kv_cache, self._sources)
        self._kv_cache = kv_cache
        self._sources = [(kv_cache, row) for row in range(len(self._lengths))]
        self._is_laid = True


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """K/V of a layer: views of the columns in use (B, H, S, D_h) of tensors that have room for C columns."""

    lengths: Tensor  # tokens that each row holds, int64 (B,): the column of its next one

    def __init__(self, held: Sequence[tuple[Any, int]], lengths: Sequence[int]) -> None:
        """Copy rows, each given by its layer, its row there and its length."""
        super().__init__()  # type: ignore[no-untyped-call]
        first, _ = held[0]
        self.lazy_initialization(first.keys, first.values)
        self._rooms = []
        for name in ("keys", "values"):
            rows = [getattr(layer, name)[row, :, :n] for (layer, row), n in zip(held, lengths, strict=True)]
            self._rooms.append(_join(rows, max(lengths) + _N_SPARE))
        self._show(max(lengths))

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Put in the next token of each row (B, H, 1, D_h); return the K/V of all."""
        n_columns = self.get_seq_length() + 1
        if n_columns > self._rooms[0].shape[2]:
            self._rooms = [_join([*room], n_columns + _N_SPARE) for room in self._rooms]
        rows = torch.arange(len(key_states), device=self.lengths.device)
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[rows, :, self.lengths] = new[:, :, 0]
        return self._show(n_columns)

    def _show(self, n_columns: int) -> tuple[Tensor, Tensor]:
        """Take the columns in use for keys and values, and return them."""
        keys, values = self.keys, self.values = tuple(room[:, :, :n_columns] for room in self._rooms)
        return keys, values


def _join(rows: Sequence[Tensor], n_columns: int) -> Tensor:
    """Return rows (H, n, D_h) as a normal tensor (B, H, n_columns, D_h), with zeros after each."""
    with torch.inference_mode(False), torch.no_grad():
        n_heads, _, width = rows[0].shape
        joined = rows[0].new_zeros((len(rows), n_heads, n_columns, width))
        for number, row in enumerate(rows):
            joined[number, :, : row.shape[1]] = row
        return joined


def _takes_rows(model: Any) -> bool:
    """Whether rows of different lengths, with padding on the right, may be run in one forward of a model."""
    takes_positions = "position_ids" in signature(type(model).forward).parameters
    if not takes_positions or has_window(decoder_config(model)) or steady_length(model) is not None:
        return False
    try:
        return not find_coupling(locate(model))
    except UnsupportedModelError:
        return False


def _is_plain(stream: Stream) -> bool:
    """Whether a stream has begun, and holds nothing but K/V of all its tokens."""
    layers = getattr(stream.kv_cache, "layers", ())
    return stream.n_held > 0 and all(type(layer) is DynamicLayer for layer in layers)


def _result(step: Callable[[], Token]) -> Token | Exception:
    try:
        return step()
    except Exception as error:
        return error
