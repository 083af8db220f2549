"""Decisions of calibrated reuse on banking77, hwu64 and snips: recorded once, and compared after a change of the core.

    python -m experiments.decisions record --data-dir DATA [--to FOLDER] [STREAM ...]
    python -m experiments.decisions compare OLD NEW

A stream is that of `configs/trust_*.yaml`, seed 0, cut to `LIMIT` requests. The first `LEARN` are calibrated on; for
each later request the record holds what served it and its risk, for each of `CALIBRATIONS`. Nothing is audited. Only
the cache's public API is used, on one thread; on the same processor, records are reproducible.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from experiments.cli.options import DATA_VARIABLE
from experiments.methods.base import twin
from experiments.methods.cached import configure, serve_from
from experiments.replay.recording import Recording
from experiments.support.environment import describe
from experiments.support.files import Folders, write_whole
from experiments.tasks import build, make_task
from experiments.tasks.workload import Answer, Workload
from llmcache import ConfigError, LLMCache, LLMCacheError

FOLDER = Path("results/decisions")
LEARN, LIMIT, SEED = 2500, 5000, 0
STREAMS: Mapping[str, Any] = {
    "banking77": "banking77",
    "hwu64": "hwu64",
    "snips": ["snips/train.seq.in", "snips/test.seq.in"],
}
CALIBRATIONS: Sequence[Mapping[str, Any]] = (
    *({"max_drop": drop, "sources": "frozen"} for drop in (0.005, 0.01, 0.02)),
    {"max_drop": 0.01, "sources": "growing"},
)
ROUNDING = 1e-6  # tolerance for limits, and for the distance to the limit of risks whose decisions differ
UNIT = 1e-7  # unit of recorded risks, which are whole numbers
_INFINITE = 2.0  # stands for an infinite risk; finite risks are probabilities
#: Packages that results in floating point depend on; a subset of `support.environment.describe`.
_PACKAGES = ("torch", "transformers", "tokenizers", "faiss-cpu", "numpy", "scikit-learn")

Record = Mapping[str, Any]


def record(name: str, settings: Any, folders: Folders, learn: int = LEARN) -> Record:
    """Run a stream through each calibration.

    Args:
        name: Name of the stream.
        settings: Settings of its task, whose requests have one row each.
        folders: Where data and models lie.
        learn: Number of requests to calibrate on.

    Returns:
        Plain values. For each calibration, `served` has one letter per later request: `s` served from another request's
        state, `e` from its own, `-` computed; in upper case if the answer is not the model's own. `risks` has the risk
        in ten-millionths, None if no approximate search was made.
    """
    env = describe(SEED)
    workload = build(settings, folders, SEED)
    recording = Recording(workload)
    outputs = [recording.outputs[number] for number in range(len(workload.requests))]
    decided = [_decide(workload, recording.answers, learn, asked) for asked in CALIBRATIONS]
    return {
        "stream": name,
        **{name: env[name] for name in ("git", "git_dirty", "started", "cpu", "python")},
        "versions": {package: env["versions"][package] for package in _PACKAGES},
        "seed": SEED,
        "learn": learn,
        "n": len(outputs) - learn,
        "outputs": hashlib.sha256(torch.cat(outputs).numpy().tobytes()).hexdigest(),
        "decided": decided,
    }


def _decide(workload: Workload, own: Sequence[Answer], learn: int, asked: Mapping[str, Any]) -> Record:
    config = configure(workload, {"answer": "class", "audit": 0})
    served, risks = "", []
    with LLMCache.wrap(twin(workload.module), config=config, tokenizer=workload.tokenizer) as cache:
        made = cache.calibrate([request.inputs for request in workload.requests[:learn]], seed=SEED, **asked)
        later = serve_from(cache, workload, learn, f"{asked['sources']}, {asked['max_drop']:g}")
        for (answer, outcome), expected in zip(later, own[learn:], strict=True):
            letter = "-" if outcome.rung is None else outcome.rung[0]
            served += letter if answer == expected else letter.upper()
            risks.append(None if outcome.risk is None else round(min(outcome.risk, _INFINITE) / UNIT))
    chosen = made.chosen
    if chosen is None:
        raise ConfigError(f"{dict(asked)}: nothing is reused, so there are no decisions to record")
    return {
        "max_drop": made.max_drop,
        "sources": made.sources,
        "limit": chosen.limit,
        "hit_rate": chosen.hit_rate,
        "loss": chosen.loss,
        "bound": chosen.bound,
        "n_sources": made.n_sources,
        "n_tested": made.n_tested,
        "served": served,
        "risks": risks,
    }


def compare(old: Record, new: Record) -> Iterator[tuple[str, bool]]:
    """Compare two records of a stream: yield a line per calibration, and whether its decisions are the same.

    Limits must agree within `ROUNDING`. Hits, and whether they keep the model's answer, may differ only where the risk
    is within `ROUNDING` of the limit. With growing sources, requests after the first such difference are not compared.

    Raises:
        ConfigError: The records were made on different processors, or of different requests.
    """
    _check_comparable(old, new)
    for one, other in zip(old["decided"], new["decided"], strict=True):
        name = f"{old['stream']} {one['max_drop']:g} {one['sources']}"
        differing = [i for i, pair in enumerate(zip(one["served"], other["served"], strict=True)) if pair[0] != pair[1]]
        far = [i for i in differing if not _is_at_limit(one, i)]
        end = len(one["served"])
        if one["sources"] == "growing" and differing and differing[0] not in far:
            far, end = [], differing[0]
        pairs = zip(one["risks"][:end], other["risks"][:end], strict=True)
        off = max((abs(a - b) * UNIT for a, b in pairs if None not in (a, b)), default=0.0)
        is_same = abs(one["limit"] - other["limit"]) <= ROUNDING and not far
        told = "equal" if is_same else "DIFFERENT"
        yield (
            f"{name}: limit {one['limit']:.7f}, {other['limit']:.7f}; hits {_n_hits(one)}, {_n_hits(other)}, "
            f"{len(differing)} differ, {len(far)} of them far from the limit; risks differ by up to {off:.1e}: {told}",
            is_same,
        )


def _check_comparable(old: Record, new: Record) -> None:
    for name in ("seed", "learn", "n"):
        if old[name] != new[name]:
            raise ConfigError(f"{old['stream']}: {name} is {old[name]} in one record and {new[name]} in the other")
    if any(old[name] != new[name] for name in ("cpu", "versions", "outputs")):
        raise ConfigError(
            f"{old['stream']}: recorded on another processor or with other versions ({_place(old)}) than "
            f"{_place(new)}, where the same sums round otherwise. Record the old commit here, and compare with that:\n"
            f"    git worktree add build/old {old['git']}\n"
            "    (cd build/old && PYTHONPATH=. ../../.venv/bin/python -m experiments.decisions record "
            "--data-dir DATA --to ../decisions-old)\n"
            "    python -m experiments.decisions compare build/decisions-old NEW"
        )


def _place(known: Record) -> str:
    return ", ".join([str(known["cpu"]), *(f"{name} {version}" for name, version in known["versions"].items())])


def _is_at_limit(decided: Record, number: int) -> bool:
    risk = decided["risks"][number]
    return risk is not None and abs(risk * UNIT - decided["limit"]) <= ROUNDING + UNIT / 2


def _n_hits(decided: Record) -> int:
    return len(decided["served"]) - decided["served"].count("-")


def write(made: Record, folder: Path) -> Path:
    """Write a record as `folder/STREAM.json`: one line for the metadata, one per calibration."""
    lines = [json.dumps(one, separators=(",", ":")) for one in made["decided"]]
    about = json.dumps({name: value for name, value in made.items() if name != "decided"}).removesuffix("}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{made['stream']}.json"
    write_whole(path, f'{about}, "decided": [\n' + ",\n".join(lines) + "\n]}\n")
    return path


def read(folder: Path) -> dict[str, Record]:
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise ConfigError(f"{folder}: no records of decisions; record some: python -m experiments.decisions record")
    return found


def main(words: Sequence[str]) -> int:
    """Run a command. Returns 0; 1 if decisions differ; 2 if they cannot be compared or recorded."""
    parser = argparse.ArgumentParser(prog="python -m experiments.decisions", description="See the module's docstring.")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="Record decisions of the code as it is.")
    recording.add_argument("streams", nargs="*", metavar="STREAM", help=f"Some of {', '.join(STREAMS)}; default: all.")
    recording.add_argument("--data-dir", type=Path, help=f"Folder with the data sets; default: ${DATA_VARIABLE}.")
    recording.add_argument("--to", type=Path, default=FOLDER, help="Folder that is written to.")
    comparing = commands.add_parser("compare", help="Compare two folders of records.")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    given = parser.parse_args(words)
    try:
        return _record_all(given) if given.command == "record" else _compare_all(read(given.old), read(given.new))
    except LLMCacheError as error:
        print(error, file=sys.stderr)
        return 2


def _record_all(given: argparse.Namespace) -> int:
    folder = given.data_dir or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    torch.set_num_threads(1)
    for name in given.streams or STREAMS:
        if name not in STREAMS:
            raise ConfigError(f"{name}: no such stream; known: {', '.join(STREAMS)}")
        data = {"path": STREAMS[name], "order": "shuffled"}
        settings = make_task({"name": "held_out", "model": "minilm", "limit": LIMIT, "data": data})
        with threadpool_limits(limits=1):
            print(write(record(name, settings, Folders(folder)), given.to), flush=True)
    return 0


def _compare_all(old: Mapping[str, Record], new: Mapping[str, Record]) -> int:
    if missing := old.keys() - new.keys():
        raise ConfigError(f"not recorded anew: {', '.join(sorted(missing))}")
    verdicts = [verdict for name in old for verdict in compare(old[name], new[name])]
    for line, _ in verdicts:
        print(line)
    return 0 if all(is_same for _, is_same in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
