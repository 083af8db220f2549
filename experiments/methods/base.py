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
    by: str = COMPUTED  # the rung or the kind of match that served it, else `COMPUTED` or `BYPASSED`
    # Number of the request that it was served from; None where it is not known or there was none
    source: int | None = None
    # To that request, or to the nearest one where none served; None where nothing was compared
    similarity: float | None = None
    is_evicting: bool = False  # an entry had to leave for it
    share: float = 1.0  # of its rows, where any was served, those that were: one of four may be
    n_prefix: int = 0  # first tokens that a stored prefix served

    @property
    def is_hit(self) -> bool:
        return bool(is_hit(self.by))

    def cells(self, requests: Sequence[Request]) -> dict[str, Any]:
        """What rows of results say of it, given the requests of the workload."""
        return {
            "served": self.by,
            "source": None if self.source is None else requests[self.source].id,
            "similarity": None if self.similarity is None else round(self.similarity, 5),
        }


def is_hit(served: NDArray[np.str_] | str) -> NDArray[np.bool_]:
    """Whether something stored served each request, same shape, told from what served it."""
    hit: NDArray[np.bool_] = ~np.isin(served, (COMPUTED, BYPASSED))
    return hit


class Method:
    """One way to answer the requests of a workload, on a copy of its model. Made once; each round begins cold.

    Attributes:
        Settings: Options of the method.
        nbytes: Bytes held; None where nothing is ever held.
        n_entries: Entries held; likewise.
    """

    Settings: ClassVar[type[Section]] = Section  # which has none
    nbytes: Any = None
    n_entries: Any = None

    def __init__(self, workload: Workload, options: Mapping[str, Any]) -> None:
        """Take a copy of the model that shares its weights, so that methods do not meet."""
        self._workload = workload
        self._settings: Any = self.Settings.make(options)
        self._module = twin(workload.module)
        self.begin()

    @classmethod
    def check(cls, options: Mapping[str, Any], name: str) -> None:
        """Raise `ConfigError` for options that are wrong, naming them below `name`."""
        cls.Settings.make(options, name)

    def begin(self) -> None:
        """Forget everything; called inside inference mode."""
        self._last = Served()

    def ask(self, number: int) -> Answer:
        """Answer a request of the workload, lookup and storing included. This is what is timed."""
        return self._workload.answer(self._module(**self._workload.requests[number].inputs), number)

    def last(self) -> Served:
        """What happened to the latest request; called outside the timed region, after each."""
        return self._last

    def end(self) -> None:
        """Leave the model as it was."""


class NoCache(Method):
    """Computes every request, as one would serve it: scaled dot-product attention, eval mode, inference mode."""


def twin(module: nn.Module) -> nn.Module:
    """A copy of an unwrapped model that shares its parameters, so that a method more costs no memory."""
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
