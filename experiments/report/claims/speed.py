"""Claims about time: what a request costs, how much faster a stream goes, and generation."""

from collections.abc import Sequence

from experiments import paper
from experiments.report.claims.harmless import PAPERS_CURVE, harmless_rows, is_harmless
from experiments.report.markdown import number, percent, points, ratio
from experiments.report.verdict import NOTHING, Judgement, Results, Verdict
from experiments.runs import Figures, Run


def latency(runs: Sequence[Run], results: Results) -> Judgement:
    told, needed = [], []
    for row in runs[0].metrics["calls"]:
        known = paper.MS.get((row["model"], row["head"]))
        if known is not None and row["kept"] == "as the paper" and row["batch_size"] == 1:
            without, with_cache = known
            share = hits_needed(row, without / with_cache)
            needed.append((row["model"], share))
            told.append(
                f"{row['model']}: {row['nocache_ms']:.1f} ms without a cache, a hit {row['hit_ms']:.1f}, a miss "
                f"{row['miss_ms']:.1f}; the paper's ratio of {without / with_cache:.2f} takes {percent(share, 0)} hits"
            )
    if not needed:
        return NOTHING
    why = (
        "A request costs what a hit costs or what a miss costs, so an average latency says how many requests hit, and "
        "little else. The paper gives none beside its table. What hit rates real streams allow is another claim."
    )
    if all(share > 1 for _, share in needed):
        return Judgement(Verdict.DOES_NOT_HOLD, "; ".join(told), why)
    shares = [f"{percent(share, 0)} ({model})" for model, share in needed if share <= 1]
    never = [f"; never for {model}" for model, share in needed if share > 1]
    return Judgement(Verdict.HOLDS_UNDER, "; ".join(told), why, f"a hit rate of {', '.join(shares)}{''.join(never)}")


def hits_needed(row: Figures, ratio: float) -> float:
    """Share of hits at which a stream goes `ratio` times as fast as without a cache; above 1: none is enough."""
    target: float = row["nocache_ms"] / ratio
    gain: float = row["miss_ms"] - row["hit_ms"]
    return (row["miss_ms"] - target) / gain if gain > 0 else float("inf")


def speed(runs: Sequence[Run], results: Results) -> Judgement:
    live = [(run.task, figures) for run in runs for figures in run.metrics["live"]]
    if not live:
        return NOTHING
    harmless = [pair for pair in live if is_harmless(*pair)]
    fastest = max(live, key=_by_speed)
    told = [f"fastest of {len(live)} live runs: {_run(*fastest)}"]
    if harmless:
        told.append(f"fastest with a drop of half a point at most: {_run(*max(harmless, key=_by_speed))}")
    large, stream = _large_model(runs, results)
    if large is not None:
        told.append(
            f"with BERT-base's costs of table 1 the most hits that a stream allows at that drop ({stream}) come to "
            f"{large:.2f} times"
        )
    why = (
        "A hit saves all layers, but not the embedding, the lookup and the head, and a miss costs the lookup on top. "
        "So speed is a matter of the hit rate, and the hit rate of how many answers may be another request's."
    )
    if harmless and max(map(_by_speed, harmless)) >= paper.SPEEDUP:
        return Judgement(Verdict.HOLDS, "; ".join(told), why)
    if large is not None and large >= paper.SPEEDUP:
        return Judgement(Verdict.HOLDS_UNDER, "; ".join(told), why, f"traffic such as {stream}")
    if _by_speed(fastest) >= paper.SPEEDUP:
        drop = min(figures["accuracy_drop"] for _, figures in live if figures["speedup"] >= paper.SPEEDUP)
        return Judgement(Verdict.HOLDS_UNDER, "; ".join(told), why, f"a loss of {points(drop)} points or more")
    return Judgement(Verdict.DOES_NOT_HOLD, "; ".join(told), why)


def _large_model(runs: Sequence[Run], results: Results) -> tuple[float | None, str]:
    """Speed-up of BERT-base at the highest hit rate of any stream that costs half a point at most, and that stream."""
    calls = [row for run in results.get("table1_latency", ()) for row in run.metrics["calls"]]
    costs = next((row for row in calls if row["model"] == "bert-base" and row["kept"] == "pooled"), None)
    allowed = [(harmless_rows(run, PAPERS_CURVE), run.task) for run in runs]
    if costs is None or not allowed:
        return None, ""
    rate, task = max(allowed)
    mean_ms = (1 - rate) * costs["miss_ms"] + rate * costs["hit_ms"]
    return costs["nocache_ms"] / mean_ms, f"{task}, {percent(rate)}"


def _by_speed(pair: tuple[str, Figures]) -> float:
    """Measured, or what the costs measured come to at the hit rate of the whole stream, whichever is more."""
    figures = pair[1]
    return max(figures["speedup"], figures["speedup_all"] or 0.0)


def _run(task: str, figures: Figures) -> str:
    whole = "" if figures["speedup_all"] is None else f" ({figures['speedup_all']:.2f} at the whole stream's hit rate)"
    return (
        f"{task} at tau {figures['tau']}, {number(figures['speedup'], 2)} times{whole}, {percent(figures['hit_rate'])} "
        f"hits, drop {points(figures['accuracy_drop'])} points, {percent(figures['changed_answers'])} of the answers "
        "changed"
    )


def generation(runs: Sequence[Run], results: Results) -> Judgement:
    row = next((row for row in runs[0].metrics["generation"] if row["model"] == "gpt2"), None)
    if row is None:
        return NOTHING
    without, with_kv = (row[f"{kind}_ms"]["median"] for kind in ("nocache", "kv_cache"))
    known, new = (row["ratios"][f"{kind}/kv_cache"] for kind in ("exact_hit", "miss"))
    measured = (
        f"{row['prompt_tokens']} prompt and {row['new_tokens']} new tokens: {without:.0f} ms without any cache, "
        f"{with_kv:.0f} with K/V caching; with llmcache on top {ratio(known)} times the latter where the prompt was "
        f"asked before, {ratio(new)} where not (median of the rounds' ratios, 5th to 95th percentile)"
    )
    why = (
        "K/V caching already removes what is computed twice within a generation; a cache across requests can only save "
        "the prefill, and only of a prompt that is known: the tokens after it have to be computed one by one."
    )
    if new["p95"] < 1:
        return Judgement(Verdict.HOLDS, measured, why)
    if known["p95"] < 1:
        return Judgement(Verdict.HOLDS_UNDER, measured, why, "the whole prompt was asked before")
    return Judgement(Verdict.DOES_NOT_HOLD, measured, why)
