"""Marks of requests in service, which are compared with those of the calibration; see `calibration.drift`."""

from typing import TYPE_CHECKING

from llmcache.calibration.drift import Marks, marks_of, marks_of_source
from llmcache.decide import Semantic
from llmcache.request.rows import Row

if TYPE_CHECKING:
    from llmcache.request.call import Call

_MOST_KNOWN = 16_384  # requests whose marks are kept, 5 MB: repeats of others are looked up once more


class Marking:
    """Finds the marks of requests. The caller holds a lock."""

    def __init__(self, semantic: Semantic) -> None:
        self._semantic = semantic
        self._known: dict[str, Marks] = {}  # the longest unasked first

    def find(self, call: "Call", row: Row) -> Marks | None:
        """Return the marks of a row that was looked up, or is a repeat; None where they are not known."""
        known, choice = self._known.get(row.key), call.choices.get(row.number)
        is_source = row.key in self._semantic.sources and self._semantic.bank.is_pinned(row.key)
        if is_source:
            marks = known or marks_of_source(self._semantic.project(call, [row])[1][0])
        elif choice is not None:
            marks = marks_of(choice, call.forecasts[row.number])
        elif row.number in call.forecasts:
            marks = marks_of(None, call.forecasts[row.number])
        elif row.number not in call.hits:
            return None
        elif known is not None:
            marks = known
        else:
            (vector,), (forecast,) = self._semantic.project(call, [row])
            marks = marks_of(self._semantic.choose(call, [row], vector[None], forecast[None])[0], forecast)
        self._known.pop(row.key, None)
        self._known[row.key] = marks
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return marks

    def forget(self) -> None:
        self._known.clear()
