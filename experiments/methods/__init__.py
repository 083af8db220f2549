"""Methods: the model alone, llmcache, and alternatives to it, each at its best. One interface.

| method | what it keeps | when it serves |
|---|---|---|
| `nocache` | nothing | never: SDPA attention, eval mode, inference mode |
| `llmcache` | hidden states, layer by layer | depends on its settings |
| `doccache` | final hidden states | the nearest stored document has a cosine of at least `threshold` |
| `exact_response` | answers | an earlier request had the same tokens |
| `semantic_response` | answers | the nearest stored request has a sentence embedding cosine of at least `threshold` |
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.methods.base import Method, NoCache, Served
from experiments.methods.cached import Cached
from experiments.methods.doccache import DocCache
from experiments.methods.responses import ExactResponse, SemanticResponse
from experiments.support.section import Section, choose
from experiments.tasks.workload import Workload
from llmcache import ConfigError, LLMCacheError

NOCACHE = "nocache"

METHODS: Mapping[str, type[Method]] = {
    NOCACHE: NoCache,
    "llmcache": Cached,
    "doccache": DocCache,
    "exact_response": ExactResponse,
    "semantic_response": SemanticResponse,
}


class MethodSettings(Section):
    method: str  # a key of `METHODS`
    label: str  # name in results; by default the method's name and settings
    options: dict[str, Any]  # arguments of its class

    @classmethod
    def make(cls, values: Any, name: str = "") -> "MethodSettings":
        """Check a method's settings, flat as in YAML: `{method: doccache, threshold: 0.9}`."""
        if isinstance(values, MethodSettings):
            return values
        kind, rest = choose(METHODS, values, "method", name)
        label = rest.pop("label", None)
        nested = rest.pop("options", {})  # the form in which results store them
        if not isinstance(nested, Mapping):
            raise ConfigError(f"{name}.options: expected a mapping of settings (got {nested!r})")
        options = {**nested, **rest}
        kind.check(options, name)
        known = label or "-".join([values["method"], *(f"{key}={value}" for key, value in options.items())])
        return super().make({"method": values["method"], "label": known, "options": options}, name)

    def build(self, workload: Workload) -> Method:
        try:
            return METHODS[self.method](workload, self.options)
        except LLMCacheError as error:
            raise ConfigError(f"methods: {self.label}: {error}") from error


def make_methods(values: Any, key: str) -> tuple[MethodSettings, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ConfigError(f"{key}: give a list of at least one method (got {values!r})")
    made = tuple(MethodSettings.make(value, f"{key}[{i}]") for i, value in enumerate(values))
    labels = [method.label for method in made]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(f"methods: two are called {twice!r}; give each a label of its own")
    if any(method.label == NOCACHE and method.method != NOCACHE for method in made):
        raise ConfigError(f"methods: the label {NOCACHE!r} is that of the model alone; give another one")
    return made


__all__ = ["METHODS", "NOCACHE", "Method", "MethodSettings", "Served", "make_methods"]
