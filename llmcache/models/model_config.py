"""Fast reads of a transformers config, which happen in each call.

transformers runs several Python functions per attribute, some microseconds. This reads the config's `__dict__` directly
wherever that gives the same value.
"""

from collections.abc import Sequence
from functools import cache
from inspect import getattr_static
from typing import Any

_MISSING = object()
_RETURNS_ANOTHER = (lambda self: self.name).__code__.co_code  # a property with this code is an alias


def setting(config: Any, name: str, default: Any = None) -> Any:
    """Return the same as `getattr(config, name, default)`."""
    kind: Any = type(config)
    key, by_class = _place(kind, name)
    if key is not None:
        held = object.__getattribute__(config, "__dict__")
        if held.get("_heterogeneity_spec") is None:  # else some attributes differ by layer
            value = held.get(key, by_class)
            return default if value is _MISSING else value
    return getattr(config, name, default)


def keys_of(config: Any, names: Sequence[str]) -> list[str] | None:
    """Return the `__dict__` keys of a config's attributes; None if code computes one, or the class holds it."""
    kind: Any = type(config)
    places = [_place(kind, name) for name in names]
    is_plain = vars(config).get("_heterogeneity_spec") is None
    keys = [key for key, by_class in places if key is not None and (key in vars(config) or by_class is _MISSING)]
    return keys if is_plain and len(keys) == len(names) else None


@cache
def _place(kind: Any, name: str) -> tuple[str | None, Any]:
    """Return the `__dict__` key of an attribute and the class's default; (None, None) if code computes it."""
    if not _is_plain(kind):
        return None, None
    key = getattr(kind, "attribute_map", {}).get(name, name)
    by_class = getattr_static(kind, key, _MISSING)
    if isinstance(by_class, property) and by_class.fget is not None and _is_theirs(by_class.fget):
        made_by = by_class.fget.__code__
        return _place(kind, made_by.co_names[0]) if made_by.co_code == _RETURNS_ANOTHER else (None, None)
    return (None, None) if hasattr(type(by_class), "__get__") else (key, by_class)


def _is_plain(kind: type[Any]) -> bool:
    """Whether a class has the attribute access of Python or transformers, not one of its own."""
    ways = (getattr_static(kind, "__getattribute__"), getattr_static(kind, "__getattr__", None))
    return kind.__dictoffset__ != 0 and all(way in (None, object.__getattribute__) or _is_theirs(way) for way in ways)


def _is_theirs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("transformers.")  # C slots have no `__module__`
