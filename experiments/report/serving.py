"""Tables of servers that were asked over their socket."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter

from experiments.report.markdown import Cell, columns, count, number, of, percent
from experiments.runs.read import Figures, Run


def points(runs: Sequence[Run]) -> list[Figures]:
    """All rows of all runs."""
    return [{"run": run, **point} for run in runs for point in run.metrics["points"]]


def _shown(cells: Mapping[str, Cell], note: str) -> Callable[[Sequence[Run]], Iterator[str]]:
    """The table of such runs, and what is to be known of it."""

    def tables(runs: Sequence[Run]) -> Iterator[str]:
        yield columns(cells, points(runs))
        yield note

    return tables


def _run(name: str, show: Callable[..., str] = str) -> Cell:
    """A figure of the whole run."""
    return lambda row: show(row["run"].metrics[name])


def _spread(row: Figures) -> str:
    if "goodput" not in row:
        return f"{number(row['rate'])}{'' if row['is_held'] else ', broken'}"
    return f"{number(row['goodput'])} ({number(row['goodput_min'])} to {number(row['goodput_max'])})"


def _gain(row: Figures) -> str:
    return number(row.get("gain"), 2)


def _same(row: Figures) -> str:
    return "" if row["n_same"] is None else f"{count(row['n_same'])} of {count(row['n'])}"


def _of_queue(row: Figures) -> str:
    return f"{number(row['p99_ms'])} / {number(1e3 * row['max_queue_s'], 0)}"


def _growth(row: Figures) -> str:
    return f"{number(row['rss_warm_mb'], 0)} / {number(row['rss_end_mb'], 0)}"


def _area(row: Figures) -> str:
    return f"{number(row['auc'], 3)} ({number(row['auc_low'], 3)} to {number(row['auc_high'], 3)})"


STREAM: Mapping[str, Cell] = {"stream": lambda row: row["run"].task}
TIMES: Mapping[str, Cell] = {f"{name}, ms": of(number, f"{name}_ms") for name in ("p50", "p90", "p99")}
CPU: Mapping[str, Cell] = {
    "server, CPU ms": of(number, "server_cpu_ms", 2),
    "generator": of(number, "generator_cpu_ms", 2),
}
LOADED: Mapping[str, Cell] = {
    **STREAM,
    "server": itemgetter("server"),
    "arrivals": itemgetter("arrivals"),
    "goodput, requests / s": _spread,
    "gain of the cache": _gain,
    "hits": of(percent, "hit_rate"),
    "changed": of(percent, "changed_answers", 2),
    **TIMES,
    **CPU,
}
HIT: Mapping[str, Cell] = {
    "server": itemgetter("server"),
    "what": itemgetter("what"),
    **{name: of(number, f"{name.split(',')[0]}_ms", 2) for name in TIMES},
    "answers / s": of(number, "throughput", 0),
    **CPU,
    "n": of(count, "n"),
}
CHATS: Mapping[str, Cell] = {
    "model": _run("model"),
    "server": itemgetter("server"),
    "TTFT p50, ms": of(number, "ttft_p50_ms"),
    "p90": of(number, "ttft_p90_ms"),
    "p99": of(number, "ttft_p99_ms"),
    "turns after the first, p50": of(number, "later_ttft_p50_ms"),
    "gain, p50": _gain,
    "prompt tokens cached": of(percent, "cached"),
    "same answers": _same,
    "n": of(count, "n"),
}
SOAKED: Mapping[str, Cell] = {
    **STREAM,
    "capacity, requests / s": of(number, "capacity"),
    "asked": of(number, "rate"),
    "requests": of(count, "n"),
    "accepted": of(percent, "accepted"),
    "failed": of(count, "n_failed"),
    "p99 of accepted / queue limit, ms": _of_queue,
    "most waiting": of(number, "waiting_max", 0),
    "memory when warm / at the end, MB": _growth,
    "hits": of(percent, "hit_rate"),
    "checked": of(count, "n_checked"),
    "unequal": of(count, "n_unequal"),
    "changed": of(percent, "changed_answers", 2),
}
KILLS: Mapping[str, Cell] = {
    "model": _run("model"),
    "killed while": itemgetter("moment"),
    "kills, each with a start after it": of(count, "n"),
    "half-written saves left": of(count, "n_half_written"),
    "new answers": of(count, "n_answered"),
    "texts that the saves held": of(count, "n_held"),
    "no hits after the start": of(count, "n_missed"),
    "lost": of(count, "n_lost"),
    "wrong answers": of(count, "n_wrong"),
}
REPLICAS: Mapping[str, Cell] = {
    "model": _run("model"),
    "kills": _run("n_kills", count),
    "requests while": itemgetter("phase"),
    "n": of(count, "n"),
    "first tries that failed in its hands": of(count, "n_failed_in_hands"),
    "others that failed": of(count, "n_failed_others"),
    "failed three times": of(count, "n_lost"),
    "repeats": of(count, "n_repeats"),
    "of these hits": of(percent, "hit_rate", 2),
    "wrong answers": of(count, "n_wrong"),
}
STORE_KILLS: Mapping[str, Cell] = {
    "model": itemgetter("model"),
    "kills, each with a start after it": of(count, "n_kills"),
    "before all was written": of(count, "n_writing"),
    "half-written files left": of(count, "n_half_written"),
    "prompts asked again": of(count, "n_looked"),
    "hits": of(count, "n_hits"),
    "not written yet": of(count, "n_waiting"),
    "lost": of(count, "n_lost"),
    "damaged": of(count, "n_damaged"),
    "served after their purge": of(count, "n_after_purge"),
    "wrong answers": of(count, "n_wrong"),
}
TIMINGS: Mapping[str, Cell] = {
    "texts that were asked before are": itemgetter("kind"),
    "AUC": _area,
    "asked, p50, ms": of(number, "asked_p50_ms"),
    "new, p50, ms": of(number, "new_p50_ms"),
    "n": of(count, "n"),
}
serve_load = _shown(
    LOADED,
    "Goodput: the largest rate at which 99 % of all requests are answered with 200 in time; median and range of "
    "rounds. Latencies, from when a request was due, and CPU time of a request are of the last rate that was held.",
)
serve_timing = _shown(TIMINGS, "AUC of telling the two apart by latency; 0.5: they cannot be. 95 % of resamples.")
serve_hits = _shown(HIT, "A closed loop; the server on one core, the generator on another where there is one.")
serve_chat = _shown(CHATS, "From sending a turn to its first text. Same answers: those of the server without a cache.")
serve_soak = _shown(
    SOAKED,
    "Failed: 5xx, no connection or no answer in time. Unequal: answers that no approximate rung served and that are "
    "not the model's own. Changed: of all that were checked.",
)
serve_kill = _shown(
    KILLS,
    "Lost: answered before the last save but one was finished, or held by an earlier save, and not by the last one. "
    "Wrong: not the model's own, of new answers and of those after the start.",
)
ray_replicas = _shown(
    REPLICAS,
    "In its hands: sent before a kill, and not answered by then. Repeats: of texts that were answered before. Wrong: "
    "not the model's own.",
)
store_kill = _shown(
    STORE_KILLS,
    "Asked again at the next start, after kills and purges. Not written yet: computed, killed before that was said. "
    "Lost: missing though it was. Wrong: not the model's own.",
)
