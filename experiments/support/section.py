"""A checked part of an experiment's settings."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from llmcache.config import explain
from llmcache.errors import ConfigError


class Section(BaseModel):
    """Settings by name. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def make(cls, values: Any, name: str = "") -> Self:
        """Check the values of one section.

        Args:
            values: A mapping, as YAML gave it.
            name: Dotted name of the section, for the error text.

        Raises:
            ConfigError: Naming the key, its value and what would be accepted.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{name}: expected a mapping of settings (got {values!r})")
        prefix = f"{name}." if name else ""
        for key, field in cls.model_fields.items():
            if field.is_required() and key not in values:
                raise ConfigError(f"{prefix}{key}: missing; known settings: {', '.join(cls.model_fields)}")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(prefix + explain(error, list(cls.model_fields))) from error


def choose(kinds: Mapping[str, Any], values: Any, key: str, name: str) -> tuple[Any, dict[str, Any]]:
    """Pick by name from a registry.

    Args:
        kinds: The registry.
        values: A mapping that names one of its keys under `key`.
        key: Where the name stands.
        name: Dotted name of the section, for the error text.

    Returns:
        What the registry holds, and the other values.

    Raises:
        ConfigError: No mapping, no name, or a name that is not known.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}: expected a mapping of settings (got {values!r})")
    rest = dict(values)
    chosen = rest.pop(key, None)
    where = f"{name}.{key}" if name else key
    if not isinstance(chosen, str) or chosen not in kinds:
        problem = "missing" if chosen is None else f"{chosen!r} is not known"
        raise ConfigError(f"{where}: {problem}; known: {', '.join(kinds)}")
    return kinds[chosen], rest
