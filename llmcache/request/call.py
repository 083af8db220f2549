"""Data of one call of the trunk. `State` and `Form` are shared by calls; all else belongs to one call.

Sizes: B rows, T tokens, F fingerprint width, C outputs, S width of a signature.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from llmcache.arrays import Floats
from llmcache.models.weights import Mark
from llmcache.request.prefill import Prefill
from llmcache.request.rows import Row, Scope

if TYPE_CHECKING:  # parts that serve a call; this is what they fill
    from llmcache.audit.account import Audited
    from llmcache.bank import Entry
    from llmcache.calibration.calibration import Calibration
    from llmcache.decide import Choice
    from llmcache.engines.engine import Engine
    from llmcache.models.packing import Fields
    from llmcache.request.reading import Requests, Tables


@dataclass(frozen=True, slots=True)
class Form:
    """Facts about all calls with arguments of one form, while the trunk stays as it is."""

    names: tuple[str, ...]  # of the values, by position first
    reason: str | None = None  # why they bypass the cache
    attention: str = ""  # the implementation in use, see `Trunk.attention`
    keeps_kv: bool = False  # the caller is to hold K/V afterwards
    kind: tuple[Any, ...] = ()  # what of it decides how the output is packed


@dataclass(slots=True)
class State:
    """Facts about the trunk while its weights, settings and modules stay as they are."""

    digest: str
    modules: Sequence[Any]  # of the trunk, see `Look.modules`
    reason: str | None  # why no call can be cached
    coupling: str  # why rows of a call affect each other, or ""
    hooks: Sequence[dict[int, Any]]  # of the modules within, which would not run
    n_hooks: int  # torch's count of hooks ever registered, when last seen without foreign ones; -1: look again
    sees_later: bool  # tokens of a row see later ones
    tables: "Tables"  # of the model
    flags: Callable[[], Iterable[Any]]  # what the config asks for beside the arguments, as it is now
    forms: dict[tuple[Any, ...], Form] = field(default_factory=dict)
    scopes: dict[tuple[str, ...], Scope] = field(default_factory=dict)  # by what they hold beside the weights


@dataclass(slots=True)
class Hit:
    """A stored request that serves a row."""

    rung: str
    source: str  # its key
    fields: "Fields"  # what is kept of it
    padding: "Fields" = ()  # and of its padding, which is like that of the row
    similarity: float | None = 1.0
    answer: Floats | None = None  # signature (S,) of what it was answered, of an approximate hit
    share: float = 1.0  # of the risk that is allowed, 0 to 1


@dataclass(slots=True, weakref_slot=True)
class Call:
    """One call of the trunk. Filled step by step: opened, looked up, answered, closed."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    namespace: str
    is_collected: bool = False  # it is computed to be observed: nothing serves it, and nothing of it is stored
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the trunk, by name
    state: State | None = None  # of the trunk
    reason: str | None = None  # why it bypasses the cache: a key of `CURES`
    scope: Scope | None = None
    mark: Mark | None = None  # of the weights, when it was opened
    generation: int = 0  # when opened: how often the namespace had been cleared in memory (`Bank.generation`)
    number: int = 0  # when opened: the store's number of the namespace; a purge changes it (`Store.numbers`)
    kind: tuple[Any, ...] = ()  # what decides how its output is packed, beside the weights
    engine: "Engine | None" = None  # computes what nothing serves
    is_activated: bool = False  # an activated LoRA is in force for its last columns
    is_whole: bool = False  # its rows affect each other: all are served, or none
    requests: "Requests | None" = None
    rows: Sequence[Row] = ()  # its requests
    mask_4d: Tensor | None = None  # the mask that was passed, where it is 4-D; `arguments` holds a 2-D one
    n_read: int | None = None  # columns that the head reads, from the last on; None: maybe all
    prefixes_from: str | None = None  # a namespace whose prefixes serve it as well
    prefill: Prefill | None = None  # of a call that keeps K/V
    hits: dict[int, Hit] = field(default_factory=dict)  # by row number
    computed: dict[int, int] = field(default_factory=dict)  # place in the trunk's output, by row number
    output: Any = None  # of the trunk, for the rows that were computed
    entries: "dict[int, Entry]" = field(default_factory=dict)  # of the rows that were computed, by row number
    choices: "dict[int, Choice]" = field(default_factory=dict)  # who would serve a row approximately
    vectors: dict[int, Floats] = field(default_factory=dict)  # fingerprints (F,) of rows that were looked up so
    forecasts: dict[int, Floats] = field(default_factory=dict)  # of the output (C,), likewise
    made: "Calibration | None" = None  # in force when that was done
    audited: "dict[int, Audited]" = field(default_factory=dict)  # rows that the audit drew
    is_looked_up: bool = False
    may_wait: bool = False  # to look at the weights: nothing of it is written to a store, or kept in blocks
    is_looked_at: bool = True  # the weights were, when it was opened
    inputs: Mapping[str, Any] = field(default_factory=dict)  # of the model, where it was prepared: see `found.py`
    versions: tuple[int, ...] = ()  # of the tensors among them
    started_s: float = field(default_factory=perf_counter)
    lookup_s: float = 0.0
    n_searched: int = 0  # rows that approximate hits were searched for
    search_s: float = 0.0
    computing_s: float = 0.0
    storing_s: float = 0.0

    def take_over(self, known: "Call", numbers: Sequence[int]) -> None:
        """Take over the hits and choices of some rows of a prepared call; row `numbers[i]` becomes row i."""
        assert known.requests is not None
        place = {number: new for new, number in enumerate(numbers)}
        for name in ("hits", "choices", "vectors", "forecasts"):
            found = getattr(known, name)
            setattr(self, name, {place[number]: one for number, one in found.items() if number in place})
        self.requests, self.made, self.is_looked_up = known.requests.take(numbers), known.made, True
        self.rows = self.requests.rows
        self.lookup_s += known.lookup_s * len(numbers) / len(known.rows)


class Rung(Protocol):
    """One way to serve rows from stored requests.

    Attributes:
        name: As outcomes and stats call it.
        is_lossless: A hit equals the model's own output. Other rungs are not asked where searches do not pay.
    """

    name: str
    is_lossless: bool

    def look_up(self, call: Call, rows: Sequence[Row]) -> None:
        """Add a `Hit` to `call.hits`, by row number, for each of these rows that a stored request serves.

        Rows that get no hit go to the next rung, or are computed. What it raises is counted, and the call computed.

        Args:
            call: The call; `arguments` are the trunk's, `scope` is shared by all rows.
            rows: Its rows that have no hit yet.
        """
