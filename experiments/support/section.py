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
        """Check the values of one section, which YAML gave; errors name its keys below `name`."""
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
    """Pick from a registry what a mapping names under `key`, and the other values; errors name keys below `name`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}: expected a mapping of settings (got {values!r})")
    rest = dict(values)
    chosen = rest.pop(key, None)
    where = f"{name}.{key}" if name else key
    if not isinstance(chosen, str) or chosen not in kinds:
        problem = "missing" if chosen is None else f"{chosen!r} is not known"
        raise ConfigError(f"{where}: {problem}; known: {', '.join(kinds)}")
    return kinds[chosen], rest
