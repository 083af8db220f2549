"""Measure `prefix`: speed-up of the time to first token when prefixes of prompts are known.

Time to first token (TTFT) runs from the prompt's tokens to the first new token's id, storing included. `recompute` is
the model alone with a K/V cache per request, transformers' `DynamicCache`: the baseline of all methods. Methods answer
in turns, as in `experiments.measures.serve`.

If a share s of all tokens is known and free, prefill takes 1 - s of its time: 1 / (1 - s) is the ceiling of the ratio
of sums. It bounds no single request, and attention to known tokens is still paid for. A ratio over a subset of
requests has the ceiling of that subset: `known` and `known_ceiling` leave out requests without known tokens.

Sizes: R rounds, N requests.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.measures.base import Outcome
from experiments.measures.serve import Serve, measure
from experiments.methods import NOCACHE, MethodSettings
from experiments.methods.base import Served
from experiments.metrics.metrics import Trace, clusters, hit_rates, percentiles, speed
from experiments.support.files import Folders
from experiments.tasks import prompts
from experiments.tasks.prompts import Prompts

#: Name of the model alone in results: it computes each prompt again.
RECOMPUTE = "recompute"

#: Target for the ratio of sums as a share of the ceiling, where prefixes repeat as in Mooncake's trace.
ASKED = 0.9


class Prefix(Serve):
    # Methods to compare, besides the model alone.
    methods: tuple[MethodSettings, ...] = (MethodSettings.make({"method": "llmcache"}),)


def run(experiment: Prefix, folders: Folders) -> Outcome:
    workload = prompts.of(experiment.task, folders, experiment.seed)
    traces = measure(workload, experiment.at_work(workload), experiment.rounds, experiment.warmup)
    base = traces.pop(NOCACHE)
    figures = {label: _figures(workload, base, trace, experiment.seed) for label, trace in traces.items()}
    metrics = {
        **experiment.about(workload),
        "rounds": experiment.rounds,
        "recompute_ms": percentiles(base.ms.ravel()),
        "methods": figures,
        "summary": [{"method": label, **_shown(workload, row)} for label, row in figures.items()],
    }
    return Outcome(_rows(workload, {RECOMPUTE: base, **traces}) if experiment.keeps_rows else [], metrics)


def _figures(workload: Prompts, base: Trace, trace: Trace, seed: int) -> dict[str, Any]:
    known = np.array(workload.known) > 0
    reused = sum(_reused(workload, number, note) for number, note in enumerate(trace.notes))
    ratios = base.ms / trace.ms
    n_same = sum(one == other for one, other in zip(base.answers, trace.answers, strict=True))
    rounds = speed(base, trace)
    return {
        **hit_rates(trace.served[0], clusters(workload), seed),
        **rounds,
        "of_ceiling": rounds["speedup"] / workload.facts["ceiling"],
        "asked": ASKED * workload.facts["ceiling"],
        "ratio_median": _over_rounds(np.median(ratios, axis=1)),
        "known": _over_rounds(_sums(base.ms[:, known], trace.ms[:, known])),
        **ceiling_of_known(_tokens(workload, trace)),
        "new": _over_rounds(_sums(base.ms[:, ~known], trace.ms[:, ~known])),
        "share_reused": reused / workload.facts["n_tokens"],
        "n_same": n_same,
        "is_same": n_same == len(trace.answers),
        "hit_ms": percentiles(trace.ms[trace.is_hit]),
        "hit_recompute_ms": percentiles(base.ms[trace.is_hit]),
        "miss_ms": percentiles(trace.ms[~trace.is_hit]),
        "miss_recompute_ms": percentiles(base.ms[~trace.is_hit]),
        "bytes": trace.nbytes,
        "bypassed": int((trace.served[0] == "bypassed").sum()),
    }


def ceiling_of_known(rows: Iterable[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """Return `known_n`, `known_share` and `known_ceiling` over prompts with known tokens; None without such prompts."""
    # Known tokens are whole blocks that came before. If the cache also serves tokens of the next block, those count as
    # known, too.
    told = [
        (int(row["n_tokens"]), max(int(row["n_known"]), int(row["n_reused"]))) for row in rows if int(row["n_known"])
    ]
    n_tokens, n_known = (sum(column) for column in zip(*told, strict=True)) if told else (0, 0)
    return {
        "known_n": len(told),
        "known_share": n_known / n_tokens if told else None,
        "known_ceiling": n_tokens / (n_tokens - n_known) if told else None,
    }


def _tokens(workload: Prompts, trace: Trace) -> Iterator[dict[str, int]]:
    """Yield for each request its tokens, its known tokens, and those served without running a layer."""
    for number, note in enumerate(trace.notes):
        n_tokens = workload.requests[number].inputs["input_ids"].shape[1]
        yield {
            "n_tokens": n_tokens,
            "n_known": workload.known[number],
            "n_reused": _reused(workload, number, note),
        }


def _sums(base_ms: NDArray[np.float64], ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ratios of summed times (R, n) by round (R,); empty if n is 0."""
    return base_ms.sum(axis=1) / ms.sum(axis=1) if ms.shape[1] else np.array([])


def _over_rounds(values: NDArray[np.float64]) -> dict[str, float] | None:
    """Return median and range over rounds (R,); None without values."""
    if not len(values):
        return None
    return {"median": float(np.median(values)), "min": float(values.min()), "max": float(values.max())}


def _reused(workload: Prompts, number: int, note: Served) -> int:
    """Return the number of a request's tokens that were served without running a layer."""
    return workload.requests[number].inputs["input_ids"].shape[1] if note.by == "exact" else note.n_prefix


def _shown(workload: Prompts, row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tokens known": workload.facts["share_known"],
        "reused": row["share_reused"],
        "ceiling": workload.facts["ceiling"],
        "TTFT ratio": row["speedup"],
        "least": row["speedup_min"],
        "most": row["speedup_max"],
        "of ceiling": row["of_ceiling"],
        "prompts with known tokens": None if row["known"] is None else row["known"]["median"],
        "hit ms": None if row["hit_ms"] is None else row["hit_ms"]["median"],
        "miss ms": None if row["miss_ms"] is None else row["miss_ms"]["median"],
        "same first token": f"{row['n_same']} of {len(workload.requests)}",
        "MB": None if row["bytes"] is None else row["bytes"] / 1e6,
    }


def _rows(workload: Prompts, traces: Mapping[str, Trace]) -> list[dict[str, Any]]:
    base = traces[RECOMPUTE].answers
    return [
        {
            "id": request.id,
            "method": label,
            **tokens,
            "served": trace.notes[number].by,
            "first_token": trace.answers[number],
            "is_same": int(trace.answers[number] == base[number]),
            "ttft_ms": round(float(trace.ms[0, number]), 4),
        }
        for label, trace in traces.items()
        for number, (request, tokens) in enumerate(zip(workload.requests, _tokens(workload, trace), strict=True))
    ]
