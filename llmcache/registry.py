"""An exchangeable part of a cache as settings name it, and how it is made."""

from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from llmcache.errors import ConfigError


class Component(BaseModel):
    """One exchangeable part, by registry name and options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for the component's constructor."""
        return dict(self.model_extra or {})

    def build(self, registry: Mapping[str, Callable[..., Any]], kind: str, *args: Any) -> Any:
        """Construct the component.

        Args:
            registry: Name to class.
            kind: Setting that named it, for the error text.
            *args: Positional arguments that the library itself supplies.

        Raises:
            ConfigError: The name is unknown, or the options do not fit the class: in name, type or value.
        """
        if self.name not in registry:
            raise ConfigError(f"{kind}: unknown name {self.name!r}; known: {', '.join(sorted(registry))}")
        make = registry[self.name]
        hints = get_type_hints(make.__init__)
        for option, value in self.options.items():
            try:
                # Strict: 2.5 tokens or the text "64" would pass for what they are not until a request needs them.
                TypeAdapter(hints.get(option, Any)).validate_python(value, strict=True)
            except ValidationError as error:
                wrong = error.errors()[0]["msg"]
                raise ConfigError(f"{kind}: {self.name}: {option}={value!r}: {wrong}") from error
        try:
            return make(*args, **self.options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{kind}: {self.name} does not accept {self.options}: {error}") from error
