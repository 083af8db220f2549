"""Measures: one file each, with its settings and `run(experiment, folders) -> Outcome`.

experiment -> serve, engines, prefix, ... methods answer requests, and are timed
           -> sweep, trust, bound, ...    a recorded pass is replayed
           -> bench                       single calls are timed
           -> serve_load, serve_soak      servers get requests over their socket (`over_http`)
           -> commands                    shell commands are timed
           -> Outcome                     rows and figures, for the folder of the run
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.measures import (
    bound,
    commands,
    compiled,
    decode,
    engine_parity,
    engines,
    latency,
    layers,
    observe,
    parity,
    policies,
    prefix,
    prefix_limit,
    ray_replicas,
    second_pass,
    serve,
    serve_load,
    serve_soak,
    service,
    set_rates,
    store_faults,
    sweep,
    trust,
)
from experiments.measures.base import Experiment, Outcome
from experiments.support.files import Folders


@dataclass(frozen=True, slots=True)
class Measure:
    settings: type[Experiment]
    run: Callable[[Any, Folders], Outcome]  # `(experiment, folders) -> outcome`
    details: tuple[str, ...] = ()  # figures that no page reads, by dotted key: written with the rows only


#: Such figures of each point of a curve.
POINT_DETAILS = tuple(
    f"points.{name}" for name in ("accuracy_nocache", "accuracy_ci", "changed_per_hit", "extras", "hits_by_rung")
)
TRUST_DETAILS = tuple(f"points.{name}" for name in ("accuracy", "accuracy_drop_ci", "by_intent", "changed_answers_ci"))


MEASURES: Mapping[str, Measure] = {
    "serve": Measure(serve.Serve, serve.run),
    "observe": Measure(observe.Observe, observe.run),
    "sweep": Measure(sweep.Sweep, sweep.run, ("nocache", "summary", *POINT_DETAILS)),
    "layers": Measure(layers.Layers, layers.run),
    "latency": Measure(latency.Latency, latency.run),
    "compiled": Measure(compiled.Compiled, compiled.run),
    "trust": Measure(trust.Trust, trust.run, ("nocache", "summary", *POINT_DETAILS, *TRUST_DETAILS)),
    "bound": Measure(bound.Bound, bound.run),
    "service": Measure(service.Service, service.run, ("ways",)),
    "engines": Measure(engines.Engines, engines.run, ("ways",)),
    "engine_parity": Measure(engine_parity.EngineParity, engine_parity.run),
    "serve_load": Measure(serve_load.ServeLoad, serve_load.run),
    "ray_replicas": Measure(ray_replicas.RayReplicas, ray_replicas.run),
    "serve_soak": Measure(serve_soak.ServeSoak, serve_soak.run),
    "set_rates": Measure(set_rates.SetRates, set_rates.run, ("ways",)),
    "second_pass": Measure(second_pass.SecondPass, second_pass.run, ("ways",)),
    "prefix": Measure(prefix.Prefix, prefix.run),
    "policies": Measure(policies.Policies, policies.run),
    "prefix_limit": Measure(prefix_limit.PrefixLimit, prefix_limit.run, ("ways.times",)),
    "store_faults": Measure(store_faults.StoreFaults, store_faults.run),
    "decode": Measure(decode.Decode, decode.run),
    "parity": Measure(parity.Parity, parity.run),
    "commands": Measure(commands.Commands, commands.run),
}
