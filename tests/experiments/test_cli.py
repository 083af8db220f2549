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

from experiments.measures import MEASURES, Measure, demo
from experiments.measures.base import Outcome
from experiments.methods import METHODS
from experiments.models import loading
from experiments.models.loading import UNTRAINED, load
from experiments.report.pages import card
from experiments.runs import read, runner
from experiments.runs.grid import load_experiments
from experiments.runs.runner import RunFolder
from experiments.support.files import held
from experiments.tasks import TASKS
from llmcache import Advice, Way, lab
from llmcache.advice import encoder
from llmcache.cli.output import INTERRUPTED
from tests.experiments.helpers import TASK, Commands, learning
from tests.tiny_models import CLASSIFIERS, GENERATORS, save_bert
from tests.tiny_models import build as build_model

ROOT = Path(__file__).parents[2]
DATA = {"path": ["part0.jsonl", "part1.jsonl"], "text": "question", "label": "intent"}
STREAM = {"name": "stream", "model": UNTRAINED, "data": DATA}
RUN = {"measure": "serve", "task": STREAM, "methods": [{"method": "llmcache", "tau": 0.8}], "rounds": 1, "warmup": 0}
TRUST = learning("trust", seed=[0, 3], task=TASK | {"limit": None}, taus=[0.9])


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
    assert command("report", config) == 0 and "REPORT.md and 0 pictures" in command.out
    text, shown = Path("results/REPORT.md").read_text(), figures(folder)["methods"]["llmcache-tau=0.8"]
    assert "## tiny_stream\n" in text and f"| {shown['speedup']:.2f} (" in text
    refused = command.refused("report", config, "--set", "seed=1")
    assert "no results with the settings of these files, but 1 with others" in refused
    assert "measure first: llmcache sweep" in command.refused("report", config, "--results-dir", "none")
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
    Path("configs").mkdir()
    for name in ("a", "smoke"):  # all configs but smoke are those of a sweep
        shutil.copy(lost, Path("configs", f"{name}.yaml"))
    assert command("sweep") == 1 and "1 of 1 failed:" in command.err


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


def test_a_benchmark_writes_every_figure(config: Path, command: Commands) -> None:
    options = "--seq-len 32 --entries 64 --rounds 10 --block 10 --json figures.json --results-dir kept"
    assert command("bench", "latency", "--model", "bert", *options.split()) == 0
    assert all(told in command.out for told in ("2 service rounds of 10 calls", "too few for p90 and p99"))
    found, kept = json.loads(Path("figures.json").read_text()), figures(Path("kept/bench_latency"))
    kinds = [f"{kind}_ms" for kind in ("nocache", "miss", "hit", "exact_hit", "floor")]
    assert all(found[kind]["median"] > 0 and (found[kind]["n"], found[kind]["p99"]) == (10, None) for kind in kinds)
    assert {found["service"][kind]["n"] for kind in kinds} == {20} and kept.items() < found.items()
    sizes = ("--entries", 1000, "--width", 32, "--seq-len", 8)
    assert command("bench", "memory", *sizes, "--json", "figures.json") == 0
    assert json.loads(Path("figures.json").read_text())["payload_bytes_per_entry"] == 64


def programs_of(*given: str) -> list[list[str]]:
    """Return the arguments of each `llmcache` that `make` would run."""
    printed = subprocess.check_output(["make", "--dry-run", "--no-print-directory", *given], text=True)
    lines = printed.replace("\\\n", "").splitlines()
    return [shlex.split(line)[1:] for line in lines if "/llmcache " in line]


def test_each_part_of_the_short_gpu_run_runs_on_a_cpu_and_fills_its_table(
    tmp_path: Path, models: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(read, "was_idle", lambda env: True)
    given = f"DEVICE=cpu ENCODER=bert DECODER=gpt2-tiny GPU_RESULTS={tmp_path / 'gpu'}".split()
    ran = programs_of("gpu-parts", *given)
    assert len(ran) == len(card.TABLES) == 4
    for words, show in zip(ran, card.TABLES.values(), strict=True):
        assert "not measured" in show(tmp_path)
        assert command(*words, "--models-dir", models) == 0, command.err
        _, _, *rows = show(tmp_path).splitlines()
        assert rows and all(row.startswith("| none | ") for row in rows)
        assert "gpt2-tiny" in rows[0] or "bert" in rows[0]
        assert all(row.count("|") == rows[0].count("|") for row in rows)


def test_the_gpu_target_measures_all_that_it_says(
    tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every dtype, with banks on host and device, eager and compiled; each batch size is a run of its own."""
    monkeypatch.chdir(ROOT)
    ran = fake(monkeypatch, {"summary": []})
    given = f"BATCH_SIZES=1,2 MODELS=a,b GENERATE=b COMPILED=a MODES=null GPU_RESULTS={tmp_path}".split()
    for words in programs_of("bench-device", *given):
        assert command(*words) == 0
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
        (set_to("task.model=no/such"), "model: 'no/such' could not be loaded"),
        (set_to("task.max_length=999"), "max_length: 999 is more than this model's 512 positions"),
        (set_to("task.data.limit=1"), "head.fit_share: "),
        (set_to("task={name: squad_v2, model: tiny, data: made}"), "model: 'tiny' has no trained span head"),
        (set_to("task={name: squad_v2, model: tiny}"), "squad_v2/eval.json; say where the data is with --data-dir"),
        (["run", "none.yaml"], "none.yaml: No such file or directory"),
        (["run", "."], ".: is a folder; name the YAML files in it: *.yaml"),
        (["sweep"], "no YAML file in"),
        (["sweep", "tiny_stream.yaml", "--results-dir", "/proc/x"], "--results-dir /proc/x: cannot be made a folder"),
        (["bench", "latency", "--model", "nowhere"], "bert-base"),
        (["bench", "latency", "--device", "cuda:99"], "(got 'cuda:99')"),
        (["bench", "latency", "--json", "none/figures.json"], "folder that exists"),
        (["bench", "memory", "--width", "20"], "multiple of 8"),
        (["bench", "memory", "--seq-len", "1000"], "at most 512"),
        (["prepare", "minilm-snips", "no-such"], "recipe: 'no-such' is not known; known: minilm-squad_v2, "),
        (["prepare", "minilm-snips", "--epochs=0"], "epochs: must be more than 0 (got 0.0)"),
        (["prepare", "gpt2-wikitext"], "data: no file wikitext/wikitext-2_train.tokens.txt;"),
        (["demo", "--plot", "none/demo.png"], "folder that exists"),
    ],
)
def test_bad_input_is_one_line(words: list[str], error: str, config: Path, command: Commands) -> None:
    assert error in command.refused(*words)
    assert results() == []


def test_the_demo_shows_and_keeps_what_it_measures(
    tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMCACHE_MODELS", raising=False)
    classifier, decoder = load(UNTRAINED), load(UNTRAINED, "token")
    decoder.tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    monkeypatch.setattr(loading, "load", lambda name, *rest: decoder if name == loading.SMOLLM2 else classifier)
    monkeypatch.setattr(lab, "packaged_minilm", lambda: save_bert(tmp_path / "sentences", "where is my order"))
    monkeypatch.setattr(demo, "untrained", lambda tokenizer: decoder)
    monkeypatch.setattr(encoder, "find_missing", lambda: "onnx")  # an export takes long
    monkeypatch.setattr(demo, "SHORT", demo.Size(400, 0.2, (0.3,), 60))
    monkeypatch.setattr(demo, "N_FIT", 100)
    assert command("demo", "--json", "figures.json", "--results-dir", "kept") == 0
    report = json.loads(Path("figures.json").read_text())
    assert [way["name"] for way in report["ways"]][::5] == ["the model alone"] and len(report["ways"]) == 5
    assert report["recommendation"] in command.out and "1 of 3" in command.out and "5 of 5 answers" in command.out
    assert report["corpus"]["n"] == 60 and report["corpus"]["hit_rate"] > 0.5  # the others have unknown words alone
    assert "random weights" in command.out
    assert Path("llmcache-demo.png").read_bytes().startswith(b"\x89PNG")
    env = json.loads(Path("kept/demo/env.json").read_text())
    assert json.loads(Path("kept/demo/metrics.json").read_text()) | {"environment": env} == report
    Path("models/smollm2").mkdir(parents=True)
    Path("models/smollm2", loading.FIGURES).touch()
    monkeypatch.setattr(read, "was_idle", lambda env: False)
    assert command("demo") == 0
    assert "The machine was busy" in command.out and "SmolLM2-135M-Instruct, 5 users" in command.out


def test_an_interrupted_demo_shows_what_is_known(
    tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def interrupted(loaded: Any, size: Any, on_way: Any) -> None:
        on_way(
            Advice((Way("the model alone", "model(**inputs)", 1.0, 1.0, 1.0, bound=0.0),), 0.1, 9, 9, is_partial=True)
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load", lambda name: None)
    monkeypatch.setattr(demo, "desk", interrupted)
    assert command("demo", "--json", "figures.json") == INTERRUPTED
    assert "interrupted, so ways are missing" in command.out
    assert json.loads(Path("figures.json").read_text())["is_partial"]
