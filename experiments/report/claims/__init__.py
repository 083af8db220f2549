"""The paper's claims, each with a rule that turns measurements into a verdict, and their table.

Rules use figures only. They were fixed before the run whose results are in this repository; after reading those
results, some were made stricter, and none more lenient: `docs/claims.md` lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from experiments.report.claims import rules
from experiments.report.claims.rules import NOTHING, Judgement, Results, Verdict
from experiments.report.markdown import table
from experiments.runs.read import Run


@dataclass(frozen=True, slots=True)
class Claim:
    said: str
    config: str  # experiment that tests it
    why: str
    # `(runs of that experiment, at least one; all runs by experiment) -> judgement`
    judge: Callable[[Sequence[Run], Results], Judgement]
    told: Callable[[Sequence[Run]], str]  # the deciding figures


def judge(results: Results, missing: Mapping[str, Sequence[str]]) -> list[tuple[Claim, Judgement]]:
    """Return every claim with its judgement; a claim with missing runs gets no verdict."""
    return [(claim, _judge(claim, results, missing.get(claim.config, ()))) for claim in CLAIMS]


def _judge(claim: Claim, results: Results, missing: Sequence[str]) -> Judgement:
    runs = results.get(claim.config)
    found = claim.judge(runs, results) if runs else NOTHING
    if not missing or found.verdict is Verdict.NOT_MEASURED:
        return found
    return replace(found, verdict=Verdict.INCOMPLETE, condition=f"(not measured: {', '.join(missing)})")


def verdicts(judged: Sequence[tuple[Claim, Judgement]], results: Results) -> str:
    """Return the table of claims with the deciding figures and the verdicts."""
    rows = [
        (
            f"[{claim.said}](configs/{claim.config}.yaml)",
            "" if found.verdict is Verdict.NOT_MEASURED else f"{claim.told(results[claim.config])}{_under(found)}",
            found.verdict,
            claim.why,
        )
        for claim, found in judged
    ]
    return table(("claim of LLMCache (Bansal 2025)", "measured", "verdict", "why"), rows).replace("---:", "---")


def _under(judgement: Judgement) -> str:
    """Return when a claim holds, or the note to its verdict, in brackets; "" without one."""
    told = judgement.condition
    if not told or told.startswith("("):
        return f" {told}".rstrip()
    return f" (holds under: {told})" if judgement.verdict is Verdict.HOLDS_UNDER else f" ({told})"


_A_CALL = (
    "A request costs what a hit costs or what a miss costs, so an average latency says how many requests hit, and "
    "little else."
)
CLAIMS: Sequence[Claim] = (
    Claim(
        "Table 1: latency falls from 218.6 to 91.3 ms (BERT-base) and 123.4 to 57.9 (DistilBERT) at batch 1 and 128 "
        "tokens",
        "table1_latency",
        _A_CALL,
        partial(rules.latency, head="class"),
        partial(rules.latency_told, head="class"),
    ),
    Claim(
        "Table 1: latency falls from 304.8 to 112.5 ms (GPT-2 small) at batch 1 and 128 tokens",
        "table1_latency",
        _A_CALL,
        partial(rules.latency, head="token"),
        partial(rules.latency_told, head="token"),
    ),
    Claim(
        "Inference is up to 3.1 times as fast",
        "fig5_tau",
        "A hit saves all layers, but not the embedding, the lookup and the head, and a miss costs the lookup on top.",
        rules.speed,
        rules.speed_told,
    ),
    Claim(
        "Table 1: GPT-2 is faster than with K/V caching (177.3 ms)",
        "table1_latency",
        "K/V caching already removes what is computed twice within a generation; a cache across requests can only save "
        "the prefill, and only of a prompt that is known: the tokens after it have to be computed one by one.",
        rules.generation,
        rules.generation_told,
    ),
    Claim(
        "Table 2: accuracy falls by less than half a point on WikiText-103, SQuAD v2 and OpenBookQA",
        "table2_accuracy",
        "When a layer's whole output is replaced, the layers above compute the earlier request's answer: spans point "
        "into another passage, next tokens follow another text.",
        rules.accuracy,
        rules.accuracy_told,
    ),
    Claim(
        "Table 2: accuracy stays nearer to that of the model than with DocCache",
        "fig5_tau",
        "Both compare mean embeddings and hand out another request's final states; whether they do it layer by layer "
        "changes what it costs, not what is answered.",
        rules.documents,
        rules.documents_told,
    ),
    Claim(
        "Figure 3: up to 92 % of requests hit in low and middle layers, fewer above",
        "fig3_hit_rate_by_layer",
        "One fingerprint and one tau decide for all layers at once, so the rate cannot differ between them.",
        rules.layers,
        rules.layers_told,
    ),
    Claim(
        "Figure 4: the hit rate grows with the logarithm of the cache size",
        "fig4_memory",
        "With requests as frequent as one over a power of their rank, twice the entries cover a share of traffic that "
        "changes slowly with size; once everything that repeats is held, more entries gain nothing.",
        rules.memory,
        rules.memory_told,
    ),
    Claim(
        "Figure 5: the best thresholds lie between 0.82 and 0.88",
        "fig5_tau",
        "Similarity of mean embeddings has another scale for every model and length of request: long texts of any "
        "content are more alike than short ones.",
        rules.taus,
        rules.taus_told,
    ),
)
