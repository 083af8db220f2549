"""What a forward is passed: its arguments by name, and those of a layer for some rows of a batch only."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Arguments of a layer that hold one row a request. A table shared by all rows may happen to have as many.
_BY_ROW = frozenset(
    (
        *("hidden_states", "hidden_state", "x", "attention_mask", "position_ids", "position_embeddings"),
        *("position_bias", "token_type_ids", "encoder_hidden_states", "encoder_attention_mask"),
        *("encoder_decoder_position_bias", "relative_pos"),
    )
)
#: Of a trunk's arguments, those that decide a row's states; a model with a head takes them by the same names.
DECIDING = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
#: Of a trunk's arguments, those whose last dimension is that of tokens.
BY_COLUMN = ("input_ids", "position_ids", "cache_position")
_NOT_BY_ROW = frozenset({"rel_embeddings", "cache_position", "past_key_values"})  # the last is seen to elsewhere
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Arguments:
    """Reads and replaces arguments of a forward by name, whether the caller passes them by position or by name."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        """Ask the signature of `forward` once."""
        parameters = inspect.signature(forward).parameters.values()
        catch_all = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self.names = tuple(parameter.name for parameter in parameters if parameter.kind not in catch_all)
        self.defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        self._position = {name: i for i, name in enumerate(self.names)}

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        """The argument's value, or None when it was not passed."""
        if name in kwargs:
            return kwargs[name]
        position = self._position.get(name, len(args))
        return args[position] if position < len(args) else None

    def replace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, value: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with one of them replaced; the caller's are left as they are."""
        position = self._position.get(name, len(args))
        if name not in kwargs and position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name; one that the signature does not name by its place, as `*0`."""
        named = {self.names[i] if i < len(self.names) else f"*{i}": value for i, value in enumerate(args)}
        return {**named, **kwargs}


def select_rows(
    arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor, n_rows: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a layer is passed for some of a call's B rows, whose numbers are int64 (R,), on the tensors' device."""
    chosen = {
        name: _select(value, rows, n_rows) if name in _BY_ROW or name == arguments.names[0] else value
        for name, value in arguments.bind(args, kwargs).items()
    }
    by_position = list(chosen.values())[: len(args)]
    return tuple(by_position), {name: chosen[name] for name in kwargs}


def _select(value: Any, rows: Tensor, n_rows: int) -> Any:
    if isinstance(value, Tensor):  # a single row is a mask or a rotary table that is the same for all
        return value.index_select(0, rows) if value.ndim and value.shape[0] == n_rows else value
    if type(value) in (tuple, list):
        return type(value)(_select(part, rows, n_rows) for part in value)
    return value


def can_select_rows(arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], n_rows: int) -> bool:
    """Whether it is known of every argument if it holds one row a request; see `select_rows`."""
    if n_rows == 1:
        return True
    by_row = _BY_ROW | {arguments.names[0]}
    for name, value in arguments.bind(args, kwargs).items():
        if name in by_row:
            if not _can_be_taken_apart(value):
                return False
        elif name not in _NOT_BY_ROW and _may_be_by_row(value, n_rows):
            return False
    return True


def _can_be_taken_apart(value: Any) -> bool:
    """Whether `_select` knows how to: an object (a `BlockMask` of flex attention, say) may hold rows anywhere."""
    if type(value) in (tuple, list):
        return all(map(_can_be_taken_apart, value))
    return isinstance(value, (Tensor, *_PLAIN))


def _may_be_by_row(value: Any, n_rows: int) -> bool:
    if isinstance(value, Tensor):  # rows may stand beside heads in one dimension, as in ALiBi's slopes
        return value.ndim > 0 and value.shape[0] > 0 and value.shape[0] % n_rows == 0
    if isinstance(value, tuple | list):
        return any(_may_be_by_row(part, n_rows) for part in value)
    return not isinstance(value, _PLAIN)


def count_rows(arguments: Mapping[str, Any]) -> int:
    """The number of rows that a trunk is passed; 1 where it is passed no tensor."""
    given = arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    return int(given.shape[0]) if isinstance(given, Tensor) and given.ndim else 1
