"""Tables of the pages on calibrated reuse, from made-up results; absent results are marked."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.report.pages import modes, reuse, ways
from experiments.report.pages.files import MISSING, runs_if_any
from experiments.runs.folder import write_figures
from llmcache.errors import ConfigError

DROPS = (0.005, 0.01)
TASKS = ("banking77", "hwu64", "snips")


def write(results: Path, group: str, task: str, seed: int = 0, measure: str = "trust", **metrics: Any) -> Path:
    """Write a finished run; return its folder."""
    folder = results / group / f"{task}-{len(list((results / group).glob('*')))}"
    write_figures(folder, {"measure": measure, "seed": seed}, {}, {"task": task, "n_counted": 100, **metrics})
    return folder


def served(method: str | None, drop: float, hits: float, sources: str = "frozen", exact: float = 0.0) -> dict[str, Any]:
    """Return the row of a calibrated method; None: of an old run, which calibrated llmcache only."""
    row = {
        "sources": sources,
        "max_drop": drop,
        "hit_rate": hits,
        "hits_by_rung": {"exact": exact, "semantic": hits - exact},
        "changed_answers": drop / 2,
        "changed_per_hit": drop / 2 / hits,
        "accuracy_drop": 0.0,
    }
    by_intent = {"median": 0.0, "worst": {"intent": "a", "changed": 0.1}}
    return row if method is None else row | {"method": method, "by_intent": by_intent}


def calibrated(*methods: str | None, hits: float = 0.5, exact: float = 0.0) -> dict[str, Any]:
    """Return a trust run's metrics; growing sources of the first method have their own hit rate."""
    rows = [served(method, drop, 0.9, "growing") for method in methods[:1] for drop in DROPS]
    rows += [served(method, drop, hits + i / 10, exact=exact) for i, method in enumerate(methods) for drop in DROPS]
    return {"calibrated": rows, "points": []}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Old runs of the shuffled streams, which calibrated llmcache only."""
    for task in TASKS:
        for seed in (0, 1):
            write(tmp_path, f"trust_{task}", task, seed, **calibrated(None, hits=0.5 + seed / 10))
    return tmp_path


def cells(table: str, *first: str) -> list[str]:
    """Return the cells of the row that begins with `first`."""
    (row,) = (line for line in table.splitlines() if line.startswith("| " + " | ".join(first) + " |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_every_way_has_a_row_with_its_errors_or_says_that_it_was_not_measured(results: Path) -> None:
    llmcache, student = ways.NAMES["llmcache"], ways.NAMES["student"]
    shown, told = ways.ways(results), ways.errors(results)
    assert cells(shown, "hwu64", llmcache)[2:4] == ["50.0 / 60.0 %", "0.25 / 0.25 %"]
    assert cells(shown, "hwu64", student)[2:] == [MISSING, "", MISSING, ""]
    assert cells(told, "snips", llmcache, "0.5 %")[3:] == ["0.25 / 0.25 %", "0.50 / 0.42 %", MISSING, MISSING]
    assert cells(told, "snips", student, "0.5 %")[3:] == [MISSING, "", "", ""]
    for path in (results / "trust_hwu64").glob("*/metrics.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | calibrated("llmcache", "student", "paper")))
    shown, told = ways.ways(results), ways.errors(results)
    assert cells(shown, "hwu64", llmcache)[2] == "50.0 / 50.0 %"  # not 90 %, of growing sources
    assert cells(shown, "hwu64", student)[2:4] == ["60.0 / 60.0 %", "0.25 / 0.25 %"]
    assert cells(shown, "hwu64", ways.NAMES["paper"])[2] == "70.0 / 70.0 %"
    assert cells(shown, "hwu64", ways.NAMES["doccache"])[2] == MISSING
    errors = ["0.50 / 0.50 %", "0.83 / 0.83 %", "10.0 / 10.0 %", "0.00 / 0.00 %"]
    assert cells(told, "hwu64", student, "1.0 %")[3:] == errors
    assert cells(reuse.calibrated(results), "hwu64", "0.5 %")[2] == "50.0 / 50.0 %"


def test_time_order_counts_bounds_and_shows_what_live_streams_got(results: Path) -> None:
    shown = ways.time_order(results)
    assert len(shown.splitlines()) == 2 + 9
    assert cells(shown, "banking77", "shuffled")[2:5] == [MISSING, "50.0 / 60.0 %", "0.25 / 0.25 %"]
    assert cells(shown, "banking77", "bursts")[2:5] == [MISSING, MISSING, ""]
    assert cells(shown, "snips", "bursts")[2:5] == [MISSING, "", ""]  # no config serves this stream live
    claims = [
        {"max_drop": drop, "n_calibrations": 40, "n_violated": 7 + i, "n_beyond_chance": i}
        for i, drop in enumerate(DROPS)
    ]
    write(results, "trust_bound_time", "snips", measure="bound", arrival="bursts", claims=claims)
    write(results, "trust_bursts", "banking77-bursts", **calibrated("llmcache", "student"))
    write(results, "trust_repeats", "hwu64-repeats", **calibrated("llmcache", exact=0.25))
    shown = ways.time_order(results)
    assert cells(shown, "snips", "bursts")[2:6] == ["7 of 40, 0 beyond chance", "", "", "8 of 40, 1 beyond chance"]
    assert cells(shown, "banking77", "bursts")[3:5] == ["50.0 %", "0.25 %"]
    assert cells(shown, "hwu64", "repeats")[3] == "50.0 %, of these exact 25.0 %"


def passes(**figures: Any) -> dict[str, Any]:
    """A row of whole passes."""
    return {"max_drop": None, "hit_rate": 0.5, "changed_answers": 0.0, "speedup": 1.0} | figures


def test_a_service_that_was_not_measured_has_a_row_that_says_so(tmp_path: Path) -> None:
    assert set(reuse.service(tmp_path).splitlines()[2:]) == {
        f"| {task} | {kind} |  | {MISSING} |  |  |  |  |  |  |  |"
        for group, kind in (("service_small", "calibrated"), ("service_exact", "exact repeats"))
        for task in reuse.SERVICES[group]
    }
    told = {"threads": 2, "accuracy_drop": 0.0, "speedup_min": 1.1, "speedup_max": 1.3}
    row = passes(hit_rate=0.4, speedup=1.2, plain_ms=5.0, hit_ms=1.0, miss_ms=None, **told)
    write(tmp_path, "service_exact", "support_desk", measure="service", summary=[row])
    told = cells(reuse.service(tmp_path), "support_desk", "exact repeats")
    assert told[2:] == ["2", "40.0 %", "0.00 %", "0.00", "1.20 (1.10 to 1.30)", "72 %", "5.00", "1.00", ""]
    assert [line.split(" | ")[3].strip() for line in reuse.rates(tmp_path).splitlines()[2:]] == [MISSING] * 3
    write(tmp_path, "service_rates", "banking77", measure="set_rates", summary=[row | {"hit_rate_set": 0.41}])
    measured, *missing = reuse.rates(tmp_path).splitlines()[2:]
    assert "| 41 % | 2 | 40.0 % | 0.00 % | 1.20 (1.10 to 1.30) | 72 % |" in measured and all(
        MISSING in line for line in missing
    )


def test_a_calibration_that_a_run_lacks_is_told(tmp_path: Path) -> None:
    for task in TASKS:
        write(tmp_path, f"trust_{task}", task, calibrated=[served(None, 0.005, 0.5)], points=[])
    with pytest.raises(ConfigError, match="no calibration with growing sources"):
        reuse.calibrated(tmp_path)
    assert runs_if_any(tmp_path, "trust_bursts") == []


def test_the_gain_of_a_mode_is_that_of_whole_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "_paper", lambda results_dir: "")  # it needs runs of every claim

    def gains() -> list[str]:
        return [line.split(" | ")[3] for line in modes.modes(tmp_path).splitlines()[2:]]

    assert gains()[:3] == [MISSING] * 3 and gains()[3].endswith(MISSING)
    for task, hits, speedup in (("repeats", 0.6, 2.0), ("none", 0.0, 0.97), ("some", 0.1, 1.04), ("repeats", 0.6, 2.3)):
        write(tmp_path, "service_exact", task, measure="service", summary=[passes(hit_rate=hits, speedup=speedup)])
    assert gains()[0] == "2.00 to 2.30× at a hit rate of 60.0 %; 0.97 to 1.04× at 0.0 to 10.0 %"
    for target, hits, changed, speedup in ((0.01, 0.6, 0.004, 1.5), (0.01, 0.9, 0.009, 3.0), (0.005, 0.5, 0.001, 1.2)):
        row = passes(max_drop=target, hit_rate=hits, changed_answers=changed, speedup=speedup)
        write(tmp_path, "service_small", "banking77", measure="service", summary=[row])
    assert gains()[2] == (
        "1.20× after learning at a hit rate of 50.0 %: target 0.5 % of answers, 0.10 % changed; "
        "1.50 to 3.00× after learning at a hit rate of 60.0 to 90.0 %: target 1.0 % of answers, 0.40 to 0.90 % changed"
    )
    taken = {"method": "llmcache", "hit_rate": 0.05, "changed_answers": 0.001, "speedup": 0.9}
    write(tmp_path, "prefix_chat", "chat", measure="prefix", methods={"llmcache": taken | {"speedup": 2.5}})
    write(tmp_path, "banking77", "banking77", measure="serve", methods={"nocache": {"method": "nocache"}, "tau": taken})
    assert gains()[1] == "first token, calls in turns: 2.50× in conversations"
    assert gains()[3].endswith("0.90× at a hit rate of 5.0 %, 0.10 % of answers changed (calls in turns)")
