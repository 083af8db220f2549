"""What is compared of each request that the cache is asked; of a repeat, what it was when it was looked up."""

from llmcache.arrays import Floats
from llmcache.banks.cache_banks import CacheBanks
from llmcache.calibration.drift import Marks, marks_of, marks_of_source
from llmcache.request.call import Call
from llmcache.request.rows import Row
from llmcache.reuse.chooser import NeighbourChooser

_MOST_KNOWN = 16_384  # requests whose marks are kept, 5 MB: repeats of others are looked up once more


class Marking:
    """Finds the marks of requests. The caller holds a lock."""

    def __init__(self, banks: CacheBanks, chooser: NeighbourChooser) -> None:
        self._banks = banks
        self._chooser = chooser
        self._known: dict[str, Marks] = {}  # the longest unasked first

    def find(self, call: Call, row: Row) -> Marks | None:
        """Marks of a row that was looked up, or is served by its own state; None where that cannot be told."""
        known, is_pinned = self._known.get(row.key), self._banks.is_pinned(row.key)
        if row.number in call.plan.choices and not is_pinned:
            marks = marks_of(call.plan.choices[row.number], _forecast(call, row))
        elif not is_pinned and row.number not in call.plan.reused:
            return None
        elif known is not None:
            marks = known
        elif is_pinned:
            marks = marks_of_source(_forecast(call, row))
        elif (found := self._look_up(call, row)) is not None:
            marks = found
        else:
            return None
        self._known.pop(row.key, None)
        self._known[row.key] = marks
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return marks

    def forget(self) -> None:
        self._known.clear()

    def _look_up(self, call: Call, row: Row) -> Marks | None:
        """What is found for a row that needed no lookup to be served: it was stored before marks were kept."""
        vectors = call.read.fingerprints.get(self._banks.layers[-1])
        if vectors is None or call.read.fingerprint_epoch != self._banks.fingerprint_epoch:
            return None
        forecast = _forecast(call, row)
        forecasts = None if forecast is None else forecast[None]
        (choice,) = self._chooser.choose(call.read.scope, [row], vectors[[row.number]], forecasts)
        return marks_of(choice, forecast)


def _forecast(call: Call, row: Row) -> Floats | None:
    return None if call.read.forecasts is None else call.read.forecasts[row.number]
