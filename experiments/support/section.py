"""A checked part of an experiment's settings."""

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from llmcache import ConfigError
from llmcache.lab import explain

#: Accepts a single value for a setting with several values.
ONE_OR_MORE = BeforeValidator(lambda value: value if isinstance(value, list | tuple) else (value,))


class Section(BaseModel):
    """Settings by name. Unknown keys raise an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    #: Settings that are made of plain values: `(values, key that errors name) -> setting`, by key.
    makers: ClassVar[Mapping[str, Callable[[Any, str], Any]]] = {}

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        """Check the values of one section, as read from YAML; errors name its keys below `name`."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{name}: expected a mapping of settings (got {values!r})")
        prefix = f"{name}." if name else ""
        parts = dict(values)
        for key, field in cls.model_fields.items():
            if field.is_required() and key not in parts:
                raise ConfigError(f"{prefix}{key}: missing; known settings: {', '.join(cls.model_fields)}")
            section = _section_in(field.annotation)
            if key in cls.makers and key in parts:
                parts[key] = cls.makers[key](parts[key], f"{prefix}{key}")
            elif section is not None and parts.get(key) is not None:
                parts[key] = section.make(parts[key], f"{prefix}{key}")
        try:
            made = cls.model_validate(parts)
            made.check()
        except ValidationError as error:
            raise ConfigError(prefix + explain(error, list(cls.model_fields))) from error
        except ValueError as error:
            raise ConfigError(f"{prefix}{error}") from error
        return made

    def check(self) -> None:
        """Raise `ValueError` if the values do not fit together."""


def _section_in(annotation: Any) -> type[Section] | None:
    """Return the section type in a setting's annotation; None for other settings."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def choose(kinds: Mapping[str, Any], values: Any, key: str, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the registry item named under `key`, and the other values; errors name keys below `name`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}: expected a mapping of settings (got {values!r})")
    rest = dict(values)
    chosen = rest.pop(key, None)
    where = f"{name}.{key}" if name else key
    if not isinstance(chosen, str) or chosen not in kinds:
        problem = "missing" if chosen is None else f"{chosen!r} is not known"
        raise ConfigError(f"{where}: {problem}; known: {', '.join(kinds)}")
    return kinds[chosen], rest
