"""Tables of workers by the hundred: beside real ones, what they were made of, at which number, and where it ends."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from experiments.report.markdown import Cell, columns, count, number, of, percent
from experiments.runs.read import Figures, Run
from experiments.simulation.scaling import REASONS

PICTURE = "workers.png"  # in the folder of a run

POINTS: Mapping[str, Cell] = {
    "stream": itemgetter("stream"),
    "bank": itemgetter("design"),
    "workers": of(count, "workers"),
    "hit rate": of(percent, "hit_rate"),
    "p50, ms": of(number, "p50_ms", 2),
    "p99": of(number, "p99_ms", 2),
    "workers busy": of(percent, "busy"),
    "hearing": of(percent, "hear_share"),
    "Redis busy": of(percent, "redis_busy"),
    "operations / s": of(number, "redis_ops_s", 0),
    "MB / s": of(number, "redis_mb_s"),
    "link busy": of(percent, "link_busy"),
    "too late": of(count, "n_late"),
    "requests": of(count, "n"),
}
CHECKED: Mapping[str, Cell] = {
    "bank": itemgetter("way"),
    "workers": of(count, "workers"),
    "requests": of(count, "n"),
    "hit rate: real": of(percent, "real_hit_rate", 2),
    "simulated": of(percent, "hit_rate", 2),
    "difference, points": of(number, "points", 2),
    "p50, ms: real": of(number, "real_p50_ms", 2),
    "simulated p50": of(number, "p50_ms", 2),
    "mean, ms: real": of(number, "real_mean_ms", 2),
    "simulated mean": of(number, "mean_ms", 2),
    "values from Redis: real": of(count, "real_fetched"),
    "simulated values": of(count, "fetched"),
    "failures: real": of(count, "real_errors"),
    "too late: simulated": of(count, "late"),
}
STOPS: Mapping[str, Cell] = {
    "stream": itemgetter("stream"),
    "bank": itemgetter("design"),
    **{told: itemgetter(name) for name, told in REASONS.items()},
}
TIMES: Mapping[str, Cell] = {
    "what": itemgetter("what"),
    "size": itemgetter("size"),
    "requests": itemgetter("requests"),
    "blocks": itemgetter("blocks"),
}
_CALLS = {
    "compute": "call that computes, p50 / p99, ms",
    "hit": "call with all in memory",
    "fetch": "longer where it is read from Redis",
    "look": "asking Redis in vain",
    "delay": "until others could hear",
    "hear": "hearing of a value, in a call",
}
_REDIS = {
    "asked": "Redis, µs of its thread: asked in vain",
    "read": "a value read",
    "written": "a value written",
    "written_more": "each more at once",
    "told": "a worker told of a value",
    "told_more": "of each more at once",
}


def simulation(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        yield f"![Hit rate and Redis by number of workers]({run.group}/{run.path.name}/{PICTURE})"
    yield columns(CHECKED, checked(runs))
    yield "Real and simulated runs, each worker asked one request after the other."
    yield columns(TIMES, times(runs))
    yield columns(STOPS, stops(runs))
    yield "The fewest workers at which a figure passes its limit, and the figure there; else that at the most workers."
    yield columns(POINTS, [row for run in runs for row in run.metrics["summary"]])


def checked(runs: Sequence[Run]) -> list[Figures]:
    """Real runs beside simulated ones."""
    return [row for run in runs for row in run.metrics["check"]]


def stops(runs: Sequence[Run]) -> list[Figures]:
    """One row a stream and design: for each figure, where it passes its limit."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for one in (one for run in runs for one in run.metrics["stops"]):
        row = rows.setdefault((one["stream"], one["design"]), {"stream": one["stream"], "design": one["design"]})
        row[one["figure"]] = _passed(one)
    return list(rows.values())


def _passed(one: Figures) -> str:
    show = number if one["figure"] in ("points_lost", "p99_ratio") else percent
    limit = f"limit {one['limit']:g}"
    if one["workers"] is None:
        return f"none to {one['most_workers']} ({show(one['at_most'])}; {limit})"
    return f"{one['workers']} ({show(one['value'])}; {limit})"


def times(runs: Sequence[Run]) -> Iterator[dict[str, str]]:
    """What was measured: of requests and of blocks."""
    for run in runs:
        found = run.metrics["times"]
        for name, what in _CALLS.items():
            of_requests, of_blocks = (
                {row["size"]: row for row in found[kind][name]} for kind in ("requests", "blocks")
            )
            for size in dict.fromkeys((*of_requests, *of_blocks)):
                yield {
                    "what": what,
                    "size": str(size),
                    "requests": _spread(of_requests.get(size)),
                    "blocks": _spread(of_blocks.get(size)),
                }
        for name, what in _REDIS.items():
            yield _of_kinds(found, f"{name}_cpu_us", what)
        yield _of_kinds(found, "follow_us", "follower, µs: a value")
        yield _of_kinds(found, "follow_more_us", "each more at once")
        yield _of_kinds(found, "entry_nbytes", "bytes of a value on the wire")


def _of_kinds(found: Figures, name: str, what: str) -> dict[str, str]:
    return {"what": what, "size": "", **{kind: number(found[kind][name]) for kind in ("requests", "blocks")}}


def _spread(row: Figures | None) -> str:
    return "" if row is None else f"{row['p50_ms']:.2f} / {row['p99_ms']:.2f}"
