"""The outcome of each request of a call."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one row of a call. Plain values: it keeps no state of the model alive.

    Attributes:
        key: The row's exact key, under which a miss is stored; "" if the call was bypassed before the key was known.
        rung: The rung that served it: `exact`, `prefix`, `semantic`, `draft`, `paper`, or None if it was computed.
        layer: The deepest layer reused, or None.
        source: Key of the stored request whose state was reused, or None; None for a draft.
        similarity: Similarity to that request; for a computed row, to the chosen source or, with `tau`, to the nearest
            stored request. None without a search or without a neighbour.
        risk: Risk score of the chosen source, hit or miss, or of the draft that served; at most the rung's limit for a
            hit (`Calibration.limits`). Infinite if the content gate refused the source or it is quarantined. None
            without a search or without a neighbour.
        n_prefix: Number of first tokens that were not computed for it: a stored prefix, or an earlier row's.
        n_known: Number of first tokens that were stored when it was looked up; 0 for an exact hit.
        bypassed: The reason for a bypass (`llmcache.request.bypass.CURES`), or None.
        missed: Why it, or what follows its prefix, was computed (`llmcache.request.bypass.MISSES`). None for other
            hits, and for a request without K/V of which nothing is stored.
    """

    key: str = ""
    rung: str | None = None
    layer: int | None = None
    source: str | None = None
    similarity: float | None = None
    risk: float | None = None
    n_prefix: int = 0
    n_known: int = 0
    bypassed: str | None = None
    missed: str | None = None
