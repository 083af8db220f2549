"""The data of one call of the trunk. `State` and `Form` are shared between calls; the rest belongs to one call.

Sizes: B rows, T tokens, F fingerprint width, C outputs, S width of a signature.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor

from llmcache.engines.engine import Engine
from llmcache.memory.bank import Entry
from llmcache.memory.blocks.prefill import Prefill
from llmcache.models.packing import Fields
from llmcache.models.weights import Mark
from llmcache.request.forms import State
from llmcache.request.reading import Requests
from llmcache.request.rows import Row, Scope
from llmcache.reuse.audit.account import Audited
from llmcache.reuse.calibration.calibration import Calibration
from llmcache.reuse.sources import Choice
from llmcache.support.arrays import Floats


@dataclass(slots=True)
class Hit:
    """What serves a row: the states of a stored request, or of a draft."""

    rung: str
    source: str  # key of the stored request; "" for a draft
    fields: Fields  # its row of each output tensor
    padding: Fields = ()  # states of its padding, if the row is padded in the same way
    similarity: float | None = 1.0
    answer: Floats | None = None  # signature (S,) of its answer; approximate hits only
    share: float = 1.0  # its risk divided by the limit, 0 to 1
    risk: float | None = None  # approximate hits only
    logits: Floats | None = None  # of another model (C,), to be put into the model's output; `fields` are NaN then


@dataclass(slots=True, weakref_slot=True)
class Call:
    """One call of the trunk. Filled step by step: opened, looked up, answered, closed."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    namespace: str
    is_collected: bool = False  # computed only to be observed: neither served nor stored
    arguments: Mapping[str, Any] = field(default_factory=dict)  # the trunk's, by name
    state: State | None = None  # of the trunk
    reason: str | None = None  # for a bypass: a key of `CURES`
    scope: Scope | None = None
    mark: Mark | None = None  # of the weights, when it was opened
    generation: int = 0  # when opened: `Purges.generation`; what was purged since is not stored
    epoch: int = 0  # when opened: the store's number of the namespace; a purge changes it (`Store.numbers`)
    since: str = ""  # when opened: the cursor up to which the store's purges had been followed (`Store.purges`)
    kind: tuple[Any, ...] = ()  # digest of the weights, autocast dtype and `Form.kind`: decides the output's layout
    engine: Engine | None = None  # computes the rows without a hit
    is_activated: bool = False  # an activated LoRA applies to its last columns
    is_whole: bool = False  # its rows affect each other: all are served or none
    requests: Requests | None = None
    rows: Sequence[Row] = ()  # one per request
    mask_4d: Tensor | None = None  # the mask as passed, if 4-D; `arguments` holds the equivalent 2-D mask
    n_read: int | None = None  # how many of the last columns the head reads; None: unknown, maybe all
    prefixes_from: str | None = None  # another namespace whose prefixes may serve it
    prefill: Prefill | None = None  # set if the call keeps K/V
    hits: dict[int, Hit] = field(default_factory=dict)  # by row number
    computed: dict[int, int] = field(default_factory=dict)  # row of the trunk's output, by row number
    copied: dict[int, int] = field(default_factory=dict)  # an equal row of the call that is computed, by row number
    output: Any = None  # the trunk's, for the computed rows
    entries: dict[int, Entry] = field(default_factory=dict)  # of computed rows, by row number
    choices: dict[int, Choice] = field(default_factory=dict)  # best source, or draft, and its risk, by row number
    vectors: dict[int, Floats] = field(default_factory=dict)  # fingerprints (F,) of rows searched for approximate hits
    forecasts: dict[int, Floats] = field(default_factory=dict)  # forecasts of the output (C,), or drafts of it
    made: Calibration | None = None  # the calibration in force in the look-up
    audited: dict[int, Audited] = field(default_factory=dict)  # rows that the audit drew
    is_looked_up: bool = False
    were_weights_checked: bool = True  # the weights were checked when the call was opened
    inputs: Mapping[str, Any] = field(default_factory=dict)  # the model's, if the call was prepared: see `found.py`
    versions: tuple[int, ...] = ()  # version counters of the tensors in `inputs`
    started_s: float = field(default_factory=perf_counter)
    lookup_s: float = 0.0
    n_searched: int = 0  # rows searched for approximate hits
    search_s: float = 0.0
    computing_s: float = 0.0
    storing_s: float = 0.0

    def take_over(self, known: "Call", numbers: Sequence[int]) -> None:
        """Copy hits and choices of rows of a prepared call; its row `numbers[i]` becomes row i."""
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
        name: Name in outcomes and stats.
        is_lossless: A hit equals the model's own output. Other rungs are skipped if searches do not pay.
    """

    name: str
    is_lossless: bool

    def look_up(self, call: Call, rows: Sequence[Row]) -> None:
        """Add a `Hit` to `call.hits`, by row number, for each row that a stored request serves.

        Rows without a hit go to the next rung, or are computed. If this raises, that is counted and the call computed.

        Args:
            call: The call. `arguments` are the trunk's; all rows have the same `scope`.
            rows: The rows without a hit.
        """
