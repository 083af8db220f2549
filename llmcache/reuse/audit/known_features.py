"""Features of requests in service, to be compared with those of the calibration; see `calibration.drift`."""

from collections.abc import Mapping

from llmcache.request.rows import Row
from llmcache.reuse.calibration.drift import Features, features_of, features_of_source
from llmcache.reuse.call import Call
from llmcache.reuse.decide import Semantic

_MOST_KNOWN = 16_384  # requests whose features are kept, 5 MB; repeats of others are searched again


class KnownFeatures:
    """Finds the features of requests. The caller holds a lock."""

    def __init__(self, semantic: Semantic) -> None:
        self._semantic = semantic
        self._known: dict[str, Features] = {}  # by key, least recently used first

    def find(self, call: Call, row: Row, is_searched: bool = True) -> Features | None:
        """Return the features of a row that is a repeat or has no chosen source; None if they are unknown.

        `is_searched`: the calibration uses sources. Else other features than those of repeats are a draft's.
        """
        is_source = self._semantic.bank.is_pinned(row.key)
        if not is_source and row.number in call.forecasts:
            return features_of(None, call.forecasts[row.number])
        if not is_source and row.number not in call.hits:
            return None
        if (known := self._known.get(row.key)) is not None:
            return known
        if not (is_source or is_searched):
            return None
        vectors, forecasts = self._semantic.fingerprint.project(call.requests.tokens([row]))
        if is_source:
            return features_of_source(forecasts[0])
        return features_of(self._semantic.chooser.choose(call.scope, [row], vectors, forecasts)[0], forecasts[0])

    def keep(self, batch: Mapping[str, Features]) -> None:
        for key, features in batch.items():
            self._known.pop(key, None)
            self._known[key] = features
        while len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def forget(self) -> None:
        self._known.clear()
