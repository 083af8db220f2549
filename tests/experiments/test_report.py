"""Verdicts by rules worked out by hand, and what was not measured. tests/test_readme.py holds the pages' own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.report import tables
from experiments.report.claims import CLAIMS, judge
from experiments.report.claims.rules import Judgement, Verdict
from experiments.report.markdown import MISSING
from experiments.report.pages import TABLES, modes, streams
from experiments.report.write import write_report
from experiments.runs.read import Run, grouped, read_runs, unfinished
from experiments.runs.runner import write_figures
from experiments.support.environment import describe
from llmcache.errors import ConfigError

ENV = describe(0) | {"n_cpus": 2, "gpu": None}
HOLDS, UNDER, NOT, NOT_MEASURED = Verdict.HOLDS, Verdict.HOLDS_UNDER, Verdict.DOES_NOT_HOLD, Verdict.NOT_MEASURED


def run(group: str, measure: str, config: Mapping[str, Any] | None = None, **metrics: Any) -> Run:
    head = {"seconds": 1.0, "task": "stream", "n": 100, "calls": [], "generation": []}
    return Run(group, Path(group, "run"), {"measure": measure, "seed": 0, **(config or {})}, ENV, {**head, **metrics})


def figures(hit_rate: float, drop: float, ci: Sequence[float] | None = None, **more: Any) -> dict[str, Any]:
    rates = {"hit_rate": hit_rate, "hit_rate_ci": [hit_rate - 0.02, hit_rate + 0.02], "rows_served": hit_rate}
    lost = {"accuracy_drop": drop, "accuracy_drop_ci": ci, "changed_answers": 0.02, "changed_answers_ci": None}
    return {**rates, **lost, "precision": 0.9, "changed_per_hit": 0.1, **more}


def generation(miss: float, exact_hit: float) -> list[Run]:
    """Return a generation of GPT-2; arguments are ratios of times to that with K/V caching."""
    ratios = {f"{kind}/kv_cache": {"p95": value} for kind, value in (("miss", miss), ("exact_hit", exact_hit))}
    return [run("table1_latency", "latency", generation=[{"model": "gpt2", "ratios": ratios}])]


def point(tau: float | None, hit_rate: float, drop: float, method: str = "llmcache") -> dict[str, Any]:
    fingerprint = "mean" if method == "llmcache" else None
    return figures(hit_rate, drop, method=method, fingerprint=fingerprint, tau=tau)


def sweep(*points: Mapping[str, Any], live: Sequence[Any] = ()) -> Run:
    return run("fig5_tau", "sweep", points=list(points), live=list(live))


def speed(*live: tuple[float, float, float, float | None]) -> list[Run]:
    """Return a sweep with live runs: tau, speed-up, drop, and the speed-up by these costs on the whole stream."""
    rows = [dict(zip(("tau", "speedup", "accuracy_drop", "speedup_all"), row, strict=True)) for row in live]
    return [sweep(point(0.7, 0.9, 0.2), point(0.85, 0.6, 0.001), live=rows)]


def large(hit_rate: float, hit_ms: float) -> list[Run]:
    """Return a sweep with such harmless hits, and BERT-base's costs: 100 ms without a cache, 102 at a miss."""
    costs = {"model": "bert-base", "head": "class", "kept": "pooled", "nocache_ms": 100.0, "miss_ms": 102.0}
    live = [{"tau": 0.8, "speedup": 1.5, "accuracy_drop": 0.0, "speedup_all": None}]
    calls = run("table1_latency", "latency", calls=[costs | {"hit_ms": hit_ms}])
    return [calls, sweep(point(0.8, hit_rate, 0.0), live=live)]


def served(hit_rate: float, drop: float, ci: Sequence[float] | None) -> list[Run]:
    costs = {"miss_overhead": 0.1, "hit_cost": 0.1, "bytes": 10, "speedup": 2, "speedup_min": 1, "speedup_max": 3}
    row = figures(hit_rate, drop, ci, method="llmcache", options={"tau": 0.85}, **costs)
    return [run("table2_accuracy", "serve", methods={"tau": row})]


def harmless(ours: float, theirs: float) -> Run:
    """Return a sweep in which llmcache and DocCache have these hit rates without loss."""
    return sweep(point(0.8, ours, 0.0), point(0.9, theirs, 0.0, "doccache"))


def layers(*alike: float) -> list[Run]:
    return [run("fig3_hit_rate_by_layer", "layers", layers=[{"alike_by_layer": share} for share in alike])]


def memory(*rates: float, compression: str = "none", evicted: int = 3) -> list[Run]:
    """Return runs with these hit rates, each with a cache twice as large as the one before."""
    kept = {"evicted": evicted, "expelled": 0, "entries": 3}
    caches = ({"max_entries": 2**number, "compression": {"name": compression}} for number in range(len(rates)))
    configs = ({"task": {}, "cache": cache} for cache in caches)
    return [run("fig4_memory", "observe", c, hit_rate=rate, **kept) for c, rate in zip(configs, rates, strict=True)]


def best_at(*taus: float | None) -> list[Run]:
    """Return a sweep for each tau, at which it has the most hits without loss."""
    return [sweep(point(0.82, 0.9, 0.3), point(tau, 0.2, 0.0)) for tau in taus]


def judged(claim: str, runs: Sequence[Run]) -> Judgement:
    """Judge the claim whose text contains `claim`."""
    (found,) = [judgement for one, judgement in judge(grouped(runs, "group"), {}) if claim in one.said]
    return found


@pytest.mark.parametrize(
    ("claim", "runs", "verdict"),
    [
        # Speed is judged with its loss: of the live run, or of the whole stream, which has more hits.
        ("3.1 times", speed((0.85, 3.2, 0.004, None)), HOLDS),
        ("3.1 times", speed((0.85, 2.0, 0.001, 3.2)), HOLDS),
        ("3.1 times", speed((0.7, 2.0, 0.001, 3.2)), UNDER),
        ("3.1 times", speed((0.85, 3.2, 0.02, None), (0.85, 1.2, 0.0, None)), UNDER),
        # BERT-base's mean at 90 % hits is 12 ms, at hits of 30 ms 37 ms.
        ("3.1 times", large(0.9, hit_ms=2), UNDER),
        ("3.1 times", large(0.9, hit_ms=30), NOT),
        ("3.1 times", speed(), NOT_MEASURED),
        ("K/V caching", generation(miss=0.9, exact_hit=0.7), HOLDS),
        ("K/V caching", generation(miss=1.1, exact_hit=1.1), NOT),
        # Accuracy is judged by the interval of its drop; one cluster gives none, and without hits nothing is lost.
        ("falls by less", served(0.5, 0.001, (-0.001, 0.003)), HOLDS),
        ("falls by less", served(0.5, 0.004, (-0.01, 0.02)), UNDER),
        ("falls by less", served(0.5, 0.2, None), UNDER),
        ("falls by less", served(0.0, 0.0, (0.0, 0.0)), UNDER),
        # DocCache is compared by hits without loss; intervals that overlap are chance.
        ("DocCache", [harmless(0.3, 0.2)], HOLDS),
        ("DocCache", [harmless(0.3, 0.2), harmless(0.22, 0.2)], UNDER),
        ("DocCache", [harmless(0.0, 0.0)], NOT_MEASURED),
        # States must be alike in lower layers, and less so in upper ones.
        ("Figure 3", layers(0.95, 0.5), HOLDS),
        ("Figure 3", layers(0.95, 0.97), NOT),
        ("Figure 3", layers(0.5, 0.4), NOT),
        # Hits are logarithmic in memory if every doubling gains the same; runs with compression are ignored.
        ("logarithm", [*memory(0.1, 0.2, 0.3, 0.4), *memory(0.9, 0.1, 0.9, compression="int8")], HOLDS),
        ("logarithm", memory(0.1, 0.2, 0.3, evicted=0), UNDER),
        ("logarithm", memory(0.1, 0.4, 0.4, 0.4), NOT),
        ("logarithm", memory(0.3, 0.3, 0.3), NOT),
        ("logarithm", memory(0.4, 0.3, 0.2), NOT),
        ("logarithm", memory(0.1, 0.2), NOT_MEASURED),
        # The best tau must lie in the paper's interval, and serve more than exact repeats.
        ("Figure 5", best_at(0.84, 0.86), HOLDS),
        ("Figure 5", best_at(0.7, None), NOT),
    ],
)
def test_verdicts(claim: str, runs: list[Run], verdict: Verdict) -> None:
    assert judged(claim, runs).verdict is verdict
    assert [found.verdict for _, found in judge({}, {})] == [NOT_MEASURED] * len(CLAIMS)


def write(results: Path, one: Run, name: str = "run") -> Path:
    folder = results / one.group / name
    write_figures(folder, one.config, one.env, one.metrics)
    return folder


def test_a_report_waits_for_missing_runs_and_names_damaged_ones(tmp_path: Path) -> None:
    (one,) = served(0.5, 0.1, (0.05, 0.15))
    done, missing = write(tmp_path, one), tmp_path / "table2_accuracy" / "openbookqa-minilm-0badcafe"
    assert unfinished([done, missing]) == {"table2_accuracy": ["openbookqa-minilm"]}
    for folders, verdict in (([done], "fails"), ([done, missing], "incomplete")):
        text = write_report(tmp_path, folders).read_text()
        assert f"| {verdict} |" in text and "| stream | tau | 50.0 % (48.0 to 52.0) | 10.00 (5.00 to 15.00) |" in text
    assert "(not measured: openbookqa-minilm)" in text and "](../configs/table2_accuracy.yaml)" in text
    old = write(tmp_path, run("ablation", "sweep", points=[{"method": "llmcache"}], live=[]))
    with pytest.raises(ConfigError, match="written by another version"):
        write_report(tmp_path, [old])
    (done / "env.json").write_text("{")
    with pytest.raises(ConfigError, match=r"table2_accuracy.run: not a whole run"):
        read_runs([done])


def test_intervals_without_width_are_not_read(tmp_path: Path) -> None:
    """A bootstrap without events, or with one cluster, has no bounds."""
    (read,) = read_runs([write(tmp_path, *served(0.5, 0.2269, (0.2269, 0.2269)))])
    row = read.metrics["methods"]["tau"]
    assert row["accuracy_drop_ci"] is None and row["hit_rate_ci"] == [0.48, 0.52]


def test_what_was_not_measured_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = figures(0.5, 0.0, method="llmcache", sources="frozen", max_drop=0.01, hits_by_rung={})
    runs = [run(f"trust_{task}", "trust", task=task, calibrated=[row], points=[]) for task in streams.STREAMS]
    for one in runs:
        write(tmp_path, one)
    told = tables.ways(runs)
    assert "| 50.0 % | 2.00 % |" in told and f"| DocCache | {MISSING} |  |" in told
    assert tables.calibrated(runs).count(f"| {MISSING} |  |  |") == 3  # growing sources
    assert tables.errors(runs).count(MISSING) == 9 and tables.hindsight(runs).count(MISSING) == 36
    assert streams.time_order(tmp_path).count(MISSING) == 13  # snips is not served live in time order
    assert (streams.service(tmp_path).count(MISSING), streams.rates(tmp_path).count(MISSING)) == (8, 3)
    assert f"| `serve_load` | {MISSING} |" in TABLES["serve_load"](tmp_path)
    monkeypatch.setattr(modes, "_paper", lambda results_dir: "")  # it needs runs of every claim
    assert modes.modes(tmp_path).count(MISSING) == 4
