"""Commands that need the experiments. `llmcache` finds them through the entry point `llmcache.commands`.

Each is a function that parses, calls the experiments and prints.
"""

from collections.abc import Callable, Mapping
from typing import Final

from experiments.cli import bench, demo, prepare, runs

COMMANDS: Final[Mapping[str, Callable[..., None]]] = {
    "demo": demo.command,
    "prepare": prepare.command,
    "run": runs.run,
    "sweep": runs.sweep,
    "report": runs.report,
    "bench latency": bench.latency,
    "bench memory": bench.memory,
}
