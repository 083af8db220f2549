"""The data of one call of the trunk, which the steps of the call fill, and what a rung and a path are.

Sizes: B rows, T tokens, F fingerprint width, C outputs, S width of a signature.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from torch import Tensor

from llmcache.engines.engine import Engine
from llmcache.memory.bank import Entry
from llmcache.models.arguments import Arguments
from llmcache.models.causal import Causal
from llmcache.models.packing import Fields
from llmcache.models.weights import Snapshot
from llmcache.request.call_signatures import TrunkState
from llmcache.request.outcome import Outcome
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
    logits: Floats | None = None  # (C,) of the model's output, if known; else its head runs on the states
    has_states: bool = True  # else `fields` are empty, there are logits, and they are put into the model's output


@dataclass(slots=True)
class Call:
    """One call of the trunk that is cached. Opened with the first fields; looking up, answering and closing fill more.

    Rows are named by their number in the call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: Mapping[str, Any]  # the same, by name
    mask_4d: Tensor | None  # the mask as passed, if 4-D; `arguments` holds the equivalent 2-D mask
    state: TrunkState  # of the trunk
    causal: Causal  # what the trunk allows
    snapshot: Snapshot | None  # of the weights; None: they were not looked at
    scope: Scope
    #: Of its blocks: that of the model with no adapter active, if an activated LoRA may share these with it.
    blocks_scope: Scope
    kind: tuple[Any, ...]  # digest of the weights, autocast dtype and `CallSignature.kind`: decides the output's layout
    engine: Engine  # computes the rows without a hit
    requests: Requests
    rows: Sequence[Row]  # one per request
    path: "Path"
    n_read: int | None  # see `CachedForward.n_read`
    prefixes_from: str | None  # another namespace whose prefixes may serve it
    generation: int  # `Purges.generation`; what was purged since is not stored
    epoch: int  # the store's number of the namespace; a purge changes it (`Store.numbers`)
    since: str  # the cursor up to which the store's purges had been followed (`Store.purges`)
    is_collected: bool  # computed only to be observed: neither served nor stored
    is_activated: bool  # an activated LoRA applies to its last columns
    is_coupled: bool  # its rows affect each other: all are served or none
    were_weights_checked: bool  # when it was opened
    started_s: float = 0.0
    is_looked_up: bool = False
    hits: dict[int, Hit] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)  # row of the trunk's output
    copied: dict[int, int] = field(default_factory=dict)  # an equal row of the call that is computed
    beginnings: "Path | None" = None  # what computed its rows, if they share beginnings
    plan: Any = None  # of a path that keeps K/V, or of `beginnings`
    output: Any = None  # the trunk's, for the computed rows
    entries: dict[int, Entry] = field(default_factory=dict)  # of computed rows
    choices: dict[int, Choice] = field(default_factory=dict)  # best source, or draft, and its risk
    vectors: dict[int, Floats] = field(default_factory=dict)  # fingerprints (F,) of rows searched for approximate hits
    forecasts: dict[int, Floats] = field(default_factory=dict)  # forecasts of the output (C,), or drafts of it
    calibration: Calibration | None = None  # in force in the look-up
    audited: dict[int, Audited] = field(default_factory=dict)  # rows that the audit drew
    lookup_s: float = 0.0
    n_searched: int = 0  # rows searched for approximate hits
    search_s: float = 0.0
    computing_s: float = 0.0
    storing_s: float = 0.0

    def without_arguments(self) -> "Call":
        """Return it without what keeps the caller's tensors and K/V cache alive; it cannot be answered any more."""
        return replace(self, args=(), kwargs={}, arguments={}, mask_4d=None, plan=None, output=None)

    def reads_padding(self, row: Row) -> bool:
        """Whether the states of a row's padding may be read, so that they must be the model's."""
        if row.layout:  # a sentence model keeps it beside the key; who calls its trunk directly reads it
            return True
        if not row.has_layout or self.n_read is None or not isinstance(row.valid, slice):
            return row.has_layout
        n_tokens = self.requests.ids.shape[1]
        return self.n_read > 0 and not (row.valid.start <= n_tokens - self.n_read and row.valid.stop == n_tokens)


@dataclass(frozen=True, slots=True)
class Bypass:
    """A call of the trunk that is computed as without a cache."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reason: str  # a key of `CURES`
    parameters: Arguments  # of the forward that was called
    is_collected: bool = False
    hits: ClassVar[Mapping[int, Hit]] = {}
    calibration: ClassVar[None] = None
    entries: ClassVar[Mapping[int, Entry]] = {}


class Path(ABC):
    """How the rows of a call are looked up, computed and stored: by rows, or by their K/V. Chosen at `open`.

    One path serves all calls: what it finds for one is kept in its `Call`.
    """

    keeps_kv: ClassVar[bool]

    @abstractmethod
    def look_up(self, call: Call) -> None:
        """Find what is stored for the rows of a call."""

    @abstractmethod
    def served(self, call: Call) -> Collection[int]:
        """Return the numbers of the rows that nothing is computed for."""

    @abstractmethod
    def drop(self, call: Call) -> None:
        """Discard what was found."""

    @abstractmethod
    def answer(self, call: Call) -> Any:
        """Return the trunk's output: what was found, and the rest computed."""

    @abstractmethod
    def store(self, call: Call, output: Any) -> str | None:
        """Store computed rows; return the reason for a bypass if the output cannot be stored."""

    def follow(self, call: Call, output: Any) -> None:
        """Keep what is generated after the prompts of a call that keeps K/V, from now on."""

    @abstractmethod
    def outcome(self, call: Call, row: Row) -> Outcome:
        """Return the outcome of a row that was looked up."""

    @abstractmethod
    def names(self, call: Call) -> list[str]:
        """Return the names in a store of all that may serve a call."""

    @abstractmethod
    def n_computed(self, call: Call) -> int:
        """Return how many tokens were computed, as `count_tokens` counts."""


def count_tokens(call: Call, numbers: Iterable[int]) -> int:
    """Return how many tokens these rows have, without padding and without bypassed rows."""
    rows = map(call.rows.__getitem__, numbers)
    return sum(row.n_valid for row in rows if not row.bypass_reason)


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
