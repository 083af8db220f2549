"""Kinds of runs: one file each, with its settings and `run(experiment, folders) -> Outcome`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.measures import (
    adversaries,
    bound,
    decode,
    drift,
    embeddings,
    index_scale,
    latency,
    layers,
    observe,
    pairs,
    parity,
    payback,
    poisoning,
    prefix,
    second_pass,
    serve,
    service,
    sharing,
    sweep,
    trust,
)
from experiments.measures.base import Experiment, Outcome
from experiments.support.folders import Folders


@dataclass(frozen=True, slots=True)
class Measure:
    """One kind of run."""

    settings: type[Experiment]
    run: Callable[[Any, Folders], Outcome]  # `(experiment, folders) -> outcome`


MEASURES: Mapping[str, Measure] = {
    "serve": Measure(serve.Serve, serve.run),
    "observe": Measure(observe.Observe, observe.run),
    "sweep": Measure(sweep.Sweep, sweep.run),
    "layers": Measure(layers.Layers, layers.run),
    "latency": Measure(latency.Latency, latency.run),
    "trust": Measure(trust.Trust, trust.run),
    "bound": Measure(bound.Bound, bound.run),
    "adversaries": Measure(adversaries.Adversaries, adversaries.run),
    "drift": Measure(drift.Drift, drift.run),
    "embeddings": Measure(embeddings.Embeddings, embeddings.run),
    "index_scale": Measure(index_scale.IndexScale, index_scale.run),
    "pairs": Measure(pairs.Pairs, pairs.run),
    "poisoning": Measure(poisoning.Poisoning, poisoning.run),
    "payback": Measure(payback.Payback, payback.run),
    "service": Measure(service.Service, service.run),
    "second_pass": Measure(second_pass.SecondPass, second_pass.run),
    "prefix": Measure(prefix.Prefix, prefix.run),
    "sharing": Measure(sharing.Sharing, sharing.run),
    "decode": Measure(decode.Decode, decode.run),
    "parity": Measure(parity.Parity, parity.run),
}
