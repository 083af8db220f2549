"""`python -m judge`: runs all families in all ways, then prints the verdict; exit status 1 if it fails."""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from judge import archive
from judge.verdict import Finding, find, read_allowed, table

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]
WAYS = ("off", "cold", "hit")
TIMEOUT_S = 1800
N_PROCESSES = 2
RESULTS = archive.ARCHIVES / "results"

SENTENCES = "sentences"
# Our test classes, of which `t5` runs `t5_encoder` too; a checkout's folders have the same names.
ALL = f"bert,roberta,distilbert,electra,mpnet,deberta_v2,modernbert,gpt2,llama,qwen2,mistral,t5,bart,{SENTENCES}"

# Tests of sentence-transformers' checkout that encode. The rest trains, needs the hub, or starts processes.
SENTENCE_TESTS = [
    "tests/sentence_transformer/test_model.py",
    "tests/sentence_transformer/test_compute_embeddings.py",
    "tests/sentence_transformer/evaluation",
    "tests/cross_encoder/test_model.py",
    "tests/cross_encoder/evaluation",
]

# Tests left out, by a part of their name. None of them calls a wrapped model.
LEFT_OUT = {
    "compile": "graphs: a compiled model bypasses the cache",
    "flash": "need a GPU",
    "fsdp": "need several processes",
    "test_tp_": "need several processes",
    "training": "caches are of inference; 300 steps each",
    "bc_torch_dtype": "loads every class in every dtype, and calls none",
    "reverse_loading": "renames weights, and calls no model",
    "ntegration": "weights of the hub",
    "hsdp": "need several processes",
    "pipeline": "models of the hub",
}


def main() -> int:
    """Run the command; return the exit status."""
    asked = _read_arguments()
    families = (asked.families or ALL).split(",")
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not asked.transformers:
        archive.fetch("transformers")
    with ThreadPoolExecutor(N_PROCESSES) as pool:
        list(pool.map(lambda one: _run(*one, asked), [(family, way) for family in families for way in WAYS]))
        list(pool.map(lambda family: _run_twice(family, asked), families))
    return _judge(families, is_whole=not asked.families)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m judge", description="Run other people's tests on wrapped models.")
    parser.add_argument("--families", default="", help=f"some only, of {ALL}")
    parser.add_argument(
        "--transformers", default="", help="a checkout with its own tests, in place of the archive and our classes"
    )
    parser.add_argument("--sentences", default="", help="likewise of sentence-transformers")
    asked = parser.parse_args()
    if unknown := {*filter(None, asked.families.split(","))} - {*ALL.split(",")}:
        parser.error(f"--families: unknown: {', '.join(sorted(unknown))}; known: {ALL}")
    return asked


def _run(family: str, way: str, asked: argparse.Namespace, only: list[str] | None = None) -> None:
    out, log = (RESULTS / f"{family}-{way}.{kind}" for kind in ("json", "log"))
    out.unlink(missing_ok=True)
    where, targets = _targets(family, asked)
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(HERE / "outside.ini"), "-p", "judge.plugin"]
    chosen = " or ".join(only or []) or "not (" + " or ".join(LEFT_OUT) + ")"
    environment = os.environ | {
        "LLMCACHE_OUTSIDE_WAY": way,
        "LLMCACHE_OUTSIDE_OUT": str(out),
        "LLMCACHE_OUTSIDE_SENTENCES": "1" if family == SENTENCES else "",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
        "PYTHONHASHSEED": "0",
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",  # generate() with a static cache would compile, for minutes
    }
    with log.open("w") as told:
        try:
            command += ["--rootdir=.", *targets, "-k", chosen]
            subprocess.run(
                command, cwd=where, env=environment, stdout=told, stderr=told, check=False, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            print(f"{family}: way {way} took more than {TIMEOUT_S} s", flush=True)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    print(f"{family} {way}: {lines[-1] if lines else 'no output'}", flush=True)


def _targets(family: str, asked: argparse.Namespace) -> tuple[Path, list[str]]:
    """Return the folder to run in, and pytest's targets."""
    if family == SENTENCES and asked.sentences:
        source = Path(asked.sentences)
        return source, ["-p", "judge.hub", *(test for test in SENTENCE_TESTS if (source / test).exists())]
    if family == SENTENCES:
        return HERE, ["--confcutdir=.", "sentences.py"]
    if asked.transformers:
        return Path(asked.transformers), ["--noconftest", f"tests/models/{family}/test_modeling_{family}.py"]
    classes = [family, "t5_encoder"] if family == "t5" else [family]
    return HERE, ["--noconftest", *(f"families.py::{name}" for name in classes)]


def _run_twice(family: str, asked: argparse.Namespace) -> None:
    """Run tests that the cache breaks unwrapped, with every call made twice: those that fail only count calls."""
    read = _read(family)
    if "off" not in read or "hit" not in read:
        return
    hit = read["hit"]["outcomes"]
    changed = [t for t, o in read["off"]["outcomes"].items() if o == "passed" and hit.get(t) != "passed"]
    if changed:
        _run(family, "twice", asked, [test.split("::")[-1].split("[")[0] for test in changed])


def _read(family: str) -> dict[str, dict[str, Any]]:
    files = {way: RESULTS / f"{family}-{way}.json" for way in (*WAYS, "twice")}
    return {way: json.loads(file.read_text(encoding="utf-8")) for way, file in files.items() if file.is_file()}


def _judge(families: list[str], is_whole: bool) -> int:
    allowed = read_allowed(HERE / "allowed.toml")
    findings: list[Finding] = []
    trouble: list[str] = []
    for family in families:
        read = _read(family)
        missing = [way for way in WAYS if way not in read or not read[way]["outcomes"]]
        if missing:
            trouble.append(f"{family}: no results of way {', '.join(missing)}; see {RESULTS}")
            continue
        print("\n" + table(family, read))
        findings += find(family, read)
    open_ones = [one for one in findings if not sum(entry.covers(one) for entry in allowed)]  # every entry counts
    unused = [entry for entry in allowed if not entry.n_used and is_whole and not trouble]
    print(f"\n{len(findings)} differences, {len(findings) - len(open_ones)} of them allowed")
    for one in open_ones:
        print(f"  {one.family} {one.way}: {one.kind}: {one.where}: {one.text}")
    for entry in unused:
        print(f"  allowed, and not met any more: {entry.kind} {entry.where} ({entry.reason})")
    for line in trouble:
        print(f"  {line}")
    return 1 if open_ones or unused or trouble else 0


if __name__ == "__main__":
    sys.exit(main())
