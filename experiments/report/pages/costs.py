"""Tables of the cost of calls: the demo, one call of each kind, and cases without benefit."""

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

from experiments.report import calls as of_calls
from experiments.report.calls import TIMES
from experiments.report.markdown import Cell, columns, number, of, percent, row_of, speed, table
from experiments.report.pages.files import MISSING, figures_of, is_timed, runs_if_any, runs_of
from experiments.runs.read import Figures


def demo(results_dir: Path) -> str:
    rows = figures_of(results_dir, "demo")["settings"]
    if is_timed(results_dir, "demo"):
        return columns(DEMO, rows)
    return table(tuple(DEMO), [[*row_of(DEMO, row)[:4], *[""] * 5] for row in rows])


DEMO: Mapping[str, Cell] = {
    "setting": itemgetter("name"),
    "hit rate": lambda row: percent(row.get("hit_rate")),
    "changed answers": lambda row: percent(row.get("changed_answers"), 2),
    "upper bound": lambda row: percent(row.get("bound"), 2),
    "p50, ms": lambda row: number(row["latency_ms"]["median"], 2),
    "p99, ms": lambda row: number(row["latency_ms"]["p99"], 2),
    "speed-up": speed,
    "speed-up, whole stream": lambda row: number(row.get("whole", {}).get("speedup"), 2),
    "learning paid back at request": lambda row: number(row.get("paid_back_at"), 0),
}


def first_hit(results_dir: Path) -> str:
    """Return the table of the commands from `git clone` to the first hit."""
    (found,) = runs_of(results_dir, "first_hit")
    return columns({"command": itemgetter("command"), "s": of(number, "seconds", 0)}, found.metrics["summary"])


def latency(results_dir: Path) -> str:
    """Return the table of one call of each kind, measured in both ways, and with the paper's search and storage."""
    own, timed = figures_of(results_dir, "bench_latency"), is_timed(results_dir, "bench_latency")
    paper = next(
        row
        for run in runs_of(results_dir, "table1_latency")
        for row in run.metrics["calls"]
        if (row["model"], row["kept"]) == ("bert-base", "as the paper")
    )
    short = [row for run in runs_if_any(results_dir, "latency_short") if run.is_timed for row in run.metrics["calls"]]
    rows = [
        *_both_ways("bert-base, 128 tokens", own if timed else {}, _entries(own)),
        *(line for row in short or [None] for line in _short(row)),
        ("bert-base, as the paper searches and stores", INTERLEAVED, *_medians(paper["detail"]), _entries(paper)),
    ]
    times = ("no cache", "miss", "near hit", "repeat", "floor: no layers")
    return table(("one call, ms", "measured", *times, "hit / floor", "entries"), rows)


INTERLEAVED, BLOCKS = "interleaved", "service rounds"


def _short(row: Figures | None) -> list[tuple[str, ...]]:
    """Return the rows of a short request on a small model, marked if not measured."""
    name = "[minilm, 12 tokens](configs/latency_short.yaml)"
    return _both_ways(name, {}, "") if row is None else _both_ways(name, row["detail"], _entries(row))


def _both_ways(name: str, times: Figures, entries: str) -> list[tuple[str, ...]]:
    """Return the rows for interleaved calls and service rounds, marked if not measured."""
    ways = {INTERLEAVED: times, BLOCKS: times.get("service")}
    return [(name, way, *(_medians(one) if one else (MISSING, *[""] * 5)), entries) for way, one in ways.items()]


def _medians(times: Figures) -> tuple[str, ...]:
    """Return the median times by kind of call, and the ratio of a hit to the floor."""
    hit, floor = (times[f"{kind}_ms"]["median"] for kind in ("hit", "floor"))
    return *(_ms(times[name]["median"]) for name in TIMES), number(hit / floor)


def _ms(value: float) -> str:
    return number(value, 1 if value >= 10 else 2)


def _entries(figures: Figures) -> str:
    nbytes = figures["entry_bytes"] if "entry_bytes" in figures else 1e3 * figures["entry_kb"]
    return f"{figures['entries']:,} of {nbytes / 1e3:,.0f} kB"


def compiled(results_dir: Path) -> str:
    """Return the table of one call with and without a compiler and a cache. Runs on a busy machine are left out."""
    runs = [run for run in runs_of(results_dir, "compiled") if run.is_timed]
    return next(of_calls.compiled(runs))


def costs(results_dir: Path) -> str:
    return table(
        ("what", "requests", "hit rate", "changed answers", "a miss costs more", "speed-up"),
        [*_misses(results_dir), *_streams(results_dir)],
    )


def _misses(results_dir: Path) -> list[tuple[str, ...]]:
    calls = [row for run in runs_of(results_dir, "table1_latency") for row in run.metrics["calls"]]
    return [
        (
            f"[one request of 128 tokens, {row['model']}](configs/table1_latency.yaml)",
            f"{row['detail']['nocache_ms']['n']} calls",
            "",
            "",
            percent(row["miss_ratio"] - 1),
            "",
        )
        for row in calls
        if row["kept"] == "pooled"
    ]


def _streams(results_dir: Path) -> list[tuple[str, ...]]:
    return [
        (
            f"[banking77, {label.rpartition('-')[2].replace('=', ' ')}](configs/banking77.yaml)",
            f"{run.metrics['n']:,} x {run.metrics['rounds']}",
            percent(figures["hit_rate"]),
            percent(figures["changed_answers"], 2),
            percent(figures["miss_overhead"]),
            speed(figures),
        )
        for run in runs_of(results_dir, "banking77")
        for label, figures in run.metrics["methods"].items()
        if figures["method"] == "llmcache"
    ]
