"""Latency of each kind of call, in one process, measured in two ways.

Kinds: `nocache` (an untouched copy of the model), `miss` (banks full, so it also evicts), `hit` (an input that is not
stored, served by a stored one, search and decision included), `exact_hit` (a stored input), `floor` (the same model
with zero layers), and for batches `mixed` (half the rows are hits).

They are timed in interleaved rounds, and in service rounds of whole blocks of one kind; see `measures.harness`.

After each call, outside the timer, its kind is checked: a hit runs no layer; with `tau`, every layer searches its bank.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.measures.harness import blocks, figures_of_blocks, figures_of_rounds, interleaved
from experiments.models.architectures import Pair, Requests, Shortcut, build, check, check_target, find_layers
from experiments.support.clock import Clock, Spent
from experiments.support.progress import tracked
from llmcache import ConfigError, LLMCache
from llmcache.lab import locate

MOST_DRAWS = 10
FILL_ROWS = 64  # rows stored per call while the banks are filled
CALLS_HELD = 4  # a bank holds the rows of this many calls, so that a miss does not evict the target of the next hit

#: Where banks keep entries, and the cache's setting `device` for it on a GPU.
BANKS = {"host": "cpu", "device": "model"}

Draw = Callable[[], tuple[Any, Tensor, dict[str, int]]]


@dataclass(frozen=True, slots=True)
class Settings:
    model: str = "bert-base"  # architecture or folder
    batch_size: int = 1
    seq_len: int = 128  # tokens per row
    entries: int = 10_000  # entries in each bank before measuring; at least `CALLS_HELD` for each row of a call
    payload: str = "cls"  # what entries keep
    layers: str = "last"  # `last` (one search per call) or `all` (one search per layer)
    index: str = "auto"
    head: str = "class"  # `class` (a classifier) or `token` (a causal language model with logits at every token)
    tau: float = 0.98  # threshold that separates random requests (misses) from requests with one token changed (hits)
    device: str = "cpu"
    banks: str = "host"  # where banks keep entries: `host` or `device`; the same on a CPU
    dtype: str = "float32"
    rounds: int = 200  # interleaved calls of each kind; p90 and p99 need 200 or more
    seed: int = 0
    service_rounds: int = 2  # 0: none
    block: int = 200  # calls of each kind in a service round


def measure(settings: Settings) -> dict[str, Any]:
    """Run the benchmark; return what `llmcache bench latency` prints."""
    _check(settings)
    pair = build(settings.model, settings.seed, settings.device, settings.head, settings.dtype)
    bench = Bench(settings, pair)
    bench.fill()
    with torch.inference_mode():
        is_equal = bench.is_exact_hit_equal()
        spent = bench.run()
        numbers = tracked(range(settings.service_rounds), "service rounds")
        service = blocks(bench.block, bench.fresh, numbers, settings.block)
    stats = bench.cache.stats()
    return {
        **figures_of_rounds(spent, "nocache", bench.clock),
        "service": figures_of_blocks(service),
        **asdict(settings),
        "clock": bench.clock.name,
        "weights": pair.weights,
        "model_bytes": sum(parameter.nbytes for parameter in pair.model.parameters()),
        "exact_hit_is_equal": is_equal,
        "n_overlooked": bench.n_overlooked,
        "threads": torch.get_num_threads(),
        "entry_bytes": (stats.nbytes + stats.index_nbytes) // settings.entries,
    }


def _check(settings: Settings) -> None:
    """Raise `ConfigError` for settings that can be refused without loading weights."""
    check_target(settings.device, settings.dtype)
    if settings.entries < (needed := CALLS_HELD * settings.batch_size):
        raise ConfigError(f"entries: give at least {needed}, the rows of {CALLS_HELD} calls (got {settings.entries})")
    if settings.banks not in BANKS:
        raise ConfigError(f"banks: give {' or '.join(BANKS)} (got {settings.banks!r})")
    if settings.layers not in ("last", "all"):
        raise ConfigError(f"layers: give last or all (got {settings.layers!r})")
    check(settings.model, settings.seq_len, settings.head)


class Bench:
    """A filled cache on one model, an untouched copy of the model, and a copy without layers."""

    def __init__(self, settings: Settings, pair: Pair) -> None:
        self._settings = settings
        self.clock = Clock(settings.device)
        self._plain = copy.deepcopy(pair.model)
        self._model = pair.model
        self._floor = pair.floor
        self._trunk = locate(pair.model).module
        layers = find_layers(pair.model)
        self._depth = len(layers)
        self._shortcut = Shortcut()
        self._shortcut.install(layers)
        self._requests = Requests(
            pair.model.config, settings.batch_size, settings.seq_len, settings.seed, settings.device
        )
        self.n_overlooked = 0
        self._known: list[Tensor] = []  # stored rows (1, T), oldest first
        self.cache = LLMCache.wrap(
            pair.model,
            tau=settings.tau,
            payload=settings.payload,
            layers=settings.layers,
            index=settings.index,
            device=BANKS[settings.banks],
            max_entries=settings.entries,
            max_bytes=2**40,
            allow_unsafe=settings.head == "token",  # only time is measured here
        )

    def fill(self) -> None:
        total = self._settings.entries
        for done in tracked(range(0, total, FILL_ROWS), "filling"):
            ids = self._requests.fresh(min(FILL_ROWS, total - done))
            self._store(ids)
            self._known += ids.unsqueeze(1)
        for _ in range(MOST_DRAWS):  # a chance hit is not stored
            if (missing := total - self.cache.stats().n_stored) == 0:
                return
            self._store(self._requests.fresh(missing))
        stats = self.cache.stats()
        raise RuntimeError(f"{stats.n_stored} of {total} entries were stored, with {stats.errors} errors (see the log)")

    def _store(self, ids: Tensor) -> None:
        """Store requests (B, T) without running the layers or the head (logits at every token are large)."""
        with self._shortcut.opened(), torch.inference_mode():
            self._trunk(**self._requests.inputs(ids))

    def is_exact_hit_equal(self) -> bool:
        """Whether a call's output is bit-identical when computed and stored, and when served."""
        rows = self._settings.batch_size
        _, computed, _ = self._measure("miss", self._kinds()["miss"])
        ids = torch.cat(self._known[-rows:])
        _, served, _ = self._measure("exact_hit", lambda: (self._model, ids, {"paper": rows}))
        return torch.equal(computed, served)

    def run(self) -> dict[str, list[Spent]]:
        kinds, warm_up = self._kinds(), max(3, self._settings.rounds // 50)
        numbers = tracked(range(self._settings.rounds + warm_up), "measuring")
        times = interleaved(list(kinds), numbers, lambda kind, _: self._measure(kind, kinds[kind])[0])
        return {kind: some[warm_up:] for kind, some in times.items()}

    def fresh(self) -> Tensor:
        return self._requests.fresh()

    def block(self, kind: str, fresh: Sequence[Tensor]) -> list[float]:
        """Return the times in ms of consecutive calls of one kind: the calls in `fresh`, or as many hits."""
        draw = self._kinds()[kind]
        model, _, expected = draw()
        # Each hit is tried once beforehand: near requests that do not hit are redrawn here, so none is computed in the
        # block.
        asked = [self._measure(kind, draw)[2] for _ in fresh] if expected else fresh
        before, times, rungs = self.cache.stats(), [], Counter[str]()
        for inputs in map(self._requests.inputs, asked):
            spent, _ = self.clock.time(partial(model, **inputs))
            hits = Counter(outcome.rung for outcome in self.cache.last if outcome.rung) if model is self._model else {}
            rungs.update(hits)
            if hits == expected:
                times.append(spent.ms)
        self._check_block(kind, len(asked) - len(times), len(asked), rungs.total(), before.n_layers_skipped)
        if kind == "miss":
            self._known = [*self._known, *torch.cat(list(asked)).unsqueeze(1)][-self._settings.entries :]
        return times

    def _check_block(self, kind: str, n_other: int, n: int, n_hits: int, n_skipped: int) -> None:
        """Raise if over a tenth of a block's calls were of another kind, or if a hit ran layers."""
        self.n_overlooked += n_other
        if n_other > n // 10:
            raise RuntimeError(f"{n_other} of {n} calls in a block were not the {kind} that they are counted as")
        if n_run := n_hits * self._depth - (self.cache.stats().n_layers_skipped - n_skipped):
            raise RuntimeError(f"hits in a block of {kind} calls ran {n_run} layers")

    def _kinds(self) -> dict[str, Draw]:
        """Return by kind a function that draws the model to call, its ids, and the hits it must count."""
        rows = self._settings.batch_size
        kinds: dict[str, Draw] = {
            "nocache": lambda: (self._plain, self._requests.fresh(), {}),
            "miss": lambda: (self._model, self._requests.fresh(), {}),
            "hit": lambda: (self._model, self._requests.near(self._stored(rows)), {"paper": rows}),
            "exact_hit": lambda: (self._model, self._stored(rows), {"paper": rows}),
            "floor": lambda: (self._floor, self._requests.fresh(), {}),
        }
        if rows > 1:
            half = rows // 2
            kinds["mixed"] = lambda: (
                self._model,
                torch.cat([self._requests.near(self._stored(half)), self._requests.fresh(rows - half)]),
                {"paper": half},
            )
        return kinds

    def _stored(self, n_rows: int) -> Tensor:
        """Return ids (n_rows, T) of stored requests, from the newer half, which eviction has not reached."""
        newer = len(self._known) // 2
        picked = torch.randint(newer, len(self._known), (n_rows,)).tolist()
        return torch.cat([self._known[i] for i in picked])

    def _measure(self, kind: str, draw: Draw) -> tuple[Spent, Tensor, Tensor]:
        """Return time, logits and ids of one call of a kind. Redraws if the neighbour was not found or was too far."""
        for _ in range(MOST_DRAWS):
            model, ids, expected = draw()
            spent, logits, hits = self._call(kind, model, ids)
            if hits == expected:
                return spent, logits, ids
            self.n_overlooked += 1
        raise RuntimeError(f"a {kind} call counted hits {hits}, expected {expected}, {MOST_DRAWS} times in a row")

    def _call(self, kind: str, model: Any, ids: Tensor) -> tuple[Spent, Tensor, dict[str, int]]:
        """Return the time of one call from arguments to output, its logits, and the hits it counted."""
        # Layers that ran for a row that hit are counted as "layers run": with one search per layer, some layers may hit
        # and others miss.
        inputs = self._requests.inputs(ids)
        before = self.cache.stats()
        spent, output = self.clock.time(partial(model, **inputs))
        after = self.cache.stats()
        if kind in ("miss", "mixed"):
            stored = after.n_misses - before.n_misses
            self._known = [*self._known[stored:], *ids[len(ids) - stored :].unsqueeze(1)]
        hits = Counter(after.hits) - Counter(before.hits)
        n_skipped = after.n_layers_skipped - before.n_layers_skipped
        if n_run := hits.total() * self._depth - n_skipped:
            hits["layers run"] = n_run
        return spent, output.logits, dict(hits)
