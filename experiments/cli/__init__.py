"""Commands that need the experiments. `llmcache` finds them through the entry point `llmcache.commands`.

One command a file, each with a function `command` that parses, calls the experiments and prints.
"""

from collections.abc import Callable, Mapping
from typing import Final

from experiments.cli import bench_latency, bench_memory, calibrate, demo, prepare, report, run, sweep

COMMANDS: Final[Mapping[str, Callable[..., None]]] = {
    "demo": demo.command,
    "prepare": prepare.command,
    "calibrate": calibrate.command,
    "run": run.command,
    "sweep": sweep.command,
    "report": report.command,
    "bench latency": bench_latency.command,
    "bench memory": bench_memory.command,
}
