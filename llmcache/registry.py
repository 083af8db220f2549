"""Exchangeable components of a cache: registries of classes that settings name, and construction from settings."""

import inspect
import re
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from llmcache.errors import ConfigError

T = TypeVar("T")


class Registry(dict[str, type[T]], Generic[T]):
    """Classes by the name used in settings. `del registry[name]` removes a class."""

    def __init__(
        self,
        kind: str,
        base: type,
        known: dict[str, type[T]],
        given: Sequence[str] = (),
        reserved: Sequence[str] = (),
    ) -> None:
        """Create a registry.

        Args:
            kind: Kind of component, equal to the name of its setting.
            base: Base class, whose interface each class must have.
            known: Built-in classes by name.
            given: Names of the arguments that the library passes to each constructor by position; settings are passed
                as keywords.
            reserved: Names with another meaning in the setting.
        """
        super().__init__(known)
        self.kind = kind
        self._base = base
        self.given = tuple(given)
        self.reserved = tuple(reserved)

    def register(self, name: str, made: type[T]) -> None:
        """Register a class under a name.

        Args:
            name: The name; it must be neither taken nor reserved.
            made: The class: derived from the base class, or with all its public members.

        Raises:
            ConfigError: The name is not a str, taken or reserved; or the class lacks a member; or a member or the
                constructor does not accept the arguments it is called with.
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
        """Return the class of a name.

        Raises:
            ConfigError: The name is unknown.
        """
        if name not in self:
            raise ConfigError(f"{self.kind}: unknown name {name!r}; known: {', '.join(sorted(self)) or 'none'}")
        return self[name]

    def _check(self, made: type) -> None:
        """Raise `ConfigError` if a class does not have the interface of the base class."""
        base = self._base
        # Public names of the base, plus abstract and annotated-only ones.
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
    """Return why a method ("": the constructor) cannot be called with these arguments; "" if it can."""
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
    """An exchangeable component: its registry name and options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for the component's constructor."""
        return dict(self.model_extra or {})

    def build(self, registry: Registry[T], *args: Any) -> T:
        """Construct the component with positional arguments `args` and its options.

        Raises:
            ConfigError: The name is unknown, or an option does not fit the constructor in name, type or value.
        """
        make, kind = registry.find(self.name), registry.kind
        self._check_options(make, kind, args)
        hints: dict[str, Any] = {}
        with suppress(NameError):  # annotations imported for type checkers only
            hints = get_type_hints(make.__init__)
        for option, value in self.options.items():
            try:
                # Strict, so that 2.5 tokens or the text "64" fail here and not at the first request.
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

    def _check_options(self, make: type, kind: str, args: Sequence[Any]) -> None:
        """Refuse options that a constructor does not take, and a lack of those that it needs."""
        try:
            signature = inspect.signature(make)
        except ValueError:  # written in C, without a signature
            return
        parameters = list(signature.parameters.values())
        given = signature.bind_partial(*args).arguments
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = {one.name: one for one in parameters if one.kind in kinds and one.name not in given}
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        takes = f"its options: {', '.join(named) or 'none'}"
        if unknown := [] if takes_any else [option for option in self.options if option not in named]:
            near = get_close_matches(unknown[0], named, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"{kind}: {self.name}: unknown option {unknown[0]!r}; {hint}{takes}")
        needed = [name for name, one in named.items() if one.default is one.empty and name not in self.options]
        if needed:
            example = ", ".join(f"{name}: ..." for name in needed)
            raise ConfigError(
                f"{kind}: {self.name} needs {' and '.join(needed)}: {{name: {self.name}, {example}}}; {takes}"
            )


def _shown(value: Any) -> str:
    """Return the repr of a value for a message, without passwords in URLs."""
    return re.sub(r"://[^@/]*@", "://***@", repr(value))


def _checker(hint: Any) -> TypeAdapter[Any]:
    """Return a validator for an annotated type; for a class unknown to pydantic, it checks `isinstance`."""
    try:
        return TypeAdapter(hint)
    except PydanticSchemaGenerationError:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
