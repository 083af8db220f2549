"""The paper's claims, each with a rule that turns measurements into a verdict.

Rules use figures only. They were fixed before the run whose results are in this repository; after reading those
results, some were made stricter, and none more lenient: `docs/claims.md` lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from experiments.report.claims import quality, speed
from experiments.report.verdict import NOTHING, Judgement, Results, Verdict
from experiments.runs.read import Run


@dataclass(frozen=True, slots=True)
class Claim:
    said: str
    config: str  # experiment that tests it
    # `(runs of that experiment, at least one; all runs by experiment) -> judgement`
    judge: Callable[[Sequence[Run], Results], Judgement]


def judge(results: Results, missing: Mapping[str, Sequence[str]]) -> list[tuple[Claim, Judgement]]:
    """Return every claim with its judgement; a claim with missing runs gets no verdict."""
    return [(claim, _judge(claim, results, missing.get(claim.config, ()))) for claim in CLAIMS]


def _judge(claim: Claim, results: Results, missing: Sequence[str]) -> Judgement:
    runs = results.get(claim.config)
    found = claim.judge(runs, results) if runs else NOTHING
    if not missing or found.verdict is Verdict.NOT_MEASURED:
        return found
    return replace(found, verdict=Verdict.INCOMPLETE, condition=f"(not measured: {', '.join(missing)})")


CLAIMS: Sequence[Claim] = (
    Claim(
        "Table 1: latency falls from 218.6 to 91.3 ms (BERT-base) and 123.4 to 57.9 (DistilBERT) at batch 1 and 128 "
        "tokens",
        "table1_latency",
        partial(speed.latency, head="class"),
    ),
    Claim(
        "Table 1: latency falls from 304.8 to 112.5 ms (GPT-2 small) at batch 1 and 128 tokens",
        "table1_latency",
        partial(speed.latency, head="token"),
    ),
    Claim("Inference is up to 3.1 times as fast", "fig5_tau", speed.speed),
    Claim("Table 1: GPT-2 is faster than with K/V caching (177.3 ms)", "table1_latency", speed.generation),
    Claim(
        "Table 2: accuracy falls by less than half a point on WikiText-103, SQuAD v2 and OpenBookQA",
        "table2_accuracy",
        quality.accuracy,
    ),
    Claim("Table 2: accuracy stays nearer to that of the model than with DocCache", "fig5_tau", quality.documents),
    Claim(
        "Figure 3: up to 92 % of requests hit in low and middle layers, fewer above",
        "fig3_hit_rate_by_layer",
        quality.layers,
    ),
    Claim("Figure 4: the hit rate grows with the logarithm of the cache size", "fig4_memory", quality.memory),
    Claim("Figure 5: the best thresholds lie between 0.82 and 0.88", "fig5_tau", quality.taus),
)
