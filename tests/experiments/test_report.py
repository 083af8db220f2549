"""The report: verdicts follow from figures, and everything in it comes from files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.metrics import paper
from experiments.report import write_report
from experiments.report.claims import CLAIMS, judge
from experiments.report.plots import draw_all
from experiments.report.verdict import Judgement, Verdict
from experiments.runs.folder import write_figures
from experiments.runs.read import Run, read_runs, unfinished
from experiments.support.environment import describe
from llmcache.errors import ConfigError

ENV = describe(0) | {"n_cpus": 2, "gpu": None}
HEAD = {"seconds": 1.0, "task": "stream", "model": "m", "n": 100, "limit": None, "metric": "accuracy", "facts": {}}
QUALITY = {
    "hit_rate": 0.5,
    "hit_rate_ci": [0.4, 0.6],
    "hits_by_rung": {"semantic": 0.5},
    "rows_served": 0.5,
    "accuracy": 0.9,
    "accuracy_drop": 0.0,
    "accuracy_drop_ci": None,
    "changed_answers": 0.02,
    "changed_answers_ci": [0.0, 0.04],
    "changed_per_hit": 0.04,
    "extras": {},
}
SPEED = {
    "hit_rate_all": 0.6,
    "speedup_all": None,
    "speedup": 2.0,
    "speedup_min": 1.9,
    "speedup_max": 2.1,
    "miss_overhead": 0.02,
    "hit_cost": 0.01,
}


def run(group: str, measure: str, config: Mapping[str, Any] | None = None, **metrics: Any) -> Run:
    settings = {"measure": measure, "rounds": 3, "task": {"model": "m"}, **(config or {})}
    return Run(group, Path(group) / "run", settings, ENV, {**HEAD, **metrics})


def latency(*calls: Mapping[str, Any], generation: Sequence[Any] = ()) -> Run:
    return run("table1_latency", "latency", calls=list(calls), generation=list(generation))


def call(
    model: str = "bert-base", miss: float = 102, hit: float = 2, kept: str = "as the paper", spread: float = 0
) -> dict[str, Any]:
    """Return a call's figures, 100 ms without a cache; `spread`: distance of percentiles from medians, in ms."""
    ratios = {
        f"{kind}/nocache": {"median": ms / 100, "p5": (ms - spread) / 100, "p95": (ms + spread) / 100}
        for kind, ms in (("miss", miss), ("hit", hit))
    }
    ms = {"nocache_ms": 100.0, "miss_ms": miss, "hit_ms": hit, "exact_hit_ms": 1.0, "floor_ms": 0.5}
    asked = {"weights": "random", "kept": kept, "batch_size": 1, "dtype": "float32", "entries": 200}
    sizes = {"model_mb": 400.0, "entry_kb": 4700.0, "cache_mb": 940.0}
    told = {"hit_speedup": 100 / hit, "miss_ratio": miss / 100, "detail": {"nocache_ms": {"n": 60}, "ratios": ratios}}
    return {"model": model, "head": "token" if model == "gpt2" else "class", **asked, **ms, **sizes, **told}


def generation(miss: float, exact_hit: float, spread: float = 0.02) -> dict[str, Any]:
    """Return figures of a generation, 200 ms with K/V caching; arguments are ratios to that, and their spread."""
    of_kv = {"nocache": 5.0, "miss": miss, "exact_hit": exact_hit}
    made = {f"{kind}_ms": {"median": 200 * value, "n": 20} for kind, value in {**of_kv, "kv_cache": 1.0}.items()}
    ratios = {
        f"{kind}/kv_cache": {"median": value, "p5": value - spread, "p95": value + spread}
        for kind, value in of_kv.items()
    }
    return {"model": "gpt2", "weights": "random", "prompt_tokens": 112, "new_tokens": 16, **made, "ratios": ratios}


def sweep(*points: Mapping[str, Any], live: Sequence[Any] = (), **metrics: Any) -> Run:
    return run("fig5_tau", "sweep", points=list(points), live=list(live), **metrics)


def point(tau: float | None, hit_rate: float, drop: float, method: str = "llmcache", **more: Any) -> dict[str, Any]:
    named = {"method": method, "fingerprint": "mean" if method == "llmcache" else None, "tau": tau}
    rates = {"hit_rate": hit_rate, "hit_rate_ci": [hit_rate - 0.02, hit_rate + 0.02], "rows_served": hit_rate}
    return {**QUALITY, **named, "precision": 0.9, **rates, "accuracy_drop": drop, **more}


def live(speedup: float, drop: float, **more: Any) -> dict[str, Any]:
    return {**QUALITY, **SPEED, "tau": 0.85, "n": 100, "rounds": 3, "speedup": speedup, "accuracy_drop": drop, **more}


def served(drop: float, ci: Sequence[float] | None, figures: Mapping[str, Any] | None = None, **metrics: Any) -> Run:
    """Return a run of the plain model and of llmcache at a tau, with some figures given."""
    plain = {**QUALITY, **SPEED, "bytes": None, "options": {}, "method": "nocache"}
    ours = {"accuracy_drop": drop, "accuracy_drop_ci": ci, "bytes": 1000, "options": {"tau": 0.85}}
    methods = {"nocache": plain, "tau": plain | ours | {"method": "llmcache"} | dict(figures or {})}
    return run("table2_accuracy", "serve", rounds=3, methods=methods, **metrics)


def layers(*alike: float, **task: Any) -> Run:
    row = {
        "hit_rate_as_written": 0.5,
        "hit_rate_per_layer": 0.6,
        "hit_rate_own_tau": 0.1,
        "own_tau": 0.9,
        "alike_by_embedding": 0.1,
        "median_cosine": 0.3,
    }
    rows = [{**row, "layer": layer, "alike_by_layer": share} for layer, share in enumerate(alike)]
    figures = {**QUALITY, "layers_skipped": 0.5, "n": 50}
    runs = {"as_written": figures, "per_layer": figures, "own_tau": figures}
    return run("fig3_hit_rate_by_layer", "layers", {"task": {"model": "m", **task}}, layers=rows, runs=runs)


def memory(size: int, hit_rate: float, compression: str = "none", skew: float | None = None, evicted: int = 3) -> Run:
    task = {"model": "m", "traffic": None if skew is None else {"skew": skew}}
    config = {"task": task, "cache": {"max_entries": size, "compression": {"name": compression}}}
    counts = {"bytes": 1000 * size, "state_bytes": 900 * size, "entries": size, "evicted": evicted}
    figures = {**QUALITY, **counts, "revalidated": 0, "expelled": 0, "reconstruction_error": None}
    return run("fig4_memory", "observe", config, **figures | {"hit_rate": hit_rate})


def by_doubling(rates: Sequence[float], **more: Any) -> list[Run]:
    return [memory(2**number, rate, **more) for number, rate in enumerate(rates, start=5)]


def harmless(ours: float, theirs: float) -> Run:
    """Return a sweep in which llmcache and DocCache have these hit rates without loss."""
    return sweep(point(0.8, ours, 0.0), point(0.9, theirs, 0.0, "doccache"))


def judged(name: str, *runs: Run) -> Judgement:
    """Judge the claim whose text contains `name`."""
    results: dict[str, list[Run]] = {}
    for one in runs:
        results.setdefault(one.group, []).append(one)
    (found,) = [judgement for claim, judgement in judge(results, {}) if name in claim.said]
    return found


HOLDS, UNDER, NOT, NOT_MEASURED = Verdict.HOLDS, Verdict.HOLDS_UNDER, Verdict.DOES_NOT_HOLD, Verdict.NOT_MEASURED


def speedup(*rows: Mapping[str, Any]) -> list[Run]:
    return [sweep(point(0.7, 0.9, 0.2), point(0.85, 0.6, 0.001), live=rows)]


def best_at(*taus: float | None) -> list[Run]:
    """Return one sweep per tau; at that tau it has the most hits without loss."""
    return [sweep(point(0.82, 0.9, 0.3), point(tau, 0.2, 0.0)) for tau in taus]


@pytest.mark.parametrize(
    ("claim", "runs", "verdict"),
    [
        # Latency depends on how many requests hit.
        ("BERT-base", [latency(call(hit=2))], UNDER),
        ("BERT-base", [latency(call(hit=90))], NOT),
        # Speed is judged with its loss.
        ("3.1 times", speedup(live(3.2, 0.004)), HOLDS),
        ("3.1 times", speedup(live(2.0, 0.001, speedup_all=3.2)), HOLDS),  # the first requests hit less than all do
        ("3.1 times", speedup(live(2.0, 0.001, speedup_all=3.2, tau=0.7)), UNDER),  # all requests lose more
        ("3.1 times", speedup(live(3.2, 0.02), live(1.2, 0.0)), UNDER),
        ("3.1 times", speedup(live(2.0, 0.0)), NOT),
        ("3.1 times", speedup(), NOT_MEASURED),
        # Accuracy is judged by the interval of its drop.
        ("falls by less", [served(0.001, (-0.001, 0.003))], HOLDS),
        ("falls by less", [served(0.004, (-0.01, 0.02))], UNDER),
        ("falls by less", [served(0.2, None)], UNDER),  # one cluster gives no interval
        ("falls by less", [served(0.1, (0.05, 0.15))], NOT),
        # DocCache is compared by hits without loss.
        ("DocCache", [harmless(0.3, 0.2)], HOLDS),
        ("DocCache", [harmless(0.3, 0.2), harmless(0.1, 0.2)], UNDER),
        ("DocCache", [harmless(0.1, 0.2)], NOT),
        ("DocCache", [harmless(0.22, 0.2)], NOT),  # intervals overlap
        ("DocCache", [harmless(0.3, 0.2), harmless(0.22, 0.2)], UNDER),
        ("DocCache", [harmless(0.0, 0.0)], NOT_MEASURED),
        # States must be alike in lower layers, and less so in upper ones.
        ("Figure 3", [layers(0.95, 0.5)], HOLDS),
        ("Figure 3", [layers(0.95, 0.97)], NOT),
        ("Figure 3", [layers(0.5, 0.4)], NOT),
        # Hits are logarithmic in memory if every doubling gains the same; runs with compression are ignored.
        ("logarithm", by_doubling([0.1, 0.2, 0.3, 0.4]) + by_doubling([0.9] * 4, compression="int8"), HOLDS),
        ("logarithm", by_doubling([0.1, 0.4, 0.4, 0.4]), NOT),
        ("logarithm", by_doubling([0.3, 0.3, 0.3, 0.3]), NOT),
        ("logarithm", by_doubling([0.4, 0.3, 0.2, 0.1]), NOT),
        ("logarithm", by_doubling([0.1, 0.2]) + by_doubling([0.9] * 4, compression="int8"), NOT_MEASURED),
        # The best tau must lie in the paper's interval.
        ("Figure 5", best_at(0.84, 0.86), HOLDS),
        ("Figure 5", best_at(0.84, 0.95), UNDER),
        ("Figure 5", best_at(0.7, None), NOT),
    ],
)
def test_verdicts(claim: str, runs: list[Run], verdict: Verdict) -> None:
    assert judged(claim, *runs).verdict is verdict


def test_what_was_not_run_is_not_measured() -> None:
    assert [judgement.verdict for _, judgement in judge({}, {})] == [NOT_MEASURED] * len(CLAIMS)


def test_speed_is_bounded_by_the_hits_that_a_stream_allows() -> None:
    """With enough hits it may hold for a larger model; the speedup of free hits is a limit anywhere."""
    latencies = latency(call(), call(hit=50), call(kept="pooled"))
    found = judged("3.1 times", sweep(point(0.8, 0.9, 0.001), live=[live(1.5, 0.0)]), latencies)
    assert found.verdict is UNDER and "90.0 %" in found.condition
    assert f"{100 / (0.1 * 102 + 0.9 * 2):.2f} times" in found.measured
    found = judged("3.1 times", sweep(point(0.85, 0.5, 0.002), live=[live(1.5, 0.002)]), latencies)
    assert found.verdict is NOT
    assert found.condition == "on 2 CPU cores (free hits would give 2.00 times at most, on any)"


@pytest.mark.parametrize(("f1", "is_weak"), [(0.518, True), (0.90, False)])
def test_a_weak_model_is_told_with_the_verdict(f1: float, is_weak: bool) -> None:
    prepared = {"evaluation": {"f1": f1}, "always_no_answer": {"f1": 0.449}}
    found = judged("half a point on", served(0.1, [0.05, 0.15], facts={"prepared": prepared}))
    assert found.verdict is NOT
    told = "(a weak model shows the direction, not the size: stream F1 51.8 % where no answer ever gives 44.9 %)"
    assert found.condition == (told if is_weak else "")


def test_where_nothing_hits_nothing_is_shown() -> None:
    found = judged("falls by less", served(0.0, (0.0, 0.0), {"hit_rate": 0.0}))
    assert found.verdict is UNDER and "nothing hit" in found.condition


def write(results: Path, one: Run, name: str = "run") -> Path:
    folder = results / one.group / name
    write_figures(folder, one.config, one.env, one.metrics)
    return folder


def folders(results: Path) -> list[Path]:
    return sorted(results.glob("*/*/"))


def report(results: Path, *more: Path) -> str:
    return write_report(results, [*folders(results), *more]).read_text()


@pytest.fixture
def results(tmp_path: Path) -> Path:
    prepared = {"n_test": 50, "accuracy": 0.9137, "commonest": 0.016}
    points = [point(None, 0.0, 0.0), point(0.82, 0.4, 0.2), point(0.9, 0.2, 0.0), point(0.9, 0.1, 0.0, "doccache")]
    write(tmp_path, sweep(*points, live=[live(1.5, 0.0)], facts={"prepared": prepared}))
    write(tmp_path, latency(call(), call("gpt2"), generation=[generation(1.05, 0.75)]))
    write(tmp_path, served(0.1, (0.05, 0.15), limit=100))
    write(tmp_path, layers(0.1, 0.2))
    for size in (32, 64, 128):
        write(tmp_path, memory(size, 0.1 + size / 1000), str(size))
    return tmp_path


def test_a_report_has_a_verdict_for_every_claim_and_a_table_for_every_experiment(results: Path) -> None:
    text = report(results)
    assert all(claim.said in text for claim in CLAIMS)
    assert "Not measured" not in text
    for group in ("fig5_tau", "table1_latency", "table2_accuracy", "fig3_hit_rate_by_layer", "fig4_memory"):
        assert f"## {group}" in text
    assert "91.4 % | 1.6 % (commonest intent)" in text
    assert "7 runs" in text and "table2_accuracy: stream 100" in text
    assert "1.050 (1.030 to 1.070) | 0.750 (0.730 to 0.770) | 20 |" in text
    assert "| 50.0 | 1.020 (1.020 to 1.020) |" in text  # no cache / hit, miss / no cache
    assert f"{paper.MS['bert-base', 'class'][0]} to {paper.MS['bert-base', 'class'][1]}" in text
    assert "nan" not in text.lower() and "None" not in text
    assert report(results) == text


def test_a_report_names_pictures_that_are_drawn(results: Path) -> None:
    text = report(results)
    pictures = [path.relative_to(results).as_posix() for path in draw_all(folders(results))]
    assert len(pictures) == 3
    assert all(f"]({name})" in text and (results / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


@pytest.mark.parametrize("name", ["config.yaml", "env.json", "metrics.json"])
def test_a_damaged_run_is_named_and_one_without_figures_did_not_finish(results: Path, name: str) -> None:
    (results / "fig5_tau" / "run" / name).write_text("{")
    with pytest.raises(ConfigError, match=r"fig5_tau.run: not a whole run"):
        read_runs(folders(results))
    (results / "fig5_tau" / "run" / "metrics.json").unlink()
    assert len(read_runs(folders(results))) == len(folders(results)) - 1


def test_what_cannot_be_reported_is_told(results: Path) -> None:
    with pytest.raises(ConfigError, match="measure first"):
        write_report(results, [])
    write(results, run("ablation_fingerprint", "sweep", points=[{"method": "llmcache"}], live=[]))
    with pytest.raises(ConfigError, match="written by another version"):
        report(results)


def test_a_claim_gets_no_verdict_while_runs_are_missing(results: Path) -> None:
    missing = results / "table2_accuracy" / "openbookqa-minilm-0badcafe"
    assert unfinished([*folders(results), missing]) == {"table2_accuracy": ["openbookqa-minilm"]}
    assert "incomplete" not in report(results)
    text = report(results, missing)
    assert text.count("**incomplete** (not measured: openbookqa-minilm)") == 2  # table and paragraph of that claim
    assert "stream (tau): drop 10.00 (5.00 to 15.00)" in text


def test_intervals_without_width_are_not_read(results: Path) -> None:
    folder = write(results, served(0.2269, (0.2269, 0.2269), {"changed_answers_ci": [0.0, 0.0]}), "old")
    read = read_runs([folder])[0].metrics["methods"]["tau"]
    assert read["accuracy_drop_ci"] is None and read["changed_answers_ci"] is None
    assert read["hit_rate_ci"] == [0.4, 0.6]
    assert "22.69 to" not in report(results)


def test_exact_hits_are_those_of_llmcache(results: Path) -> None:
    one = served(0.0, None, {"hits_by_rung": {"exact": 0.125, "paper": 0.375}})
    one.metrics["methods"]["responses"] = {**one.metrics["methods"]["tau"], "method": "exact_response", "options": {}}
    write(results, one, "other")
    text = report(results)
    assert "| tau | 50.0 % (40.0 to 60.0) | 12.5 % | 50.0 % |" in text
    assert "| responses | 50.0 % (40.0 to 60.0) |  | 50.0 % |" in text
