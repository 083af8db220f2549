"""The commands on tiny models, each once from end to end; bad input is one line."""

import csv
import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from experiments.cli.options import INTERRUPTED
from experiments.measures import MEASURES, Measure
from experiments.measures.base import Outcome
from experiments.measures.bench import latency
from experiments.methods import METHODS
from experiments.models.loading import UNTRAINED
from experiments.runs import runner
from experiments.runs.grid import load_experiments
from experiments.runs.runner import RunFolder
from experiments.support.files import Folders, held
from experiments.tasks import TASKS, build
from llmcache import LLMCache
from llmcache.cli.main import app
from tests.experiments.commands import Commands
from tests.experiments.measuring import TASK, learning
from tests.tiny_models import CLASSIFIERS, GENERATORS, save_bert
from tests.tiny_models import build as build_model

ROOT = Path(__file__).parents[2]
DATA = {"path": ["part0.jsonl", "part1.jsonl"], "text": "question", "label": "intent"}
STREAM = {"name": "stream", "model": UNTRAINED, "data": DATA}
RUN = {"measure": "serve", "task": STREAM, "methods": [{"method": "llmcache", "tau": 0.8}], "rounds": 1, "warmup": 0}
TEXT = {"name": "wikitext", "model": UNTRAINED, "limit": 12, "data": "made", "window": 16}
LABELS = {"name": "stream", "model": UNTRAINED, "limit": 20, "data": {"path": "support_desk", "limit": 300}}
SIZES = {"max_entries": [8, 16], "compression": [{"name": "none"}, {"name": "int8"}], "tau": 0.8}
CALLS = {
    **{name: ["gpt2-tiny"] for name in ("models", "token_heads", "generate")},
    "rounds": 10,
    "seq_len": 16,
    "new_tokens": 2,
    "generate_rounds": 3,
    "service_rounds": 0,
    "entries": {"as the paper": 8, "all tokens": 8, "pooled": 64},
}
TRUST = learning("trust", seed=[0, 3], task=TASK | {"limit": None}, learn=240, taus=[0.9])
#: One experiment for each claim of the paper, under the name by which it is judged.
CLAIMED = {
    "table1_latency": {"measure": "latency", **CALLS},
    "table2_accuracy": RUN | {"task": TEXT, "methods": [{"method": "llmcache", "tau": 0.8, "allow_unsafe": True}]},
    "fig3_hit_rate_by_layer": {"measure": "layers", "task": TEXT},
    "fig4_memory": {"measure": "observe", "task": LABELS, "cache": SIZES},
    "fig5_tau": {"measure": "sweep", "task": LABELS, "rounds": 1, "taus": [0.82, 0.9], "live_taus": [0.9]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models: `tiny`, which has no head, the classifier `bert`, and `gpt2-tiny`, which generates."""
    folder = tmp_path_factory.mktemp("models")
    save_bert(folder / "tiny", "where is my order")
    build_model(CLASSIFIERS["bert"]).save_pretrained(folder / "bert")
    build_model(GENERATORS["gpt2"]).save_pretrained(folder / "gpt2-tiny")
    return folder


@pytest.fixture
def config(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of an experiment in the working folder, with its data; models and data are looked up there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMCACHE_MODELS", str(models))
    monkeypatch.setenv("LLMCACHE_DATA", ".")
    for number in range(2):
        asked = [{"question": f"is order {i} late {number}", "intent": f"intent {i % 2}"} for i in range(20)]
        Path(f"part{number}.jsonl").write_text("\n".join(map(json.dumps, asked)))
    write("trust.yaml", TRUST)
    return write("tiny_stream.yaml", RUN)


def write(name: str, values: dict[str, Any]) -> Path:
    path = Path(name)
    path.write_text(yaml.safe_dump(values))
    return path


def results(group: str = "tiny_stream") -> list[Path]:
    return sorted(Path("results", group).glob("[!.]*"))


def figures(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())  # type: ignore[no-any-return]


def fake(monkeypatch: pytest.MonkeyPatch, *found: Any) -> list[Any]:
    """Make runs return or raise these in turn, and later runs the last; return the list of the runs' experiments."""
    ran: list[Any] = []

    def measure(experiment: Any, folders: Any) -> Outcome:
        outcome = found[min(len(ran), len(found) - 1)]
        ran.append(experiment)
        if isinstance(outcome, BaseException):
            raise outcome
        return Outcome([], outcome)

    monkeypatch.setattr(
        runner, "MEASURES", {name: Measure(known.settings, measure) for name, known in MEASURES.items()}
    )
    return ran


def test_results_are_the_same_wherever_data_lie_and_a_grid_runs_once_a_point(
    config: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("run", config) == 0
    (folder,) = results()
    shown = figures(folder)["methods"]["llmcache-tau=0.8"]
    told = (f"measured: {folder}", folder.name[:-9], "llmcache-tau=0.8", f"{shown['speedup']:.2f}", "20 requests")
    assert all(one in command.out.replace("\n", "") for one in told)
    shutil.copytree(".", "elsewhere", ignore=shutil.ignore_patterns("results"))
    monkeypatch.setenv("LLMCACHE_DATA", "elsewhere")
    assert command("run", Path("elsewhere", config)) == 0
    assert "kept from before: " in command.out and results() == [folder]
    assert command("run", config, "--force") == 0
    assert "measured: " in command.out and results() == [folder]
    assert command("run", config, "--set", "seed=[1, 2]", "task.limit=5") == 0  # both changes follow one --set
    assert [path.name.rpartition("-")[0][-6:] for path in results()[1:]] == ["seed=1", "seed=2"]
    assert figures(results()[2])["n"] == 5


def test_a_sweep_goes_on_after_failures_and_interruptions(
    config: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(config.name, RUN | {"seed": [0, 1, 2]})
    lost = write("lost.yaml", RUN | {"task": STREAM | {"data": {"path": "none.csv"}}})
    (first, *_) = load_experiments(config)
    with held(RunFolder(Path("results"), first).lock):
        assert "another process holds .tiny_stream.stream-untrained-seed=0-" in command.refused("run", config)
        with monkeypatch.context() as patch:
            fake(patch, {"seconds": 1.0}, KeyboardInterrupt())
            assert command("sweep", config) == INTERRUPTED
    assert "skipped: another process is measuring it" in command.out and len(results()) == 1
    assert command.err.startswith("llmcache: interrupted; what is finished stays")
    assert command("sweep", lost, config) == 1
    assert [command.out.count(told) for told in ("  failed: ", "  kept, ", "  measured, ")] == [1, 1, 2]
    *_, said, told = command.err.splitlines()
    assert said == "1 of 4 failed:" and told.startswith("lost none-untrained: data.path: no file")


def test_a_sweep_takes_all_configs_but_smoke(config: Path, command: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no YAML file in" in command.refused("sweep")
    Path("configs").mkdir()
    for name in ("a", "b", "smoke"):
        shutil.copy(config, Path("configs", f"{name}.yaml"))
    fake(monkeypatch, {"seconds": 1.0})
    monkeypatch.setattr("experiments.report.pictures.draw_all", lambda results_dir: [])  # there is nothing to draw
    assert command("sweep") == 0
    assert {path.name for path in Path("results").glob("[!.]*")} == {"a", "b", "raw"}


def test_smoke_runs_every_task_and_every_method(
    tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, without data or prepared models."""
    monkeypatch.chdir(ROOT)
    changes = ["task.limit=6", "task.model=untrained", "warmup=0"]
    assert command("run", "configs/smoke.yaml", "--results-dir", tmp_path, "--set", *changes) == 0
    runs = load_experiments("configs/smoke.yaml", changes)
    assert {run.experiment.task.name for run in runs} == TASKS.keys() - {"prompts"}  # prompts have no right answers
    served = set()
    for run in runs:
        folder = RunFolder(tmp_path, run)
        raw = tmp_path / "raw" / run.group / f"{folder.path.name}.csv"
        rows, methods = list(csv.DictReader(raw.read_text().splitlines())), folder.metrics["methods"]
        assert {found["method"] for found in methods.values()} == METHODS.keys()
        assert len(rows) == folder.metrics["n"] * len(methods) and "nan" not in {row["answer"] for row in rows}
        served |= {rung for found in methods.values() for rung in found["hits_by_rung"]}
    assert served >= {"paper", "document", "response"}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """A folder with the experiments behind the claims, and their results."""
    folder = tmp_path_factory.mktemp("report")
    for name, values in CLAIMED.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    options = ["--results-dir", str(folder / "results"), "--models-dir", str(models)]
    done = CliRunner().invoke(app, ["sweep", *map(str, sorted(folder.glob("*.yaml"))), *options])
    assert done.exit_code == 0 and "3 pictures" in done.output, done.output
    return folder


def test_a_report_shows_what_was_measured(swept: Path, command: Commands) -> None:
    configs, out = sorted(swept.glob("*.yaml")), swept / "results"
    assert command("report", *configs, "--results-dir", out) == 0
    assert "REPORT.md and 3 pictures" in command.out
    text = (out / "REPORT.md").read_text()
    assert all(f"## {name}\n" in text for name in CLAIMED)
    assert "nan" not in text.lower() and "None" not in text
    for name in ("fig3_hit_rate_by_layer", "fig4_memory", "fig5_tau"):
        assert f"]({name}/{name}.svg)" in text and "<svg" in (out / name / f"{name}.svg").read_text()
    changed = swept / "changed" / "fig4_memory.yaml"
    changed.parent.mkdir()
    changed.write_text(yaml.safe_dump(CLAIMED["fig4_memory"] | {"seed": 7}))
    refused = command.refused("report", changed, "--results-dir", out)
    assert "no results with the settings of these files, but 4 with others" in refused
    assert "measure first: llmcache sweep" in command.refused("report", changed, "--results-dir", swept / "none")


def test_a_calibration_is_shown_kept_and_saved(config: Path, command: Commands) -> None:
    def calibrated(*words: str) -> list[Any]:
        assert command("calibrate", "trust.yaml", "--json", "figures.json", *words) == 0
        found: list[Any] = json.loads(Path("figures.json").read_text())["calibrations"]
        assert all(f"changed <= {100 * one['max_drop']:g} %, 95 % sure" in command.out for one in found)
        assert all(f"{100 * one['chosen']['bound']:.2f} %" in command.out for one in found)
        return found

    _, second = calibrated("--set", "max_drops=[0.4, 0.2]")
    assert "trust support_desk-untrained-seed=0, the first of 2 runs" in command.out
    (alone,) = calibrated("--save", "saved")
    assert [alone[name] for name in ("chosen", "curve")] == [second[name] for name in ("chosen", "curve")]
    assert alone["chosen"] in alone["curve"] and alone["chosen"]["bound"] <= alone["max_drop"] == 0.2
    workload = build(load_experiments("trust.yaml")[0].experiment.task, Folders(), 0)
    with LLMCache.load(workload.module, "saved", tokenizer=workload.tokenizer) as cache:
        assert cache.calibration is not None and cache.calibration.is_certified
        for request in workload.requests[240:280]:
            cache(**request.inputs)
        assert cache.stats().hits["semantic"]


def test_a_benchmark_writes_every_figure(config: Path, command: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, stats = latency.Bench.run, []

    def run(bench: latency.Bench, *given: Any) -> Any:
        stats.append(bench.cache.stats())
        times = measure(bench, *given)
        stats.append(bench.cache.stats())
        return times

    monkeypatch.setattr(latency.Bench, "run", run)
    options = "--seq-len 32 --entries 64 --rounds 10 --block 10 --json figures.json --results-dir kept"
    assert command("bench", "latency", "--model", "bert", *options.split()) == 0
    assert all(told in command.out for told in ("2 service rounds of 10 calls", "too few for p90 and p99"))
    found, kept = json.loads(Path("figures.json").read_text()), figures(Path("kept/bench_latency"))
    kinds = [f"{kind}_ms" for kind in ("nocache", "miss", "hit", "exact_hit", "floor")]
    assert all(found[kind]["median"] > 0 and (found[kind]["n"], found[kind]["p99"]) == (10, None) for kind in kinds)
    assert {found["service"][kind]["n"] for kind in kinds} == {20} and kept.items() < found.items()
    before, after = stats  # the banks are full, so every miss evicts
    assert before.n_stored == after.n_stored == 64
    assert sum(after.n_evicted.values()) - sum(before.n_evicted.values()) == after.n_misses - before.n_misses > 0
    sizes = ("--entries", 1000, "--width", 32, "--seq-len", 8)
    assert command("bench", "memory", *sizes, "--json", "figures.json") == 0
    assert json.loads(Path("figures.json").read_text())["payload_bytes_per_entry"] == 64


def test_the_gpu_target_measures_all_that_it_says(
    tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every dtype, with banks on host and device, eager and compiled; each batch size is a run of its own."""
    monkeypatch.chdir(ROOT)
    ran = fake(monkeypatch, {"summary": []})
    given = f"BATCH_SIZES=1,2 MODELS=a,b GENERATE=b COMPILED=a MODES=null GPU_RESULTS={tmp_path}".split()
    printed = subprocess.check_output(["make", "--dry-run", "--no-print-directory", "bench-device", *given], text=True)
    for line in printed.replace("\\\n", "").splitlines():
        if "/llmcache " in line:
            assert command(*shlex.split(line)[1:]) == 0
    asked = [(one.measure, one.models, getattr(one, "batch_sizes", ())) for one in ran]
    calls = [
        (measure, models, (n,)) for measure, models in (("latency", ("a", "b")), ("compiled", ("a",))) for n in (1, 2)
    ]
    assert asked == [*calls, ("decode", ("b",), ())]
    assert {(one.dtypes, one.banks) for one in ran} == {(("float32", "bfloat16"), ("host", "device"))}


def set_to(change: str) -> list[str]:
    return ["run", "tiny_stream.yaml", "--set", change]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (set_to("task.data.text=txt"), "has no column 'txt'; columns found: 'question', 'intent'"),
        (set_to("task.data.path=none.csv"), "no file"),
        (set_to("task.model=no/such"), "model: 'no/such' could not be loaded"),
        (set_to("task.model=minilm-snips"), "make it: llmcache prepare minilm-snips --models-dir "),
        (set_to("task.max_length=999"), "max_length: 999 is more than this model's 512 positions"),
        (set_to("task.data.limit=1"), "head.fit_share: "),
        (set_to("task={name: squad_v2, model: tiny, data: made}"), "model: 'tiny' has no trained span head"),
        (set_to("task={name: squad_v2, model: tiny}"), "squad_v2/eval.json; say where the data is with --data-dir"),
        (set_to("methods=[{method: llmcache, payload: cls}]"), "methods: llmcache-payload=cls: payload: the head"),
        (["run", "none.yaml"], "none.yaml: No such file or directory"),
        (["run", "tiny_stream.yaml", "no-such.yaml"], "no-such.yaml"),
        (["run", "."], ".: is a folder; name the YAML files in it: *.yaml"),
        (
            ["run", "tiny_stream.yaml", "--results-dir", "part0.jsonl"],
            "part0.jsonl: cannot be made a folder (File exists)",
        ),
        (["sweep", "tiny_stream.yaml", "--results-dir", "/proc/x"], "--results-dir /proc/x: cannot be made a folder"),
        (["calibrate", "tiny_stream.yaml", "other.yaml"], "give one CONFIG (got "),
        (["calibrate", "tiny_stream.yaml", "--json", "."], ".: cannot be written"),
        (["calibrate", "tiny_stream.yaml"], "measure: 'serve' learns from no requests"),
        (["calibrate", "trust.yaml", "--set", "task.limit=90"], "90 requests cannot show a loss of at most 0.2"),
        (["calibrate", "trust.yaml", "--set", "cache.max_drop=0.1"], "an experiment asks for the losses in max_drops"),
        (["calibrate", "trust.yaml", "--set", "cache.tau=0.9"], "max_drop with tau=0.9: "),
        (["calibrate", "trust.yaml", "--save", "x", "--set", "max_drops=[0.2, 0.3]"], "--save keeps one calibration: "),
        (["bench", "latency", "--model", "nowhere"], "bert-base"),
        (["bench", "latency", "--model", "gpt2-wikitext"], "make it: llmcache prepare gpt2-wikitext --models-dir "),
        (["bench", "latency", "--device", "cuda:99"], "(got 'cuda:99')"),
        (["bench", "latency", "--model", "bert", "--seq-len", "500"], "at most 64"),
        (["bench", "latency", "--json", "none/figures.json"], "folder that exists"),
        (["bench", "memory", "--width", "20"], "multiple of 8"),
        (["bench", "memory", "--seq-len", "1000"], "at most 512"),
        (["prepare", "minilm-snips", "no-such"], "recipe: 'no-such' is not known; known: minilm-squad_v2, "),
        (["prepare", "minilm-snips", "--epochs=0"], "epochs: must be more than 0 (got 0.0)"),
        (["prepare", "minilm-support-desk", "--base=/no/such"], "model: '/no/such' could not be loaded (Repo id"),
        (["prepare", "minilm-squad_v2"], "data: no file squad_v2/train-subset.json; say where"),
        (["prepare", "minilm-openbookqa"], "data: no file openbookqa/train.jsonl; say where"),
        (["prepare", "gpt2-wikitext"], "data: no file wikitext/wikitext-2_train.tokens.txt;"),
        (["demo", "--n", "100"], "the first 1200 requests are learned from; give more"),
    ],
)
def test_bad_input_is_one_line(words: list[str], error: str, config: Path, command: Commands) -> None:
    assert error in command.refused(*words)
    assert results() == []
