"""Exchangeable parts of a cache: the classes that settings can name, and how one is made from its settings."""

from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from llmcache.errors import ConfigError

T = TypeVar("T")


class Registry(dict[str, type[T]], Generic[T]):
    """Classes by the name under which settings know them."""

    def __init__(self, kind: str, base: type, known: dict[str, type[T]]) -> None:
        """Begin with classes of our own.

        Args:
            kind: What they are, as the setting that names them is called.
            base: What each has to do.
            known: Classes by name.
        """
        super().__init__(known)
        self.kind = kind
        self._base = base

    def register(self, name: str, made: type[T]) -> None:
        """Let settings name a class.

        Args:
            name: The name; one that is taken is refused.
            made: The class: derived from the base of its kind, or with all that this has.

        Raises:
            ConfigError: The name is taken, or the class lacks a method.
        """
        if name in self:
            raise ConfigError(f"{self.kind}: the name {name!r} is taken by {self[name].__name__}")
        if not isinstance(made, type):
            raise ConfigError(f"{self.kind}: {name!r}: register a class, not {made!r}")
        if missing := self._missing(made):
            raise ConfigError(f"{self.kind}: {made.__name__} lacks {', '.join(missing)} of {self._base.__name__}")
        self[name] = made

    def find(self, name: str) -> type[T]:
        """The class of a name.

        Raises:
            ConfigError: There is none.
        """
        if name not in self:
            raise ConfigError(f"{self.kind}: unknown name {name!r}; known: {', '.join(sorted(self))}")
        return self[name]

    def _missing(self, made: type) -> list[str]:
        """Members of the base that a class does not have."""
        if issubclass(made, self._base):
            return sorted(getattr(made, "__abstractmethods__", ()))
        return [name for name in vars(self._base) if not name.startswith("_") and not hasattr(made, name)]


class Component(BaseModel):
    """One exchangeable part, by registry name and options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for the component's constructor."""
        return dict(self.model_extra or {})

    def build(self, registry: Registry[T], *args: Any) -> T:
        """Construct the component.

        Args:
            registry: Of its kind.
            *args: Positional arguments that the library itself supplies.

        Raises:
            ConfigError: The name is unknown, or the options do not fit the class: in name, type or value.
        """
        make, kind = registry.find(self.name), registry.kind
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
