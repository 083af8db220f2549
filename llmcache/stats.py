"""Counts, times and health of a cache, as plain values with the unit in the name."""

import html
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Status = Literal[
    "learning", "certified", "unwatched", "drifted", "failing", "growing", "tightened", "off", "other weights"
]


@dataclass(frozen=True, slots=True)
class AuditStats:
    """The audit of calibrated reuse in service. Counts restart with each calibration and after each alarm.

    With a shared calibration they cover this cache's requests only, except `n_alarms`, which includes alarms of others.

    Attributes:
        status: `learning`: from the first requests; `certified`: the bound holds, as far as is known, and hits are
            audited; `unwatched`: the bound was shown, but `audit=0`; `drifted`: the bound is void, since requests are
            unlike those of the calibration, and nothing is reused approximately; `failing`: nothing is reused
            approximately while the cache itself fails (`Stats.health`); `growing`: sources grow, without a bound;
            `tightened`: after a first alarm, half as much is served; `off`: nothing is reused approximately, after a
            second alarm, a failed calibration, or none; `other weights`: the calibration was made with other weights.
        n_requests: Requests counted, hits or misses; bypassed requests are not.
        n_drawn: Approximate hits drawn to be audited.
        n_recomputed: Drawn hits whose own answer is known by now. If n_drawn - n_recomputed exceeds n_waiting, the rest
            stays unknown: recomputing failed, or they were purged.
        n_lost: Drawn hits that count as changed for the alarm since they were not audited: recomputing failed, or more
            than a thousand hits drawn later are not audited either (`llmcache.reuse.audit.account`).
        n_waiting: Hits waiting to be audited, plus a waiting renewal. `LLMCache.drain` does them, except hits that wait
            until the weights that served them are back.
        n_changed: Audited hits whose answer differed from the model's own.
        rate: Estimated share of changed answers, of all requests; None before the first request.
        lower: Lower limit of the mean rate so far, valid at all times with probability 1 - `delta`.
        upper: Upper limit of the mean rate, valid as `lower`. Drawn hits with an unknown answer count as changed here.
        n_alarms: Times that the rate was found to exceed `allowed`, since wrapping.
        n_quarantined: Sources that serve no other request any more, since an answer they served was wrong.
        recomputing_ms: Time in recomputing hits and in renewals since wrapping, in idle time, in calls and in `drain`.
        needed: Expected number of requests until an alarm if the rate were twice `allowed` from now on
            (derived in `llmcache.reuse.audit.alarm.Alarm.needed`); None without an audit.
        bound: The calibration's upper bound on the share of changed answers; None once it no longer holds.
        allowed: The largest allowed share of changed answers; None without a calibration.
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
    recomputing_ms: float = 0.0
    needed: int | None = None
    bound: float | None = None
    allowed: float | None = None

    @property
    def measure(self) -> str:
        """The audit's result so far, in words: the rate, once its limits show it to be within `allowed` or above."""
        if self.rate is None or (self.allowed is not None and self.lower <= self.allowed < self.upper):
            return f"still measuring: {self.n_changed:,} of {self.n_recomputed:,} changed"
        found = f"{self.rate:.2%} ({self.lower:.2%} to {self.upper:.2%})"
        return f"measured {found}: {self.n_changed:,} of {self.n_recomputed:,} changed"

    def __str__(self) -> str:
        """Return the calibration's bound, then the audit's result."""
        shown = "no bound" if self.bound is None else f"at most {self.bound:.2%} changed"
        allowed = "" if self.allowed is None else f", allowed {self.allowed:.2%}"
        return f"{shown} ({self.status}{allowed}); audit: {self.measure}"


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the cache itself works.

    Attributes:
        is_failing: A tenth of the latest calls or recomputations failed, and the share is not yet below a twentieth.
        failed_calls: Share of the latest calls in which the cache failed (in reading, lookup, drawing or storing) and
            the model computed; 0 to 1, over some 64 calls.
        failed_recomputes: Share of the audit's latest recomputations that failed, 0 to 1, over some 64 of them.
        failures: Number of failures since wrapping, by operation and type of error.
    """

    is_failing: bool = False
    failed_calls: float = 0.0
    failed_recomputes: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return `good`, or `failing` with the shares and the most frequent failures."""
        if not self.is_failing:
            return "good"
        often = ", ".join(f"{what} ({n})" for what, n in Counter(self.failures).most_common(3))
        shares = f"{self.failed_calls:.0%} of calls, {self.failed_recomputes:.0%} of recomputations"
        return f"failing: {shares}; since wrapping: {often}"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What computed the rows without a hit, if it is not the model alone; see `engine` and `LLMCache.compile`.

    Attributes:
        name: `onnxruntime` or `compiled`, with its version or options; `eager` if no graph could be made.
        n_graphs: Graphs in use: 1 of ONNX Runtime, or one per bucket; 0 after they failed or were dropped.
        n_requests: Rows computed by a graph.
        eager: Rows computed without a graph while there were graphs, by reason; calls that bypass the cache are not
            counted. `kv_cache`: the caller keeps K/V. `shape`: no bucket holds the rows, or too much of it would be
            padding. `arguments`: the call has arguments besides tokens, a 2-D mask and token types. `padding`: a row is
            not padded on the right (compiled graphs), or has no valid token. `weights`: they are not those of the
            graph. `torch_settings`: autocast is on, or, for compiled graphs, torch's number of threads, default dtype,
            matmul precision or determinism changed. `thread`: graphs with CUDA graphs run only in the thread that
            compiled them. `failed`: a graph raised, and is not used again.
        n_failed: Graphs that could not be made, or failed in service.
        n_dropped: 1 after all compiled graphs were dropped because the model was edited other than in place; else 0.
    """

    name: str
    n_graphs: int
    n_requests: int = 0
    eager: dict[str, int] = field(default_factory=dict)
    n_failed: int = 0
    n_dropped: int = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """A cache's use of the store behind its memory, and the store's contents.

    Attributes:
        n_asked: Values requested from the store: entries and blocks that were not in memory.
        n_found: Requested values that the store had.
        n_mismatched: Values found but not used, by cause: `damaged`, `other_format` or `other_key`
            (`llmcache.memory.stores.seal.MismatchError`).
        n_written: Values written.
        n_dropped: Values not written, since too many waited or the store failed.
        read_ms: Total time in reading and checking values.
        least_tokens: Least number of tokens for which a value is read, not computed; measured in service, or set.
        is_answering: False after repeated failures, until the store answers a ping.
        n_values: Values in the store, of all caches; None if the store cannot report now.
        nbytes: Bytes of these values.
        max_bytes: The store's budget; None without one.
        n_evicted: Values that the store evicted since this cache opened it.
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


_FIRST = ("n_requests", "hit_rate", "hits", "saved_s", "token_hit_rate", "n_saved_tokens", "audit")
#: By layer, or of use with `tau` alone.
_LAST = frozenset(
    {"hits_by_layer", "reuses_by_layer", "n_layers_skipped", "n_entries", "n_evicted", "n_expelled", "nbytes_by_layer"}
    | {"max_nbytes_by_layer", "reconstruction_error", "reconstruction_distance"}
)


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot. A request is one row; a hit is a request whose output came wholly or partly from the cache.

    Attributes:
        n_requests: Rows, bypassed ones included; decode steps are parts of a request and not counted here.
        hits: Hits by rung.
        hits_by_layer: Hits by the deepest layer reused, without prefix hits, which skip no layer.
        reuses_by_layer: Reuses by layer. With `tau` a hit counts at each layer whose output was taken from the
            cache, else once, at the deepest.
        n_misses: Rows computed in full and eligible to be stored.
        n_revalidated: Rows with an approximate hit that were computed to check the entry (policy `divergence`): neither
            hits nor misses, and not stored.
        bypassed: Rows computed as without a cache, by reason (`llmcache.request.bypass.CURES`), without decode steps.
        n_decode_steps: Rows of calls that extend K/V the caller holds, as `generate()` makes one for each further
            token. They are always computed, and counted only here.
        n_prompt_tokens: Tokens asked of a decoder: of all requests, without padding and bypassed requests.
        n_computed_tokens: Of these, the tokens that the layers ran on. `n_saved_tokens` are the others.
        n_prefix_tokens: Of the saved tokens, those of prefix hits: from stored prefixes, or computed for an earlier row
            of the same call.
        n_blocks: Blocks held, without tails.
        n_blocks_evicted: Blocks and tails evicted.
        prefix_nbytes: Bytes of the blocks and tails held.
        prefix_max_nbytes: Their present budget: what the bank leaves of `max_bytes`. 0 if the model has no blocks.
        n_layers_skipped: Layer executions saved, summed over rows.
        n_entries: Entries by layer.
        n_evicted: Entries evicted for others, by layer.
        n_expelled: Entries that their policy removed whatever the budget, by layer: by `ttl`, for their age; by
            `divergence`, since checks exceeded the limit.
        n_stored: Requests stored whole, in entries or blocks.
        nbytes: Bytes of the entries held, all layers.
        nbytes_by_layer: The same by layer.
        max_nbytes_by_layer: Budgets of the banks, by layer.
        index_nbytes: Bytes of the fingerprints in the indexes, spare room included.
        reconstruction_error: Loss by compression, by layer: sum of |x - x'|^2 over sum of |x - mean|^2, for rows x of
            every 16th entry packed (x': unpacked), under the weights that stored last. Entries that a codec is fitted
            on are left out, but not the same requests if they are stored again later. 0 is lossless, 1 no better than
            the mean of all rows. None before the first measurement, and for a lossless codec.
        reconstruction_distance: Mean of 1 - cosine(x, x') over the same rows, 0 to 2, or None.
        lookup_ms: Total time in fingerprint, search and decision.
        computing_ms: Time in the trunk, for rows computed wholly or in part. On an accelerator: in launching kernels.
        storing_ms: Total time in copying states, checks, storing misses and fitting codecs.
        n_too_large: Requests not stored since a state is larger than its bank, or not stored whole since their blocks
            do not fit `max_bytes`.
        errors: Failures of the cache after which the model computed instead.
        health: Whether the cache itself works, and what failed (`llmcache.stats.Health`).
        audit: The audit of calibrated reuse in service; None without a calibrator.
        engine: Counts of the engine's graphs; None if no engine but the model was asked for.
        store: Counts of the store behind memory; None without one.
    """

    n_requests: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    hits_by_layer: dict[int, int] = field(default_factory=dict)
    reuses_by_layer: dict[int, int] = field(default_factory=dict)
    n_misses: int = 0
    n_revalidated: int = 0
    bypassed: dict[str, int] = field(default_factory=dict)
    n_decode_steps: int = 0
    n_prompt_tokens: int = 0
    n_computed_tokens: int = 0
    n_prefix_tokens: int = 0
    n_blocks: int = 0
    n_blocks_evicted: int = 0
    prefix_nbytes: int = 0
    prefix_max_nbytes: int = 0
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
    engine: EngineStats | None = None
    store: TierStats | None = None

    @property
    def n_hits(self) -> int:
        """Number of hits of all rungs."""
        return sum(self.hits.values())

    @property
    def hit_rate(self) -> float:
        """Hits over all requests, 0 to 1; 0 before the first request."""
        return self.n_hits / self.n_requests if self.n_requests else 0.0

    @property
    def n_saved_tokens(self) -> int:
        """Tokens of prompts that no layer ran on, of prefix hits and exact hits."""
        return self.n_prompt_tokens - self.n_computed_tokens

    @property
    def token_hit_rate(self) -> float:
        """Saved tokens over all tokens of prompts, 0 to 1; 0 before the first prompt."""
        return self.n_saved_tokens / self.n_prompt_tokens if self.n_prompt_tokens else 0.0

    @property
    def held_nbytes(self) -> int:
        """Bytes of all states, fingerprints and prefix blocks held."""
        return self.nbytes + self.index_nbytes + self.prefix_nbytes

    @property
    def n_evicted_total(self) -> int:
        """Number of entries and blocks evicted."""
        return sum(self.n_evicted.values()) + self.n_blocks_evicted

    @property
    def saved_s(self) -> float | None:
        """Estimate of the seconds saved: rows served whole, times the mean time of other rows, less the cache's own.

        Negative where looking up and storing took longer. None until a row was computed, and for a decoder that served
        no row whole: prefix hits, which save a part of a row, are left out.
        """
        n_prefix = self.hits.get("prefix", 0)
        n_whole, n_computed = self.n_hits - n_prefix, self.n_misses + n_prefix
        if not (n_computed and self.computing_ms) or (self.n_prompt_tokens and not n_whole):
            return None
        return (n_whole * self.computing_ms / n_computed - self.lookup_ms - self.storing_ms) / 1e3

    def __str__(self) -> str:
        """Return one figure per line, without those that are 0, empty or None: rates first, figures by layer last."""
        data = {name: getattr(self, name) for name in (*_FIRST, *(one.name for one in fields(self)))} | self._rates()
        ordered = sorted(data.items(), key=lambda item: item[0] in _LAST)
        shown = ((name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in ordered if value)
        return "\n".join(f"{name}: {value}" for name, value in shown)

    def _repr_html_(self) -> str:
        """Return a table of requests by what served them, with bars, for notebooks."""
        bypassed = {f"bypassed: {why}": n for why, n in self.bypassed.items()}
        served = {**self.hits, "computed": self.n_misses, **bypassed}
        shares = [(html.escape(name), n, n / max(1, self.n_requests)) for name, n in served.items()]
        bar = '<div style="background:#4c78a8;height:1em;width:{:.0f}px"></div>'
        rows = "".join(
            f"<tr><td>{name}</td><td>{n:,}</td><td>{share:.1%}</td><td>{bar.format(200 * share)}</td></tr>"
            for name, n, share in shares
        )
        tokens = f", {self.token_hit_rate:.1%} of {self.n_prompt_tokens:,} tokens saved" if self.n_prompt_tokens else ""
        audit = "" if self.audit is None else f"<br>{html.escape(str(self.audit))}"
        saved = f", {self.saved_s:z,.1f} s saved" if self.saved_s else ""
        figures = (
            f"{self.n_requests:,} requests, {self.hit_rate:.1%} hits{saved}{tokens}, {self.held_nbytes / 1e6:,.1f} MB"
        )
        return (
            f"<p>{figures}{audit}</p>"
            f"<table><tr><th>served by</th><th>requests</th><th>share</th><th></th></tr>{rows}</table>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, `n_hits`, `n_saved_tokens`, `saved_s` and the rates included."""
        counts = {name: getattr(self, name) for name in ("n_hits", "n_saved_tokens", "saved_s")}
        return {**asdict(self), **counts, **self._rates()}

    def _rates(self) -> dict[str, float]:
        return {"hit_rate": self.hit_rate, "token_hit_rate": self.token_hit_rate}
