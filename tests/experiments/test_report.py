"""The report: verdicts follow from figures, and everything in it comes from files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from experiments.metrics import paper
from experiments.metrics.frontier import at_tau, best, curves
from experiments.report import markdown, write_report
from experiments.report.claims import CLAIMS, judge
from experiments.report.claims.quality import explained_by_line
from experiments.report.claims.speed import hits_needed
from experiments.report.plots import draw_all
from experiments.report.verdict import Judgement, Verdict
from experiments.runs.read import Run, at, by_size, label_of, read_runs, unfinished, varied
from llmcache.errors import ConfigError

ENV = {
    "cpu": "a processor",
    "n_cpus": 2,
    "gpu": None,
    "threads": {"torch": 2, "faiss": 2},
    "seed": 0,
    "python": "3.11",
    "versions": {"torch": "2"},
    "git": "abc",
    "git_dirty": False,
}
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


def run(group: str, measure: str = "sweep", config: Mapping[str, Any] | None = None, **metrics: Any) -> Run:
    settings = {"measure": measure, "rounds": 3, "task": {"model": "m"}, **(config or {})}
    return Run(group, Path(group) / "run", settings, ENV, {**HEAD, **metrics})


def point(tau: float | None, hit_rate: float, drop: float, method: str = "llmcache", **more: Any) -> dict[str, Any]:
    named = {"method": method, "fingerprint": "mean" if method == "llmcache" else None, "tau": tau}
    rates = {"hit_rate": hit_rate, "hit_rate_ci": [hit_rate - 0.02, hit_rate + 0.02], "rows_served": hit_rate}
    return {**QUALITY, **named, "precision": 0.9, **rates, "accuracy_drop": drop, **more}


def call(
    model: str = "bert-base",
    nocache: float = 100.0,
    miss: float = 102.0,
    hit: float = 2.0,
    kept: str = "as the paper",
    spread: float = 0.0,
) -> dict[str, Any]:
    ms = {"nocache_ms": nocache, "miss_ms": miss, "hit_ms": hit, "exact_hit_ms": 1.0, "floor_ms": 0.5}
    ratios = {
        f"{kind}/nocache": {"median": ms / nocache, "p5": (ms - spread) / nocache, "p95": (ms + spread) / nocache}
        for kind, ms in (("miss", miss), ("hit", hit))
    }
    return {
        "model": model,
        "head": "token" if model == "gpt2" else "class",
        "weights": "random",
        "kept": kept,
        "batch_size": 1,
        "dtype": "float32",
        **ms,
        "hit_speedup": nocache / hit,
        "miss_ratio": miss / nocache,
        "model_mb": 400.0,
        "entry_kb": 4700.0,
        "cache_mb": 940.0,
        "entries": 200,
        "detail": {"nocache_ms": {"n": 60}, "ratios": ratios},
    }


def generation(miss: float, exact_hit: float, spread: float = 0.02) -> dict[str, Any]:
    """With K/V caching 200 ms; the others are ratios to that, and how far from them their percentiles are."""
    of_kv = {"nocache": 5.0, "miss": miss, "exact_hit": exact_hit}
    made = {f"{kind}_ms": {"median": 200 * value, "n": 20} for kind, value in {**of_kv, "kv_cache": 1.0}.items()}
    ratios = {
        f"{kind}/kv_cache": {"median": value, "p5": value - spread, "p95": value + spread}
        for kind, value in of_kv.items()
    }
    return {"model": "gpt2", "weights": "random", "prompt_tokens": 112, "new_tokens": 16, **made, "ratios": ratios}


def live(task_speedup: float, drop: float, tau: float = 0.85) -> dict[str, Any]:
    return {**QUALITY, **SPEED, "tau": tau, "n": 100, "rounds": 3, "speedup": task_speedup, "accuracy_drop": drop}


def whole(speedup: float) -> dict[str, Any]:
    """A live run whose costs come to a speed-up at the hit rate of the whole stream."""
    return {**live(2.0, 0.001), "speedup_all": speedup}


def served(drop: float, ci: Sequence[float] | None) -> dict[str, Any]:
    figures = {**QUALITY, **SPEED, "accuracy_drop": drop, "accuracy_drop_ci": ci, "bytes": 1000}
    nocache = {**QUALITY, **SPEED, "bytes": None, "method": "nocache", "options": {}}
    return {
        "rounds": 3,
        "methods": {"nocache": nocache, "tau": {**figures, "method": "llmcache", "options": {"tau": 0.85}}},
    }


def layers(*alike: float) -> dict[str, Any]:
    rows = [
        {
            "layer": layer,
            "hit_rate_as_written": 0.5,
            "hit_rate_per_layer": 0.6,
            "hit_rate_own_tau": 0.1,
            "own_tau": 0.9,
            "alike_by_embedding": 0.1,
            "alike_by_layer": share,
            "median_cosine": 0.3,
        }
        for layer, share in enumerate(alike)
    ]
    figures = {**QUALITY, "layers_skipped": 0.5, "n": 50}
    return {"layers": rows, "runs": dict.fromkeys(("as_written", "per_layer", "own_tau"), figures)}


def observed(
    max_entries: int, hit_rate: float, compression: str = "none", skew: float | None = None, evicted: int = 3
) -> Run:
    task = {"model": "m", "traffic": None if skew is None else {"skew": skew}}
    config = {"task": task, "cache": {"max_entries": max_entries, "compression": {"name": compression}}}
    counters = {
        "bytes": 1000 * max_entries,
        "state_bytes": 900 * max_entries,
        "entries": max_entries,
        "evicted": evicted,
        "revalidated": 0,
        "expelled": 0,
    }
    figures = {**QUALITY, **counters, "reconstruction_error": None, "hit_rate": hit_rate}
    return run("fig4_memory", "observe", config, **figures)


def judged(name: str, *runs: Run) -> Judgement:
    """What becomes of the claim whose text holds `name`."""
    results: dict[str, list[Run]] = {}
    for one in runs:
        results.setdefault(one.group, []).append(one)
    (found,) = [judgement for claim, judgement in judge(results, {}) if name in claim.said]
    return found


def test_what_was_not_run_is_not_measured() -> None:
    assert [judgement.verdict for _, judgement in judge({}, {})] == [Verdict.NOT_MEASURED] * len(CLAIMS)


@pytest.mark.parametrize(("miss", "hit", "verdict"), [(102, 2, Verdict.HOLDS_UNDER), (102, 90, Verdict.DOES_NOT_HOLD)])
def test_latency_is_a_matter_of_how_many_requests_hit(miss: float, hit: float, verdict: Verdict) -> None:
    found = judged("BERT-base", run("table1_latency", "latency", calls=[call(miss=miss, hit=hit)], generation=[]))
    assert found.verdict is verdict


def test_a_verdict_on_latency_names_the_hardware_and_that_of_the_paper() -> None:
    results = [
        run("table1_latency", "latency", calls=[call(), call("gpt2", hit=90.0)], generation=[generation(1.05, 0.8)]),
        run("fig5_tau", points=[point(0.85, 0.5, 0.002)], live=[live(1.5, 0.002)]),
    ]
    for name in ("BERT-base", "GPT-2 small", "3.1 times", "K/V caching"):
        found = judged(name, *results)
        assert "on 2 CPU cores" in found.condition and found.measured.startswith("on 2 CPU cores")
        assert "NVIDIA A100" in found.why
    on_gpu = run("table1_latency", "latency", {"device": "cuda"}, calls=[call()], generation=[])
    on_gpu = replace(on_gpu, env={**ENV, "gpu": "some GPU"})
    assert judged("BERT-base", on_gpu).condition.endswith("on some GPU")
    assert judged("BERT-base", replace(on_gpu, config={})).condition.endswith("on 2 CPU cores")  # one is there, unused


def test_what_free_hits_would_give_is_a_limit_on_any_hardware() -> None:
    latency = run("table1_latency", "latency", calls=[call(kept="pooled")], generation=[])
    curve = run("fig5_tau", points=[point(0.85, 0.5, 0.002)], live=[live(1.5, 0.002)])
    found = judged("3.1 times", curve, latency)
    assert found.verdict is Verdict.DOES_NOT_HOLD
    assert found.condition == "on 2 CPU cores (free hits would give 2.00 times at most, on any)"


@pytest.mark.parametrize(("f1", "is_weak"), [(0.518, True), (0.90, False)])
def test_a_weak_model_is_told_with_the_verdict(f1: float, is_weak: bool) -> None:
    prepared = {"evaluation": {"f1": f1}, "always_no_answer": {"f1": 0.449}}
    one = run("table2_accuracy", "serve", **served(0.1, [0.05, 0.15]), facts={"prepared": prepared})
    found = judged("half a point on", one)
    assert found.verdict is Verdict.DOES_NOT_HOLD
    told = "(a weak model shows the direction, not the size: stream F1 51.8 % where no answer ever gives 44.9 %)"
    assert found.condition == (told if is_weak else "")


def test_hits_needed_give_the_ratio() -> None:
    ratios = call(nocache=100, miss=110, hit=10)["detail"]["ratios"]
    share = hits_needed(ratios, 2.0)
    assert (1 - share) * 110 + share * 10 == pytest.approx(50)
    assert hits_needed(call(miss=50, hit=60)["detail"]["ratios"], 2.0) == float("inf")


def test_a_ratio_that_hits_may_just_reach_does_not_hold() -> None:
    """The paper's 2.39 times as fast takes a hit of 0.418: this one is that on the median, and more in some rounds."""
    rows = [call(hit=41.0, spread=5.0), call("distilbert", hit=2.0), call("gpt2", hit=2.0)]
    results = run("table1_latency", "latency", calls=rows, generation=[])
    found = judged("BERT-base", results)
    assert found.verdict is Verdict.DOES_NOT_HOLD
    assert "% hits (" in found.condition and found.condition.endswith("for bert-base)")
    assert found.condition.startswith("on 2 CPU cores")
    other = judged("GPT-2 small", results)  # which is another claim
    assert other.verdict is Verdict.HOLDS_UNDER and "bert" not in other.condition + other.measured


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ([live(3.2, 0.004)], Verdict.HOLDS),
        ([whole(3.2)], Verdict.HOLDS),  # the first requests find less than all do
        ([{**whole(3.2), "tau": 0.7}], Verdict.HOLDS_UNDER),  # where all lose more
        ([live(3.2, 0.02), live(1.2, 0.0)], Verdict.HOLDS_UNDER),
        ([live(2.0, 0.0)], Verdict.DOES_NOT_HOLD),
        ([], Verdict.NOT_MEASURED),
    ],
)
def test_speed_counts_with_what_it_costs(figures: list[dict[str, Any]], verdict: Verdict) -> None:
    curve = [point(0.7, 0.9, 0.2), point(0.85, 0.6, 0.001)]
    assert judged("3.1 times", run("fig5_tau", live=figures, points=curve)).verdict is verdict


def test_speed_may_hold_for_a_larger_model_where_enough_requests_hit() -> None:
    runs = [
        run("fig5_tau", live=[live(1.5, 0.0)], points=[point(0.8, 0.9, 0.001)]),
        run("table1_latency", "latency", calls=[call(), call(hit=50.0), call(kept="pooled")], generation=[]),
    ]
    found = judged("3.1 times", *runs)
    assert found.verdict is Verdict.HOLDS_UNDER and "90.0 %" in found.condition
    assert f"{100 / (0.1 * 102 + 0.9 * 2):.2f} times" in found.measured


@pytest.mark.parametrize(
    ("miss", "exact_hit", "spread", "verdict"),
    [
        (0.95, 0.75, 0.02, Verdict.HOLDS),
        (0.95, 0.75, 0.06, Verdict.HOLDS_UNDER),  # a median below 1 may be chance
        (1.05, 0.75, 0.02, Verdict.HOLDS_UNDER),
        (0.99, 0.98, 0.02, Verdict.DOES_NOT_HOLD),
        (1.05, 1.02, 0.01, Verdict.DOES_NOT_HOLD),
    ],
)
def test_generation_is_compared_with_kv_caching_by_the_spread_of_its_ratios(
    miss: float, exact_hit: float, spread: float, verdict: Verdict
) -> None:
    rows = [generation(miss, exact_hit, spread)]
    found = judged("K/V caching", run("table1_latency", "latency", calls=[], generation=rows))
    assert found.verdict is verdict
    assert f"{miss:.3f} ({miss - spread:.3f} to {miss + spread:.3f}) where not" in found.measured


@pytest.mark.parametrize(
    ("drop", "ci", "verdict"),
    [
        (0.001, (-0.001, 0.003), Verdict.HOLDS),
        (0.004, (-0.01, 0.02), Verdict.HOLDS_UNDER),
        (0.2, None, Verdict.HOLDS_UNDER),  # of one cluster nothing is known
        (0.1, (0.05, 0.15), Verdict.DOES_NOT_HOLD),
    ],
)
def test_accuracy_is_judged_by_the_interval_of_its_drop(
    drop: float, ci: tuple[float, float] | None, verdict: Verdict
) -> None:
    assert judged("falls by less", run("table2_accuracy", "serve", **served(drop, ci))).verdict is verdict


def test_where_nothing_hits_nothing_is_shown() -> None:
    figures = served(0.0, (0.0, 0.0))
    figures["methods"]["tau"]["hit_rate"] = 0.0
    found = judged("falls by less", run("table2_accuracy", "serve", **figures))
    assert found.verdict is Verdict.HOLDS_UNDER and "nothing hit" in found.condition


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ([(0.3, 0.2)], Verdict.HOLDS),
        ([(0.3, 0.2), (0.1, 0.2)], Verdict.HOLDS_UNDER),
        ([(0.1, 0.2)], Verdict.DOES_NOT_HOLD),
        ([(0.22, 0.2)], Verdict.DOES_NOT_HOLD),  # intervals overlap
        ([(0.3, 0.2), (0.22, 0.2)], Verdict.HOLDS_UNDER),
        ([(0.0, 0.0)], Verdict.NOT_MEASURED),
    ],
)
def test_documents_are_compared_by_harmless_hits(rates: list[tuple[float, float]], verdict: Verdict) -> None:
    runs = [
        run("fig5_tau", live=[], points=[point(0.8, ours, 0.0), point(0.9, theirs, 0.0, "doccache")])
        for ours, theirs in rates
    ]
    assert judged("DocCache", *runs).verdict is verdict


@pytest.mark.parametrize(
    ("alike", "verdict"),
    [((0.95, 0.5), Verdict.HOLDS), ((0.95, 0.97), Verdict.DOES_NOT_HOLD), ((0.5, 0.4), Verdict.DOES_NOT_HOLD)],
)
def test_states_have_to_be_alike_below_and_less_so_above(alike: tuple[float, float], verdict: Verdict) -> None:
    assert judged("Figure 3", run("fig3_hit_rate_by_layer", "layers", **layers(*alike))).verdict is verdict


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ((0.1, 0.2, 0.3, 0.4), Verdict.HOLDS),
        ((0.1, 0.4, 0.4, 0.4), Verdict.DOES_NOT_HOLD),
        ((0.3, 0.3, 0.3, 0.3), Verdict.DOES_NOT_HOLD),
        ((0.4, 0.3, 0.2, 0.1), Verdict.DOES_NOT_HOLD),
        ((0.1, 0.2), Verdict.NOT_MEASURED),
    ],
)
def test_memory_is_logarithmic_when_every_doubling_gains_the_same(rates: Sequence[float], verdict: Verdict) -> None:
    runs = [observed(2**number, rate) for number, rate in enumerate(rates, start=5)]
    others = [observed(2**number, 0.9, "int8") for number in range(5, 9)]  # not looked at
    assert judged("logarithm", *runs, *others).verdict is verdict


def test_a_line_explains_what_numpy_says() -> None:
    x, y = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 2.5, 2.8, 4.2])
    residual = y - np.polyval(np.polyfit(x, y, 1), x)
    assert explained_by_line(x, y) == pytest.approx(1 - residual.var() / y.var())
    assert explained_by_line(x, np.ones(4)) == 1.0


@pytest.mark.parametrize(
    ("taus", "verdict"),
    [
        ((0.84, 0.86), Verdict.HOLDS),
        ((0.84, 0.95), Verdict.HOLDS_UNDER),
        ((0.7, None), Verdict.DOES_NOT_HOLD),
    ],
)
def test_best_taus_are_looked_for_in_the_papers_interval(taus: Sequence[float | None], verdict: Verdict) -> None:
    runs = [run("fig5_tau", live=[], points=[point(0.82, 0.9, 0.3), point(tau, 0.2, 0.0)]) for tau in taus]
    assert judged("Figure 5", *runs).verdict is verdict


def test_the_frontier_is_the_most_hits_within_the_limit() -> None:
    points = [point(0.7, 0.9, 0.1), point(0.8, 0.6, 0.005), point(0.9, 0.3, 0.0), point(0.8, 0.7, 0.0, "doccache")]
    curve = ("llmcache", "mean")
    assert curves(points) == [curve, ("doccache", None)]
    assert best(points, curve) == points[1]
    assert best(points, curve, limit=0.2) == points[0]
    assert best(points, curve, "changed_answers", 0.001) is None
    assert at_tau(points, curve, 0.9) == points[2] and at_tau(points, curve, 0.91) is None


def test_settings_that_differ_are_found_by_their_paths() -> None:
    configs = [
        {"cache": {"policy": {"name": "lru", "a": 1}, "tau": 0.9}, "seed": 0},
        {"cache": {"policy": {"name": "ttl", "ttl_s": 3}, "tau": 0.9}, "seed": 1},
    ]
    assert varied(configs) == [("cache", "policy", "name"), ("seed",)]
    assert at(configs[1], ("cache", "policy", "name")) == "ttl" and at(configs[0], ("cache", "none", "name")) is None
    assert label_of(("cache", "policy", "name")) == "policy" and label_of(("cache", "max_entries")) == "max entries"
    assert sorted([128, "a", 32, None], key=by_size) == [32, 128, None, "a"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (markdown.percent(0.1234), "12.3 %"),
        (markdown.percent(None), ""),
        (markdown.points(0.0123, (-0.001, 0.02)), "1.23 (-0.10 to 2.00)"),
        (markdown.points(None), ""),
        (markdown.share(0.5, (0.4, 0.6)), "50.0 % (40.0 to 60.0)"),
        (markdown.share(0.0, None), "0.0 %"),
        (markdown.speed({"speedup": None}), ""),
        (markdown.speed(SPEED), "2.00 (1.90 to 2.10)"),
        (markdown.ratio({"median": 0.98, "p5": 0.9, "p95": 1.0625}), "0.980 (0.900 to 1.062)"),
        (markdown.number(1234.56), "1,234.6"),
        (markdown.number(None), ""),
        (markdown.size(2_500_000), "2.5 MB"),
        (markdown.size(12), "12 B"),
        (markdown.size(None), ""),
    ],
)
def test_figures_are_written_with_their_units_and_missing_ones_not_at_all(text: str, shown: str) -> None:
    assert text == shown


def write(results: Path, one: Run, name: str = "run") -> Path:
    folder = results / one.group / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(one.config)))
    (folder / "env.json").write_text(json.dumps(one.env))
    (folder / "metrics.json").write_text(json.dumps(one.metrics))
    return folder


def folders(results: Path) -> list[Path]:
    return sorted(results.glob("*/*/"))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    prepared = {"n_test": 50, "accuracy": 0.9137, "commonest": 0.016}
    sweep = [point(None, 0.0, 0.0), point(0.82, 0.4, 0.2), point(0.9, 0.2, 0.0), point(0.9, 0.1, 0.0, "doccache")]
    write(tmp_path, run("fig5_tau", live=[live(1.5, 0.0)], points=sweep, facts={"prepared": prepared}))
    write(tmp_path, run("table1_latency", "latency", calls=[call(), call("gpt2")], generation=[generation(1.05, 0.75)]))
    write(tmp_path, run("table2_accuracy", "serve", **served(0.1, (0.05, 0.15)), limit=100))
    write(tmp_path, run("fig3_hit_rate_by_layer", "layers", **layers(0.1, 0.2)))
    for size in (32, 64, 128):
        write(tmp_path, observed(size, 0.1 + size / 1000), str(size))
    return tmp_path


def test_a_report_has_a_verdict_for_every_claim_and_a_table_for_every_experiment(results: Path) -> None:
    text = write_report(results, folders(results)).read_text()
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


@pytest.mark.slow
def test_a_report_names_pictures_that_are_drawn(results: Path) -> None:
    text = write_report(results, folders(results)).read_text()
    pictures = [path.relative_to(results).as_posix() for path in draw_all(folders(results))]
    assert len(pictures) == 3
    assert all(f"]({name})" in text and (results / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_the_same_files_give_the_same_report(results: Path) -> None:
    assert write_report(results, folders(results)).read_bytes() == write_report(results, folders(results)).read_bytes()


@pytest.mark.parametrize("name", ["config.yaml", "env.json", "metrics.json"])
def test_a_damaged_run_is_named(results: Path, name: str) -> None:
    (results / "fig5_tau" / "run" / name).write_text("{")
    with pytest.raises(ConfigError, match=r"fig5_tau.run: not a whole run"):
        read_runs(folders(results))


def test_a_run_without_figures_did_not_finish_and_is_left_out(results: Path) -> None:
    n = len(read_runs(folders(results)))
    (results / "fig5_tau" / "run" / "metrics.json").unlink()
    assert len(read_runs(folders(results))) == n - 1


def test_what_another_version_wrote_is_told(results: Path) -> None:
    write(results, run("ablation_fingerprint", points=[{"method": "llmcache"}], live=[]))
    with pytest.raises(ConfigError, match="written by another version"):
        write_report(results, folders(results))


def test_losses_of_few_questions_are_told_by_changed_answers() -> None:
    """Half a point of 500 questions is two and a half: as many may be won by chance as are lost."""
    changed = point(0.8, 0.9, 0.0, changed_answers=0.3)
    kept = point(0.86, 0.2, 0.0, changed_answers=0.004)
    for task, verdict in (("openbookqa", Verdict.HOLDS), ("stream", Verdict.DOES_NOT_HOLD)):
        runs = run("fig5_tau", task=task, live=[], points=[point(0.82, 0.95, 0.3), changed, kept])
        assert judged("Figure 5", runs).verdict is verdict


def test_a_claim_gets_no_verdict_while_runs_are_missing(results: Path) -> None:
    missing = results / "table2_accuracy" / "openbookqa-minilm-0badcafe"
    assert unfinished([*folders(results), missing]) == {"table2_accuracy": ["openbookqa-minilm"]}
    assert "incomplete" not in write_report(results, folders(results)).read_text()
    text = write_report(results, [*folders(results), missing]).read_text()
    assert text.count("**incomplete** (not measured: openbookqa-minilm)") == 2  # table and paragraph of that claim
    assert "stream (tau): drop 10.00 (5.00 to 15.00)" in text


def test_intervals_without_width_are_not_read(results: Path) -> None:
    figures = served(0.2269, (0.2269, 0.2269))
    figures["methods"]["tau"]["changed_answers_ci"] = [0.0, 0.0]
    folder = write(results, run("table2_accuracy", "serve", **figures), "old")
    read = read_runs([folder])[0].metrics["methods"]["tau"]
    assert read["accuracy_drop_ci"] is None and read["changed_answers_ci"] is None
    assert read["hit_rate_ci"] == [0.4, 0.6]
    assert "22.69 to" not in write_report(results, folders(results)).read_text()


def test_speed_is_told_with_the_answers_that_changed_and_why_accuracy_rises() -> None:
    for task, is_explained in (("wikitext-repeats", True), ("stream", False)):
        row = {**live(1.3, -0.009), "changed_answers": 0.233}
        found = judged("3.1 times", run("fig5_tau", task=task, live=[row], points=[point(0.85, 0.4, -0.009)]))
        assert "23.3 % of all answers changed" in found.measured
        assert ("accuracy rises on wikitext-repeats" in found.why) is is_explained


def test_the_rule_of_a_loss_stands_where_the_figure_does() -> None:
    points = [point(0.82, 0.3, 0.0, changed_answers=0.0), point(0.9, 0.2, 0.0, "doccache")]
    for task, is_named in (("openbookqa", True), ("stream", False)):
        for claim in ("DocCache", "Figure 5"):
            found = judged(claim, run("fig5_tau", task=task, live=[], points=points))
            assert ("openbookqa: half a per cent of changed answers" in found.measured) is is_named


def test_the_interval_of_rows_is_that_of_hits_scaled() -> None:
    ours = point(0.82, 0.4, 0.0, rows_served=0.1)  # hits in 40 %, a quarter of their rows
    found = judged("DocCache", run("fig5_tau", live=[], points=[ours, point(0.9, 0.102, 0.0, "doccache")]))
    assert "10.0 % (9.5 to 10.5) against 10.2 % (8.2 to 12.2): no difference" in found.measured


@pytest.mark.parametrize(
    ("hit_rate", "precision", "verdict"),
    [
        (0.06, 0.9, Verdict.HOLDS),
        (0.05, 1.0, Verdict.DOES_NOT_HOLD),  # five of a hundred requests
        (0.06, 0.0, Verdict.DOES_NOT_HOLD),
        (0.06, None, Verdict.DOES_NOT_HOLD),
    ],
)
def test_a_best_tau_rests_on_hits_some_of_which_are_right(
    hit_rate: float, precision: float | None, verdict: Verdict
) -> None:
    points = [point(0.82, 0.9, 0.3), point(0.85, hit_rate, 0.001, precision=precision, accuracy_drop_ci=(-0.01, 0.02))]
    found = judged("Figure 5", run("fig5_tau", live=[], points=points))
    assert found.verdict is verdict and "(n = 100)" in found.measured
    told = "tau 0.85, 6 hits (6.0 %), a drop of 0.10 (-1.00 to 2.00) points"
    assert (told in found.measured) is (verdict is Verdict.HOLDS)


def test_a_logarithm_on_drawn_traffic_or_beyond_what_fills_it_is_a_condition() -> None:
    rates = list(enumerate((0.1, 0.2, 0.3, 0.4), start=5))
    drawn = judged("logarithm", *(observed(2**number, rate, skew=0.8) for number, rate in rates))
    assert drawn.verdict is Verdict.HOLDS_UNDER
    assert drawn.condition == "one stream of 100 requests, drawn with a popularity skew of 0.8"
    filled = judged("logarithm", *(observed(2**number, rate, evicted=8 - number) for number, rate in rates))
    assert filled.verdict is Verdict.HOLDS_UNDER and filled.condition.startswith("256 entries are more than it fills")


def test_layers_are_told_with_their_intervals_where_windows_stand_for_themselves() -> None:
    for repeats, is_told in ((None, True), ({"whole": 0.2}, False)):
        config = {"task": {"model": "m", "repeats": repeats}}
        found = judged("Figure 3", run("fig3_hit_rate_by_layer", "layers", config, **layers(0.0, 0.0)))
        assert "n = 50" in found.measured
        assert ("0.0 % (0.0 to 7.1)" in found.measured) is is_told


def test_tables_show_the_threshold_that_a_claim_quotes(results: Path) -> None:
    sweep = [point(tau, 0.9 - tau / 2, 0.0 if tau > 0.83 else 0.3) for tau in (0.82, 0.83, 0.84, 0.86, 0.87)]
    write(results, run("fig5_tau", live=[], points=sweep), "other")
    text = write_report(results, folders(results)).read_text()
    assert "tau 0.84," in text and "\n| 0.84 | 48.0 %" in text
    assert "\n| 0.87 |" not in text  # no table would be read that shows them all


def test_exact_hits_are_those_of_llmcache(results: Path) -> None:
    figures = served(0.0, None)
    figures["methods"]["tau"]["hits_by_rung"] = {"exact": 0.125, "semantic": 0.375}
    figures["methods"]["responses"] = {**figures["methods"]["tau"], "method": "exact_response"}
    write(results, run("table2_accuracy", "serve", **figures), "other")
    text = write_report(results, folders(results)).read_text()
    assert "| tau | 50.0 % (40.0 to 60.0) | 12.5 % | 50.0 % |" in text
    assert "| responses | 50.0 % (40.0 to 60.0) |  | 50.0 % |" in text


def test_what_is_left_of_the_cost_is_told_where_a_cache_may_step_aside(results: Path) -> None:
    figures = served(0.0, None)
    figures["methods"]["tau"] |= {"bypassed": 1234, "options": {"auto_bypass": True}, "latter_half": SPEED}
    write(results, run("table2_accuracy", "serve", **figures), "other")
    assert "\n| tau | 1,234 | 2.00 (1.90 to 2.10) |" in write_report(results, folders(results)).read_text()


def test_no_results_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="measure first"):
        write_report(tmp_path, [])
