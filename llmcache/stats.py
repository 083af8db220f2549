"""What the cache did: counters, with the unit in the name."""

import logging
import threading
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from llmcache.execution.cost import Cost
from llmcache.health import Health, Share, is_told
from llmcache.request.bypass import CURES

logger = logging.getLogger("llmcache")

# Decode steps are what generation is made of, and comparisons what costs are known by: nothing for the user to cure.
_WANTED = ("decode", "disabled", "compared")

Status = Literal[
    "learning", "certified", "unwatched", "drifted", "failing", "growing", "tightened", "off", "other weights"
]


@dataclass(frozen=True, slots=True)
class AuditStats:
    """What is known of calibrated reuse in service. Counts begin anew with each calibration and after each alarm.

    Attributes:
        status: `learning` from the first requests; `certified`: the bound holds, as far as is known, and the audit
            looks into hits; `unwatched`: it was shown, but with `audit=0` nobody looks, or an early save does not tell
            what requests are to be compared with; `drifted`: it is void, requests being unlike those that it was made
            with, and nothing is reused approximately; `failing`: nor is anything meanwhile, as the cache itself fails
            (`Stats.health`); `growing`: sources grow, and there is no bound; `tightened`: after a first alarm, half is
            served; `off`: nothing is, after a second alarm, a calibration that failed, or none; `other weights`: the
            model was calibrated with others.
        n_requests: Requests counted, hits or not; bypassed ones are not.
        n_drawn: Approximate hits to be looked into.
        n_looked: Those whose own answer is known by now. Where n_drawn - n_looked exceeds n_waiting, the rest cannot be
            known: computing failed, or they were purged.
        n_lost: Those that count as changed to the alarm since they were not looked into: computing them failed, or
            more than a thousand others have been drawn and not looked into since (`llmcache.audit.account`).
        n_waiting: Hits that wait to be looked into, and a renewal if one does: `LLMCache.drain` does them, but for hits
            that wait until the weights that served them are back.
        n_changed: Of those looked into, how many answers were not the model's own.
        rate: Estimated share of changed answers, of all requests; None before the first.
        lower: The mean rate so far is at least this, at all times but for a chance of `delta`.
        upper: It is at most this, likewise. What was drawn and is not known counts as changed here.
        n_alarms: Times that the rate was found to exceed what is allowed, since wrapping.
        n_struck: Stored requests that serve no others any more, since an answer of theirs was another request's.
        needed: Requests after which an alarm can be expected if the rate were twice what is allowed from now on
            (`llmcache.audit.alarm.Alarm.needed` derives it); None where nothing is looked into.
    """

    status: Status
    n_requests: int = 0
    n_drawn: int = 0
    n_looked: int = 0
    n_lost: int = 0
    n_waiting: int = 0
    n_changed: int = 0
    rate: float | None = None
    lower: float = 0.0
    upper: float = 1.0
    n_alarms: int = 0
    n_struck: int = 0
    needed: int | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot. A request is one row; a hit is a request whose output came wholly or partly from the store.

    Attributes:
        n_requests: Rows seen, bypassed ones included; decode steps are parts of a request and not counted here.
        hits: Hits by rung.
        hits_by_layer: Hits by the deepest layer reused; those of prefixes, which skip none, are not among them.
        reuses_by_layer: Reuses by layer. In `paper` mode a hit counts at each layer whose output was taken from the
            store, else once, at the deepest.
        n_misses: Rows computed in full and eligible to be stored.
        n_revalidated: Rows that could have been reused approximately, and were computed to check the entry (policy
            `divergence`): neither hits nor misses, and not stored.
        bypassed: Rows computed as if there were no cache, by reason (`llmcache.request.bypass.CURES`); decode steps here.
        n_prefix_tokens: Tokens that stored prefixes served, which no layer was run for.
        n_prompt_tokens: Tokens of all requests that the prefix rung was asked about.
        n_blocks: Blocks of tokens that it holds.
        n_blocks_evicted: Blocks that left for others.
        prefix_nbytes: Bytes of the blocks held.
        n_layers_skipped: Layer executions saved, summed over rows.
        n_entries: Entries by layer.
        n_evicted: Entries that left for others, by layer.
        n_expelled: Entries that their policy sent away whatever the budget, by layer: `ttl`, which were too old;
            `divergence`, whose checks exceeded the limit.
        n_stored: Requests known.
        nbytes: Bytes of the entries held, all layers.
        index_nbytes: Bytes of the fingerprints that they are found by, room for more included.
        reconstruction_error: What compression loses, by layer: sum of |x - x'|^2 over sum of |x - mean|^2, rows x of
            every 16th entry packed (x' is what comes back), of the weights that stored last. Entries that a codec is
            fitted on are left out, but not the same requests if they are stored again later. 0 is lossless, 1 no better
            than the mean of all rows. None before anything was measured; a lossless codec is not.
        reconstruction_distance: Mean of 1 - cosine(x, x') over the same rows, 0 to 2, or None.
        lookup_ms: Total time in fingerprint, search and decision.
        storing_ms: Total time in keeping states, checks, storing misses and fitting codecs.
        n_too_large: Requests with a state larger than its bank, which was not stored.
        n_hooked: Rows that neither a prefix nor the short way before the layers was tried for, since hooks of others
            hang within the trunk, which are to see all of them. They may be hits all the same.
        errors: Failures of index, store or audit that were computed around.
        health: Whether the cache itself works, and what failed (`llmcache.health.Health`).
        cost: What calls of each length cost and save, shortest first, and whether they go by the cache.
        audit: What is known of calibrated reuse in service; None without any.
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
    index_nbytes: int = 0
    reconstruction_error: dict[int, float | None] = field(default_factory=dict)
    reconstruction_distance: dict[int, float | None] = field(default_factory=dict)
    lookup_ms: float = 0.0
    storing_ms: float = 0.0
    n_too_large: int = 0
    n_hooked: int = 0
    errors: int = 0
    health: Health = field(default_factory=Health)
    cost: tuple[Cost, ...] = ()
    audit: AuditStats | None = None

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


class Counters:
    """Counts as calls end. Thread-safe."""

    def __init__(self) -> None:
        """All zero."""
        self._lock = threading.Lock()
        self._hits: Counter[str] = Counter()
        self._hits_by_layer: Counter[int] = Counter()
        self._reuses_by_layer: Counter[int] = Counter()
        self._bypassed: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._lookup_s = 0.0
        self._storing_s = 0.0
        self._told: set[str] = set()
        self._failures: Counter[str] = Counter()
        self._calls, self._looks = Share(), Share()
        self._has_failed = False  # something did, since the last call ended
        self._n_turns = 0

    @property
    def is_failing(self) -> bool:
        """Whether so many of the latest calls failed in the cache that it should promise nothing."""
        return self._calls.is_large

    def bypass(self, reason: str, n_rows: int) -> None:
        """Count rows that went by the cache; the first of each reason is logged with its cure."""
        with self._lock:
            self._bypassed[reason] += n_rows
            self._totals["requests"] += 0 if reason == "decode" else n_rows
            is_first = reason not in self._told
            self._told.add(reason)
            has_turned = reason == "error" and self._end_call()
        self._tell_turn(has_turned)
        if is_first:
            level = logging.DEBUG if reason in _WANTED else logging.WARNING
            logger.log(level, "llmcache is bypassed (%s): %s", reason, CURES[reason])

    def error(self, what: str, error: Exception) -> None:
        """Count a failure of the call under way; of each kind the first, the 10th, the 100th and so on are logged."""
        with self._lock:
            self._has_failed = True
        self._count_failure(what, error)

    def look(self, error: Exception | None = None) -> None:
        """Count a look of the audit that succeeded or failed; failures are logged likewise."""
        with self._lock:
            self._looks.add(error is not None)
        if error is not None:
            self._count_failure("look into a hit", error)

    def _count_failure(self, what: str, error: Exception) -> None:
        kind = f"{what}: {type(error).__name__}"
        with self._lock:
            self._totals["errors"] += 1
            self._failures[kind] += 1
            n = self._failures[kind]
        if is_told(n):
            often = "" if n == 1 else f" for the {n:,}th time"
            logger.warning("llmcache failed to %s%s; computing instead", what, often, exc_info=error)

    def _end_call(self) -> bool:
        """Count a call as failed or not; whether that made the cache failing, or no longer so."""
        has_failed, self._has_failed = self._has_failed, False
        has_turned = self._calls.add(has_failed)
        self._n_turns += has_turned and self._calls.is_large
        return has_turned

    def _tell_turn(self, has_turned: bool) -> None:
        """Log that calls fail; of the times that they began to, the first, the 10th and so on."""
        if not has_turned or not is_told(self._n_turns):
            return
        with self._lock:
            health = self._health()
        if self._calls.is_large:
            logger.warning("llmcache: the cache is %s; nothing is reused under a calibration meanwhile", health)
        else:
            logger.warning("llmcache: calls no longer fail in the cache; what was calibrated is reused again")

    def _health(self) -> Health:
        is_failing = self._calls.is_large or self._looks.is_large
        return Health(is_failing, self._calls.value, self._looks.value, dict(self._failures))

    def too_large(self) -> None:
        """Count a request that does not fit; the first is logged."""
        with self._lock:
            self._totals["too_large"] += 1
            is_first = self._totals["too_large"] == 1
        if is_first:
            logger.warning("llmcache: a state is larger than its bank's budget and was not stored; raise max_bytes")

    def hooked(self, n_rows: int) -> None:
        """Count rows that take the whole way for hooks that somebody hung on the model; the first are logged."""
        with self._lock:
            self._totals["hooked"] += n_rows
            is_first = "hooked" not in self._told
            self._told.add("hooked")
        if is_first:
            logger.warning(
                "llmcache: hooks hang on modules of the trunk and are to see all tokens, so nothing is served from a "
                "prefix or before the layers (stats().n_hooked): remove them to have that back"
            )

    def prefix(self, n_hits: int, n_served: int, n_tokens: int) -> None:
        """Count what stored prefixes served.

        Args:
            n_hits: Requests served.
            n_served: Their tokens that were.
            n_tokens: Tokens of all requests that the rung was asked about.
        """
        with self._lock:
            if n_hits:
                self._hits["prefix"] += n_hits
            self._totals["requests"] += n_hits
            self._totals["prefix tokens"] += n_served
            self._totals["prompt tokens"] += n_tokens

    def revalidated(self, n_rows: int) -> None:
        """Count rows that were computed to check an entry."""
        with self._lock:
            self._totals["requests"] += n_rows
            self._totals["revalidated"] += n_rows

    def call(
        self,
        hits: list[tuple[str, int]],
        reused_at: list[int],
        n_misses: int,
        skipped: int,
        seconds: tuple[float, float],
    ) -> None:
        """Count one forward.

        Args:
            hits: Rung and deepest reused layer of each hit.
            reused_at: Layer of every reuse.
            n_misses: Rows computed in full.
            skipped: Layer executions saved.
            seconds: Spent before the layers, and after them.
        """
        with self._lock:
            self._hits.update(rung for rung, _ in hits)
            self._hits_by_layer.update(layer for _, layer in hits)
            self._reuses_by_layer.update(reused_at)
            self._totals["requests"] += len(hits) + n_misses
            self._totals["misses"] += n_misses
            self._totals["skipped"] += skipped
            self._lookup_s += seconds[0]
            self._storing_s += seconds[1]
            has_turned = self._end_call()
        self._tell_turn(has_turned)

    def snapshot(self, n_let_pass: int = 0, **held: Any) -> Stats:
        """The counts, joined with those of the cost model, and with what the library holds now."""
        with self._lock:
            bypassed = self._bypassed + Counter(does_not_pay=n_let_pass)
            return Stats(
                n_requests=self._totals["requests"] + n_let_pass,
                hits=dict(self._hits),
                hits_by_layer=dict(self._hits_by_layer),
                reuses_by_layer=dict(self._reuses_by_layer),
                n_misses=self._totals["misses"],
                n_revalidated=self._totals["revalidated"],
                bypassed=dict(bypassed),
                n_prefix_tokens=self._totals["prefix tokens"],
                n_prompt_tokens=self._totals["prompt tokens"],
                n_layers_skipped=self._totals["skipped"],
                lookup_ms=self._lookup_s * 1e3,
                storing_ms=self._storing_s * 1e3,
                n_too_large=self._totals["too_large"],
                n_hooked=self._totals["hooked"],
                errors=self._totals["errors"],
                health=self._health(),
                **held,
            )
