"""Exchangeable components of a cache: registries of classes that settings name, and construction from settings."""

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Generic, Self, TypeVar, get_type_hints
from urllib.parse import unquote, unquote_plus

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from pydantic.errors import PydanticSchemaGenerationError

from llmcache.errors import ConfigError

T = TypeVar("T")

_PLACE = r"(?:\[[^]@/?#]*\]|[^:@/?#]*)(?::\d*)?(?:/[^@?#]*)?"  # host, port and path
_PAIR = r"[^=&@]*(?:=[^&]*)?"  # a parameter of a query
#: Scheme, user, password, place and query of a URL; then of one whose password has characters that should be quoted.
_URLS = (
    re.compile(rf"([\w+.-]+://)(?:([^:@/?#]*)(?::([^/?#]*))?@)?({_PLACE})(\?{_PAIR}(?:&{_PAIR})*)?"),
    re.compile(r"([\w+.-]+://)([^:@/?#]*):(.*)@([^@?]*)(\?.*)?", re.DOTALL),
)
_NO_HOST = re.compile(r"(rediss?://[^:@/?#[]*):(?!\d*(?:[/?#]|$))[^@]*\Z")  # a password in the place of the port
_SECRET = re.compile("pass|pwd|secret|token|api_?key", re.IGNORECASE)  # in the name of a query's parameter


class Registry(dict[str, type[T]], Generic[T]):
    """Classes by the name used in settings. `del registry[name]` removes a class."""

    def __init__(
        self, kind: str, base: type, known: dict[str, type[T]], given: Sequence[str] = (), reserved: Sequence[str] = ()
    ) -> None:
        """Create a registry.

        Args:
            kind: Kind of component, equal to the name of its setting.
            base: Base class, whose interface each class must have.
            known: Built-in classes by name.
            given: Names of the arguments that the library passes to constructors by position; settings are keywords.
            reserved: Names with another meaning in the setting.
        """
        super().__init__(known)
        self.kind, self._base, self.given, self.reserved = kind, base, tuple(given), tuple(reserved)

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
        """Return the class of a name; `ConfigError` if it is unknown."""
        if name not in self:
            known = ", ".join(sorted(self)) or "none"
            raise ConfigError(f"{self.kind}: unknown name {name!r}; known: {known}; one of your own: register it first")
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

    @model_validator(mode="before")
    @classmethod
    def _hide_secrets(cls, given: Any) -> Any:
        return without_secrets(given)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for the component's constructor; URLs are without their passwords."""
        return dict(self.model_extra or {})

    def build(self, registry: Registry[T], *args: Any) -> T:
        """Construct the component with arguments `args` and its options; `ConfigError` if they do not fit."""
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
                raise ConfigError(f"{kind}: {self.name}: {option}={value!r}: {wrong}") from error
        try:
            return make(*args, **_each(self.options, lambda text: getattr(text, "whole", text)))
        except (TypeError, ValueError) as error:
            takes = ", ".join(list(inspect.signature(make).parameters)[len(args) :]) or "none"
            raise ConfigError(f"{kind}: {self.name} refuses {self.options}: {error}; its options: {takes}") from error

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
            example = ", ".join([f"name: {self.name}", *(f"{name}: ..." for name in needed)])
            raise ConfigError(f"{kind}: {self.name} needs {' and '.join(needed)}: {{{example}}}; {takes}")


def _checker(hint: Any) -> TypeAdapter[Any]:
    """Return a validator for an annotated type; for a class unknown to pydantic, it checks `isinstance`."""
    try:
        return TypeAdapter(hint)
    except PydanticSchemaGenerationError:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))


class SecretUrl(str):
    """The text of a URL without its passwords, so that whatever prints, compares or saves it does without them.

    Attributes:
        whole: The URL as it was given.
        secrets: Its passwords, unquoted, by name: `password`, or that of a parameter of the query.
    """

    whole: str
    secrets: dict[str, str]

    def __new__(cls, whole: str) -> Self:
        """Take the passwords out of a URL."""
        found = next((match for form in _URLS if (match := form.fullmatch(whole))), None)
        scheme, user, password, place, query = ("",) * 5 if found is None else found.groups("")
        pairs = [pair.partition("=") for pair in query[1:].split("&")]
        secrets = {name: unquote_plus(value) for name, _, value in pairs if _SECRET.search(name)}
        secrets |= {"password": unquote(password)} if password else {}
        rest = "&".join("".join(pair) for pair in pairs if pair[0] not in secrets)
        text = f"{scheme}{user and f'{user}@'}{place}{rest and f'?{rest}'}"
        made = super().__new__(cls, text if secrets else _NO_HOST.sub(r"\1:***", whole))
        made.whole, made.secrets = whole, secrets
        return made

    def __repr__(self) -> str:
        return repr(re.sub(r"://(?:([^@/?#]*)@)?", r"://\1:***@", self, count=1) if self.secrets else str(self))


def _each(value: Any, change: Callable[[str], str], n_levels: int = 20) -> Any:
    """Return a setting with its texts changed, also in lists and mappings; what is nested deeper stays as it is."""
    if type(value) is dict and n_levels:
        return {name: _each(one, change, n_levels - 1) for name, one in value.items()}
    if type(value) in (list, tuple) and n_levels:
        return type(value)(_each(one, change, n_levels - 1) for one in value)
    return change(value) if isinstance(value, str) else value


def without_secrets(value: Any) -> Any:
    """Return a setting whose URLs are `SecretUrl`s, fit to be printed and saved."""
    return _each(value, lambda text: SecretUrl(text) if "://" in text and not isinstance(text, SecretUrl) else text)
