"""What the cache did and how it stands, as plain values with the unit in the name."""

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Status = Literal[
    "learning", "certified", "unwatched", "drifted", "failing", "growing", "tightened", "off", "other weights"
]


@dataclass(frozen=True, slots=True)
class AuditStats:
    """What is known of calibrated reuse in service. Counts begin anew with each calibration and after each alarm.

    Of a calibration that is shared, they are of this cache's own requests; `n_alarms` counts alarms of others, too.

    Attributes:
        status: `learning` from the first requests; `certified`: the bound holds, as far as is known, and hits are
            audited; `unwatched`: it was shown, but with `audit=0` nobody looks; `drifted`: it is void, requests being
            unlike those that it was made with, and nothing is reused approximately; `failing`: nor is anything
            meanwhile, as the cache itself fails (`Stats.health`); `growing`: sources grow, and there is no bound;
            `tightened`: after a first alarm, half is served; `off`: nothing is, after a second alarm, a calibration
            that failed, or none; `other weights`: the model was calibrated with others.
        n_requests: Requests counted, hits or not; bypassed ones are not.
        n_drawn: Approximate hits to be audited.
        n_recomputed: Those whose own answer is known by now. Where n_drawn - n_recomputed exceeds n_waiting, the rest
            cannot be known: computing failed, or they were purged.
        n_lost: Those that count as changed to the alarm since they were not audited: computing them failed, or
            more than a thousand others have been drawn and not audited since (`llmcache.audit.account`).
        n_waiting: Hits that wait to be audited, and a renewal if one does: `LLMCache.drain` does them, but for hits
            that wait until the weights that served them are back.
        n_changed: Of those audited, how many answers were not the model's own.
        rate: Estimated share of changed answers, of all requests; None before the first.
        lower: The mean rate so far is at least this, at all times but for a chance of `delta`.
        upper: It is at most this, likewise. What was drawn and is not known counts as changed here.
        n_alarms: Times that the rate was found to exceed what is allowed, since wrapping.
        n_quarantined: Stored requests that serve no others any more, since an answer of theirs was another request's.
        needed: Requests after which an alarm can be expected if the rate were twice what is allowed from now on
            (`llmcache.audit.alarm.Alarm.needed` derives it); None where nothing is audited.
        bound: Share of changed answers that the calibration showed not to be exceeded; None where it holds no more.
        allowed: The largest share that is allowed; None without a calibration.
    """

    status: Status
    n_requests: int = 0
    n_drawn: int = 0
    n_recomputed: int = 0
    n_lost: int = 0
    n_waiting: int = 0
    n_changed: int = 0
    rate: float | None = None
    lower: float = 0.0
    upper: float = 1.0
    n_alarms: int = 0
    n_quarantined: int = 0
    needed: int | None = None
    bound: float | None = None
    allowed: float | None = None

    @property
    def measure(self) -> str:
        """What the audit has found so far, in words: an estimate once that is within what is allowed, or above it."""
        if self.rate is None or (self.allowed is not None and self.lower <= self.allowed < self.upper):
            return f"still measuring: {self.n_changed:,} of {self.n_recomputed:,} changed"
        found = f"{self.rate:.2%} ({self.lower:.2%} to {self.upper:.2%})"
        return f"measured {found}: {self.n_changed:,} of {self.n_recomputed:,} changed"

    def __str__(self) -> str:
        """The calibration's bound first, then what the audit has found."""
        shown = "no bound" if self.bound is None else f"at most {self.bound:.2%} changed"
        allowed = "" if self.allowed is None else f", allowed {self.allowed:.2%}"
        return f"{shown} ({self.status}{allowed}); audit: {self.measure}"


@dataclass(frozen=True, slots=True)
class Health:
    """How the cache stands.

    Attributes:
        is_failing: A tenth of the latest calls or recomputations failed, and the share has not fallen to half of that
            since.
        failed_calls: Share of the latest calls in which something of the cache failed and was computed around: reading,
            lookup, draw or storing; 0 to 1, over some 64 calls.
        failed_recomputes: Share of the latest looks of the audit that failed, over some 64 looks.
        failures: Failures since wrapping, by what failed and the kind of error.
    """

    is_failing: bool = False
    failed_calls: float = 0.0
    failed_recomputes: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """`good`, or `failing` with the shares and what failed most often."""
        if not self.is_failing:
            return "good"
        often = ", ".join(f"{what} ({n})" for what, n in Counter(self.failures).most_common(3))
        shares = f"{self.failed_calls:.0%} of calls, {self.failed_recomputes:.0%} of recomputations"
        return f"failing: {shares}; since wrapping: {often}"


@dataclass(frozen=True, slots=True)
class CompileStats:
    """What graphs of the trunk did, see `LLMCache.compile`.

    Attributes:
        n_graphs: Graphs in force, one a bucket; 0 after they were dropped.
        n_requests: Rows that a graph computed.
        eager: Rows that the model computed without a graph while there were graphs, by reason; calls that bypass the
            cache are not among them. `kv_cache`: the caller keeps K/V. `shape`: no bucket holds the rows, or too much
            of it would be padding. `arguments`: more than tokens, a 2-D mask and token types was given. `padding`: a
            row is not padded on the right. `torch_settings`: autocast is on, or torch's number of threads, default
            dtype, matmul precision or determinism changed. `thread`: of a mode with CUDA graphs, another thread than
            the one that made them. `failed`: a graph raised, and is used no more.
        n_failed: Buckets without a graph, since making it failed, or running it.
        n_dropped: 1 after all graphs were dropped, since the model was edited otherwise than in place; else 0.
    """

    n_graphs: int
    n_requests: int = 0
    eager: dict[str, int] = field(default_factory=dict)
    n_failed: int = 0
    n_dropped: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a cache did with the store behind its memory, and what that holds.

    Attributes:
        n_asked: Values that were asked for: entries and blocks that were not in memory.
        n_found: Those that the store had.
        n_mismatched: Values that were there and not used, by what was wrong with them: `damaged`, `other_format` or
            `other_key` (`llmcache.stores.seal.MismatchError`).
        n_written: Values that were written.
        n_dropped: Values that were not, since too much waited, or the store failed.
        read_ms: Total time in reading and checking values.
        least_tokens: Tokens from which a value is read rather than computed, as measured in service or set.
        is_answering: False after failures in a row, until the store answers a ping.
        n_values: Values that the store holds, of all caches; None where it cannot tell now.
        nbytes: Bytes of these.
        max_bytes: Its budget; None where it sets none.
        n_evicted: Values that left for others, since this cache opened it.
    """

    n_asked: int
    n_found: int
    n_mismatched: dict[str, int]
    n_written: int
    n_dropped: int
    read_ms: float
    least_tokens: int | None
    is_answering: bool
    n_values: int | None
    nbytes: int | None
    max_bytes: int | None
    n_evicted: int | None


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot. A request is one row; a hit is a request whose output came wholly or partly from the store.

    Attributes:
        n_requests: Rows seen, bypassed ones included; decode steps are parts of a request and not counted here.
        hits: Hits by rung.
        hits_by_layer: Hits by the deepest layer reused; those of prefixes, which skip none, are not among them.
        reuses_by_layer: Reuses by layer. With `tau` a hit counts at each layer whose output was taken from the
            store, else once, at the deepest.
        n_misses: Rows computed in full and eligible to be stored.
        n_revalidated: Rows that could have been reused approximately, and were computed to check the entry (policy
            `divergence`): neither hits nor misses, and not stored.
        bypassed: Rows computed as if there were no cache, by reason (`llmcache.request.bypass.CURES`), decode steps
            included.
        n_prefix_tokens: Tokens that stored prefixes served, which no layer was run for.
        n_prompt_tokens: Tokens of all requests that the prefix rung was asked about.
        n_blocks: Blocks of tokens that it holds, ends of requests not counted.
        n_blocks_evicted: Blocks, and ends of requests, that left for others.
        prefix_nbytes: Bytes of both that are held.
        n_layers_skipped: Layer executions saved, summed over rows.
        n_entries: Entries by layer.
        n_evicted: Entries that left for others, by layer.
        n_expelled: Entries that their policy sent away whatever the budget, by layer: `ttl`, which were too old;
            `divergence`, whose checks exceeded the limit.
        n_stored: Requests known, by their entries or in blocks; not those of which only the beginning is.
        nbytes: Bytes of the entries held, all layers.
        nbytes_by_layer: The same by layer.
        max_nbytes_by_layer: Budgets of the banks, by layer; blocks of prefixes may fill what these leave.
        index_nbytes: Bytes of the fingerprints that they are found by, room for more included.
        reconstruction_error: What compression loses, by layer: sum of |x - x'|^2 over sum of |x - mean|^2, rows x of
            every 16th entry packed (x' is what comes back), of the weights that stored last. Entries that a codec is
            fitted on are left out, but not the same requests if they are stored again later. 0 is lossless, 1 no better
            than the mean of all rows. None before anything was measured; a lossless codec is not.
        reconstruction_distance: Mean of 1 - cosine(x, x') over the same rows, 0 to 2, or None.
        lookup_ms: Total time in fingerprint, search and decision.
        computing_ms: Total time in the trunk, for rows that were computed, wholly or in part. On an accelerator: in
            launching it.
        storing_ms: Total time in keeping states, checks, storing misses and fitting codecs.
        n_too_large: Requests with a state larger than its bank, which was not stored, or that were not kept in blocks
            as a whole, since these do not fit `max_bytes`.
        errors: Failures of index, store or audit that were computed around.
        health: Whether the cache itself works, and what failed (`llmcache.stats.Health`).
        audit: What is known of calibrated reuse in service; None without any.
        compiled: What graphs of the trunk did; None before `LLMCache.compile`.
        store: What was read from and written to the store behind memory; None without one.
    """

    n_requests: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    hits_by_layer: dict[int, int] = field(default_factory=dict)
    reuses_by_layer: dict[int, int] = field(default_factory=dict)
    n_misses: int = 0
    n_revalidated: int = 0
    bypassed: dict[str, int] = field(default_factory=dict)
    n_prefix_tokens: int = 0
    n_prompt_tokens: int = 0
    n_blocks: int = 0
    n_blocks_evicted: int = 0
    prefix_nbytes: int = 0
    n_layers_skipped: int = 0
    n_entries: dict[int, int] = field(default_factory=dict)
    n_evicted: dict[int, int] = field(default_factory=dict)
    n_expelled: dict[int, int] = field(default_factory=dict)
    n_stored: int = 0
    nbytes: int = 0
    nbytes_by_layer: dict[int, int] = field(default_factory=dict)
    max_nbytes_by_layer: dict[int, int] = field(default_factory=dict)
    index_nbytes: int = 0
    reconstruction_error: dict[int, float | None] = field(default_factory=dict)
    reconstruction_distance: dict[int, float | None] = field(default_factory=dict)
    lookup_ms: float = 0.0
    computing_ms: float = 0.0
    storing_ms: float = 0.0
    n_too_large: int = 0
    errors: int = 0
    health: Health = field(default_factory=Health)
    audit: AuditStats | None = None
    compiled: CompileStats | None = None
    store: TierStats | None = None

    @property
    def n_hits(self) -> int:
        """Hits of all rungs."""
        return sum(self.hits.values())

    @property
    def hit_rate(self) -> float:
        """Hits over all requests, 0 to 1; 0 before the first."""
        return self.n_hits / self.n_requests if self.n_requests else 0.0

    @property
    def held_nbytes(self) -> int:
        """Bytes of all that is held: states, the fingerprints that they are found by, and blocks of prefixes."""
        return self.nbytes + self.index_nbytes + self.prefix_nbytes

    @property
    def n_evicted_total(self) -> int:
        """States and blocks that left for others."""
        return sum(self.n_evicted.values()) + self.n_blocks_evicted

    def __str__(self) -> str:
        """One figure a line, those left out that are 0, empty or None."""
        told = {one.name: getattr(self, one.name) for one in fields(self)} | {"hit_rate": self.hit_rate}
        shown = ((name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in told.items() if value)
        return "\n".join(f"{name}: {value}" for name, value in shown)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, `n_hits` and `hit_rate` included."""
        return {**asdict(self), "n_hits": self.n_hits, "hit_rate": self.hit_rate}
