"""Exchangeable parts of a cache: the classes that settings can name, and how one is made from its settings."""

import inspect
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from llmcache.errors import ConfigError

T = TypeVar("T")


class Registry(dict[str, type[T]], Generic[T]):
    """Classes by the name under which settings know them. `del registry[name]` takes one out again."""

    def __init__(
        self,
        kind: str,
        base: type,
        known: dict[str, type[T]],
        given: Sequence[str] = (),
        reserved: Sequence[str] = (),
    ) -> None:
        """Begin with classes of our own.

        Args:
            kind: What they are, as the setting that names them is called.
            base: What each has to do.
            known: Classes by name.
            given: What the library itself passes to each constructor, by position; settings come as keywords.
            reserved: Names that mean something else in the setting.
        """
        super().__init__(known)
        self.kind = kind
        self._base = base
        self.given = tuple(given)
        self.reserved = tuple(reserved)

    def register(self, name: str, made: type[T]) -> None:
        """Let settings name a class.

        Args:
            name: The name; one that is taken or means something else is refused.
            made: The class: derived from the base of its kind, or with all that this has.

        Raises:
            ConfigError: The name is no text, or taken, or the class lacks something, or something of
                it is called with other arguments than it takes.
        """
        if name in self:
            raise ConfigError(f"{self.kind}: the name {name!r} is taken by {self[name].__name__}")
        taken = ("auto", *self.reserved)
        if not isinstance(name, str) or name in taken:
            raise ConfigError(f"{self.kind}: give another name than {name!r}: a str, not {', '.join(taken)}")
        if not isinstance(made, type):
            raise ConfigError(f"{self.kind}: {name!r}: register a class, not {made!r}")
        self._check(made)
        self[name] = made

    def find(self, name: str) -> type[T]:
        """The class of a name.

        Raises:
            ConfigError: There is none.
        """
        if name not in self:
            raise ConfigError(f"{self.kind}: unknown name {name!r}; known: {', '.join(sorted(self)) or 'none'}")
        return self[name]

    def _check(self, made: type) -> None:
        """Refuse a class that does not do what its base says."""
        base = self._base
        # Its public names, and what is abstract or only annotated in it.
        annotated = {name for cls in base.__mro__ for name in inspect.get_annotations(cls)}
        public = {name for name in {*dir(base), *annotated} if not name.startswith("_")}
        members = public | getattr(base, "__abstractmethods__", set())
        missing = {name for name in members if not hasattr(made, name)} | getattr(made, "__abstractmethods__", set())
        if missing:
            raise ConfigError(f"{self.kind}: {made.__name__} lacks {', '.join(sorted(missing))} of {base.__name__}")
        for name in sorted(members):
            asked = getattr(base, name, None)
            if callable(getattr(made, name)) != callable(asked):
                should = "a method" if callable(asked) else "an attribute or a property"
                raise ConfigError(f"{self.kind}: {made.__name__}.{name} must be {should}, as of {base.__name__}")
            if callable(asked) and (wrong := misfit(made, name, list(inspect.signature(asked).parameters)[1:])):
                raise ConfigError(f"{self.kind}: {made.__name__}.{name}{wrong}, as {base.__name__}.{name} is")
        if wrong := misfit(made, "", self.given):
            raise ConfigError(f"{self.kind}: {made.__name__}{wrong} and its settings")


def misfit(made: type, name: str, passed: Sequence[str]) -> str:
    """Say how a method, or without a name the constructor, cannot be called with these arguments; "" if it can."""
    try:
        signature = inspect.signature(getattr(made, name) if name else made)
    except ValueError:  # written in C, without a signature
        return ""
    has_self = name and not isinstance(inspect.getattr_static(made, name), staticmethod | classmethod)
    try:
        (signature.bind if name else signature.bind_partial)(*(["self"] if has_self else []), *passed)
    except TypeError:
        return f"{signature} cannot be called with ({', '.join(passed)})"
    return ""


class Component(BaseModel):
    """One exchangeable part, by registry name and options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for the component's constructor."""
        return dict(self.model_extra or {})

    def build(self, registry: Registry[T], *args: Any) -> T:
        """Construct the component, given what the library supplies; options must fit its class in name and type."""
        make, kind = registry.find(self.name), registry.kind
        hints: dict[str, Any] = {}
        with suppress(NameError):  # annotations that are there for type checkers alone
            hints = get_type_hints(make.__init__)
        for option, value in self.options.items():
            try:
                # Strict: 2.5 tokens or the text "64" would pass for what they are not until a request needs them.
                _checker(hints.get(option, Any)).validate_python(value, strict=True)
            except ValidationError as error:
                wrong = error.errors()[0]["msg"]
                raise ConfigError(f"{kind}: {self.name}: {option}={_shown(value)}: {wrong}") from error
        try:
            return make(*args, **self.options)
        except (TypeError, ValueError) as error:
            takes = ", ".join(list(inspect.signature(make).parameters)[len(args) :]) or "none"
            raise ConfigError(
                f"{kind}: {self.name} does not accept {_shown(self.options)}: {error}; its options: {takes}"
            ) from error


def _shown(value: Any) -> str:
    """A value for a message, without passwords in URLs."""
    return re.sub(r"://[^@/]*@", "://***@", repr(value))


def _checker(hint: Any) -> TypeAdapter[Any]:
    """Checks values of an annotated type; of a class that pydantic does not know, that they are instances."""
    try:
        return TypeAdapter(hint)
    except PydanticSchemaGenerationError:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
