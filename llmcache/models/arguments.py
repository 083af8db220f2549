"""Arguments of a forward by name, and a layer's arguments for some rows of a batch."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Layer arguments with one row per request. The size cannot tell: a table shared by all rows may have B rows, too.
_BY_ROW = frozenset(
    (
        *("hidden_states", "hidden_state", "x", "attention_mask", "position_ids", "position_embeddings"),
        *("position_bias", "token_type_ids", "encoder_hidden_states", "encoder_attention_mask"),
        *("encoder_decoder_position_bias", "relative_pos"),
    )
)
#: Arguments of a trunk that decide a row's states; a model with a head takes them by the same names.
DECIDING = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
#: Arguments of a trunk whose last dimension is tokens.
BY_COLUMN = ("input_ids", "position_ids", "cache_position")
_NOT_BY_ROW = frozenset({"rel_embeddings", "cache_position", "past_key_values", "cache"})  # K/V caches: done elsewhere
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


def names_of(forward: Callable[..., Any]) -> set[str] | None:
    """Return the names of a forward's arguments; None: any (`**kwargs`)."""
    parameters = inspect.signature(forward).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return None if takes_all else {parameter.name for parameter in parameters}


def take_rows(arguments: Mapping[str, Any], index: Tensor) -> dict[str, Any]:
    """Return a trunk's `DECIDING` arguments that were passed, for some rows of a call: `index` is int64 (R,)."""
    n_rows = len(arguments["input_ids"])
    passed = {name: value for name in DECIDING if (value := arguments.get(name)) is not None}
    return {name: one.index_select(0, index) if len(one) == n_rows else one for name, one in passed.items()}


def takes_dict(model: nn.Module) -> bool:
    """Whether a model takes its inputs as one dict, as sentence-transformers' do."""
    return isinstance(model, nn.Sequential)


def takes_tokens(model: nn.Module) -> bool:
    """Whether a model may take token ids: as `input_ids`, in a dict, or by `**kwargs`."""
    names = names_of(type(model).forward)
    return takes_dict(model) or names is None or "input_ids" in names


def take_row(value: Tensor, number: int, end: int) -> Tensor:
    """Return a row's part (1, end) of an argument (B, T), or of one (1, T) that all rows share; a view."""
    if value.shape == (1, end):
        return value
    return value[number if len(value) > 1 else 0][None, :end]


class Arguments:
    """Reads and replaces arguments of a forward by name, whether passed by position or by name."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        parameters = inspect.signature(forward).parameters.values()
        catch_all = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self.names = tuple(parameter.name for parameter in parameters if parameter.kind not in catch_all)
        self.defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
        self._position = {name: i for i, name in enumerate(self.names)}

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        """Return the argument's value; None if it was not passed."""
        if name in kwargs:
            return kwargs[name]
        position = self._position.get(name, len(args))
        return args[position] if position < len(args) else None

    def replace(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], changes: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with some replaced, or added by name; the caller's are not modified."""
        by_position, by_name = list(args), dict(kwargs)
        for name, value in changes.items():
            position = self._position.get(name, len(args))
            if name not in kwargs and position < len(args):
                by_position[position] = value
            else:
                by_name[name] = value
        return tuple(by_position), by_name

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name; `*0` and so on for positions that the signature does not name."""
        named = {self.names[i] if i < len(self.names) else f"*{i}": value for i, value in enumerate(args)}
        return {**named, **kwargs}


def select_rows(
    arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor, n_rows: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments for some of a call's B rows: `rows` is int64 (R,), on the tensors' device."""
    chosen = {
        name: _select(value, rows, n_rows) if name in _BY_ROW or name == arguments.names[0] else value
        for name, value in arguments.bind(args, kwargs).items()
    }
    by_position = list(chosen.values())[: len(args)]
    return tuple(by_position), {name: chosen[name] for name in kwargs}


def _select(value: Any, rows: Tensor, n_rows: int) -> Any:
    if isinstance(value, Tensor):  # a mask or rotary table with a single row is the same for all rows
        return value.index_select(0, rows) if value.ndim and value.shape[0] == n_rows else value
    if type(value) in (tuple, list):
        return type(value)(_select(part, rows, n_rows) for part in value)
    return value


def can_select_rows(arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], n_rows: int) -> bool:
    """Whether `select_rows` works: for each argument it is known whether it holds one row per request."""
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
    """Whether `_select` supports the value: other objects (flex attention's `BlockMask`) may hold rows anywhere."""
    if type(value) in (tuple, list):
        return all(map(_can_be_taken_apart, value))
    return isinstance(value, (Tensor, *_PLAIN))


def _may_be_by_row(value: Any, n_rows: int) -> bool:
    if isinstance(value, Tensor):  # rows and heads may share one dimension, as in ALiBi's slopes
        return value.ndim > 0 and value.shape[0] > 0 and value.shape[0] % n_rows == 0
    if isinstance(value, tuple | list):
        return any(_may_be_by_row(part, n_rows) for part in value)
    return not isinstance(value, _PLAIN)


def count_rows(arguments: Mapping[str, Any]) -> int:
    """Return the number of rows passed to a trunk; 1 if neither ids nor embeddings are passed as a tensor."""
    given = arguments.get("input_ids")
    given = arguments.get("inputs_embeds") if given is None else given
    return int(given.shape[0]) if isinstance(given, Tensor) and given.ndim else 1
