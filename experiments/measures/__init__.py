"""Measures: settings and `run(experiment, folders) -> Outcome`, a file each, or one for two that measure alike.

experiment -> serve, engines, prefix, ... methods answer requests, and are timed
           -> sweep, trust, bound, ...    a recorded pass is replayed
           -> bench                       single calls are timed
           -> serve_load, serve_soak, ... servers get requests over their socket (`over_http`)
           -> commands                    shell commands are timed
           -> Outcome                     rows and figures, for the folder of the run
harness: whole passes and interleaved rounds, for all calls that are timed in this process
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_type_hints

from experiments.measures.base import Experiment, Outcome
from experiments.support.files import Folders

#: Names of the measures, and where their functions are if not at `run` in the module of that name.
NAMES = (
    *("serve", "observe", "sweep", "layers", "latency", "compiled", "trust", "bound", "audit", "service", "engines"),
    *(
        "engine_parity",
        "serve_load",
        "serve_streams",
        "ray_replicas",
        "serve_soak",
        "overhead",
        "set_rates",
        "second_pass",
        "prefix",
        "policies",
    ),
    *("prefix_limit", "store_faults", "decode", "parity", "lm_eval", "tree", "turns", "commands", "advise", "beside"),
)
WHERE = {"set_rates": "service:run_at_rates", "engine_parity": "parity:run_engine"}
#: Figures that no page reads, by dotted key: of each point of a curve, and by measure. They are written with the rows.
OF_POINTS = ("accuracy_nocache", "accuracy_ci", "changed_per_hit", "extras", "hits_by_rung")
OF_TRUST = ("accuracy", "accuracy_drop_ci", "by_intent", "changed_answers_ci")
DETAILS: Mapping[str, tuple[str, ...]] = {
    "sweep": ("nocache", "summary", *(f"points.{name}" for name in OF_POINTS)),
    "trust": ("nocache", "summary", *(f"points.{name}" for name in (*OF_POINTS, *OF_TRUST))),
    **dict.fromkeys(("advise", "service", "engines", "set_rates", "second_pass"), ("ways",)),
    "prefix_limit": ("ways.times",),
}


@dataclass(frozen=True, slots=True)
class Measure:
    settings: type[Experiment]
    run: Callable[[Any, Folders], Outcome]  # `(experiment, folders) -> outcome`
    details: tuple[str, ...] = ()


def _find(name: str) -> Measure:
    module, _, function = WHERE.get(name, f"{name}:run").partition(":")
    run = getattr(import_module(f"{__name__}.{module}"), function)
    return Measure(get_type_hints(run)["experiment"], run, DETAILS.get(name, ()))


MEASURES: Mapping[str, Measure] = {name: _find(name) for name in NAMES}
