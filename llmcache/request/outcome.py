"""The outcome of each request of a call."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of a call. Plain values only: it keeps no state of the model alive.

    Attributes:
        key: The row's own exact key, under which a miss is stored; "" when the call was bypassed before it was known.
        rung: The rung that served it: `exact`, `prefix`, `semantic`, `paper`, or None when it was computed.
        layer: The deepest layer reused, or None.
        source: Key of the stored request whose state was reused, or None.
        similarity: Similarity to that request; of a row that was computed, to the source that was chosen or, with
            `tau`, to the nearest one found. None when no search was made or nothing was found.
        risk: Risk score of the chosen source, whether it served or not: a hit's is at most `Calibration.limit`.
            Infinite where a content gate refused or the source is quarantined. None when no search was made or
            nothing was found.
        n_prefix: First tokens that a stored prefix served, 0 without.
        bypassed: Why the cache was not used (`llmcache.request.bypass.CURES`), or None.
    """

    key: str = ""
    rung: str | None = None
    layer: int | None = None
    source: str | None = None
    similarity: float | None = None
    risk: float | None = None
    n_prefix: int = 0
    bypassed: str | None = None
