"""The interface of a method, and the method that computes every request."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from experiments.support.section import Section
from experiments.tasks.workload import Answer, Request, Workload

COMPUTED, BYPASSED = "computed", "bypassed"


@dataclass(frozen=True, slots=True)
class Served:
    by: str = COMPUTED  # rung or kind of match that served it, else `COMPUTED` or `BYPASSED`
    # Number of the source's request; None if unknown or without a source
    source: int | None = None
    # To the source, or to the nearest stored request if none served; None without a comparison
    similarity: float | None = None
    is_evicting: bool = False  # storing it evicted an entry
    share: float = 1.0  # share of its rows that were served: one of four, for instance
    n_prefix: int = 0  # leading tokens served from a stored prefix

    @property
    def is_hit(self) -> bool:
        return bool(is_hit(self.by))

    def cells(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return the outcome's columns for the rows of results, given the workload's requests."""
        return {
            "served": self.by,
            "source": None if self.source is None else requests[self.source].id,
            "similarity": None if self.similarity is None else round(self.similarity, 5),
        }


def is_hit(served: NDArray[np.str_] | str) -> NDArray[np.bool_]:
    """Whether each request was a hit, given what served it (any shape)."""
    hit: NDArray[np.bool_] = ~np.isin(served, (COMPUTED, BYPASSED))
    return hit


class Method:
    """A way to answer the requests of a workload, on a copy of its model. Made once; each round begins cold.

    Attributes:
        Settings: Options of the method.
        nbytes: Bytes held; None if the method stores nothing.
        n_entries: Entries held; None if the method stores nothing.
    """

    Settings: ClassVar[type[Section]] = Section  # no options
    nbytes: Any = None
    n_entries: Any = None

    def __init__(self, workload: Workload, options: Mapping[str, Any]) -> None:
        """Copy the model, sharing its weights, so that methods do not affect each other."""
        self._workload = workload
        self._settings: Any = self.Settings.make(options)
        self._module = twin(workload.module)
        self.begin()

    @classmethod
    def check(cls, options: Mapping[str, Any], name: str) -> None:
        cls.Settings.make(options, name)

    def begin(self) -> None:
        """Drop all stored values; called in inference mode."""
        self._last = Served()

    def ask(self, number: int) -> Answer:
        """Answer a request of the workload, including lookup and storing. This call is timed."""
        return self._workload.answer(self._module(**self._workload.requests[number].inputs), number)

    def last(self) -> Served:
        """Return the outcome of the latest request; called after each, outside the timed region."""
        return self._last

    def end(self) -> None:
        """Restore the model."""


class NoCache(Method):
    """Computes every request as in service: scaled dot-product attention, eval mode, inference mode."""


def twin(module: nn.Module) -> nn.Module:
    """Return a copy of an unwrapped model that shares its parameters, so another method costs no memory."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
