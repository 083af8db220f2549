"""Tables of calls: the demo, one call of each kind, prompts, cases without benefit; and hostile requests."""

from collections.abc import Iterator
from pathlib import Path

from experiments.report import columns as show
from experiments.report.markdown import MISSING, columns, missing, number, percent, speed, table
from experiments.report.pages.files import figures_of, is_timed, runs_if_any, runs_of
from experiments.report.tables import figure, rows_of
from experiments.runs.read import Figures, Run
from experiments.runs.runner import METRICS

TIMES = tuple(f"{kind}_ms" for kind in ("nocache", "miss", "hit", "exact_hit", "floor"))
INTERLEAVED, BLOCKS = "interleaved", "service rounds"


def demo(results_dir: Path) -> str:
    found = figures_of(results_dir, "demo")
    if is_timed(results_dir, "demo"):
        return columns(show.ADVICE, found["ways"])
    return missing(tuple(show.ADVICE), "demo")


def latency(results_dir: Path) -> str:
    """Return the table of one call of each kind, measured in both ways, and with the paper's search and storage."""
    own, timed = figures_of(results_dir, "bench_latency"), is_timed(results_dir, "bench_latency")
    paper = next(
        row
        for row in rows_of(runs_of(results_dir, "table1_latency"), figure("calls"))
        if (row["model"], row["kept"]) == ("bert-base", "as the paper")
    )
    short = [run for run in runs_if_any(results_dir, "latency_short") if run.is_timed]
    rows = [
        *_both_ways("bert-base, 128 tokens", own if timed else {}, _entries(own)),
        *(line for row in rows_of(short, figure("calls")) or [None] for line in _short(row)),
        ("bert-base, as the paper searches and stores", INTERLEAVED, *_medians(paper["detail"]), _entries(paper)),
    ]
    times = ("no cache", "miss", "near hit", "repeat", "floor: no layers")
    return table(("one call, ms", "measured", *times, "hit / floor", "entries"), rows)


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
    medians = {name: times[name]["median"] for name in TIMES}
    ratio = number(medians["hit_ms"] / medians["floor_ms"])
    return *(number(ms, 1 if ms >= 10 else 2) for ms in medians.values()), ratio


def _entries(figures: Figures) -> str:
    nbytes = figures["entry_bytes"] if "entry_bytes" in figures else 1e3 * figures["entry_kb"]
    return f"{figures['entries']:,} of {nbytes / 1e3:,.0f} kB"


def costs(results_dir: Path) -> str:
    """Return the table of misses: single calls, and a stream with few hits."""
    calls = [
        (
            f"[one request of 128 tokens, {row['model']}](configs/table1_latency.yaml)",
            f"{row['detail']['nocache_ms']['n']} calls",
            "",
            "",
            percent(row["miss_ratio"] - 1),
            "",
        )
        for row in rows_of(runs_of(results_dir, "table1_latency"), figure("calls"))
        if row["kept"] == "pooled"
    ]
    streams = [
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
    heads = ("what", "requests", "hit rate", "changed answers", "a miss costs more", "speed-up")
    return table(heads, [*calls, *streams])


def hostile(results_dir: Path) -> str:
    if not (results_dir / "hostile" / METRICS).is_file():
        return missing(tuple(show.HOSTILE), "make test-hostile")
    return columns(show.HOSTILE, figures_of(results_dir, "hostile")["lists"])


Row = tuple[str, ...]


def first_token(results_dir: Path) -> str:
    """Return the table of TTFT speed-ups, with the ceiling of the same prompts."""
    return table(
        ("prompts", "tokens known", "times as fast (slowest, fastest round)", "were known tokens free", "same token"),
        [*_mooncake(results_dir), *_chats(results_dir), *_others(results_dir)],
    )


def _mooncake(results_dir: Path) -> Iterator[Row]:
    for run in runs_of(results_dir, "prefix_mooncake"):
        blocks = run.config["task"]["stream"]["blocks"]
        yield (
            f"{run.metrics['n']} requests of [Mooncake's trace](configs/prefix_mooncake.yaml): conversations drawn, "
            f"the first {blocks} blocks of a prompt kept, 16 tokens a block of 512",
            *_all_prompts(run, "llmcache"),
        )


def _all_prompts(run: Run, label: str) -> Row:
    row = run.metrics["methods"][label]
    known = max(run.metrics["facts"]["share_known"], row["share_reused"])  # the first counts whole blocks only
    same = f"{row['n_same']:,} of {run.metrics['n']:,}"
    return (percent(known), speed(row), number(1 / (1 - known), 2), same)


def _chats(results_dir: Path) -> Iterator[Row]:
    for run in runs_of(results_dir, "prefix_chat"):
        stream, known = run.config["task"]["stream"], run.metrics["methods"]["llmcache"]
        what = f"conversations that [grow](configs/prefix_chat.yaml), {stream['turns']} turns"
        if run.task == "chat_window":
            share = f"{100 * stream['shared']:.0f} %"
            what = f"[{stream['length']} tokens](configs/prefix_chat.yaml), {share} of them those of the turn before"
        yield f"{what}; all turns", *_all_prompts(run, "llmcache")
        spread = known["known"]
        yield (
            "the same without first turns, which know nothing",
            percent(known["known_share"]),
            f"{spread['median']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})",
            number(known["known_ceiling"], 2),
            "",
        )


def _others(results_dir: Path) -> Iterator[Row]:
    for run in runs_of(results_dir, "prefix_system_prompt"):
        n, system = run.metrics["n"], run.config["task"]["stream"]["system"]
        what = f"{n} users after one [system prompt](configs/prefix_system_prompt.yaml) of {system} tokens"
        yield what, *_all_prompts(run, "llmcache")
    for run in runs_of(results_dir, "prefix_nothing_shared"):
        length = run.config["task"]["stream"]["length"]
        for label, told in (("llmcache", "as by default"), ("prefixes alone", "`exact=False`")):
            what = f"{length} tokens, [none of them known](configs/prefix_nothing_shared.yaml), {told}"
            yield what, *_all_prompts(run, label)
