"""Tables of prompts: time to first token, token parity, and whole generations."""

from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path

from experiments.measures.decode import KINDS
from experiments.report.markdown import Cell, columns, count, number, of, percent, ratio, size, speed, table
from experiments.report.pages.files import MISSING, runs_if_any, runs_of
from experiments.runs.read import Run

Row = tuple[str, ...]


def first_token(results_dir: Path) -> str:
    """Return the table of TTFT speed-ups, with the ceiling of the same prompts."""
    return table(
        ("prompts", "tokens known", "times as fast (slowest, fastest round)", "were known tokens free", "same token"),
        [*_mooncake(results_dir), *_chats(results_dir), *_others(results_dir)],
    )


def _mooncake(results_dir: Path) -> Iterator[Row]:
    for run in runs_of(results_dir, "prefix_mooncake"):
        blocks = run.config["task"]["stream"]["blocks"]
        yield (
            f"{run.metrics['n']} requests of [Mooncake's trace](configs/prefix_mooncake.yaml): conversations drawn, "
            f"the first {blocks} blocks of a prompt kept, 16 tokens a block of 512",
            *_all_prompts(run, "llmcache"),
        )


def _all_prompts(run: Run, label: str) -> Row:
    row = run.metrics["methods"][label]
    known = max(run.metrics["facts"]["share_known"], row["share_reused"])  # the first counts whole blocks only
    same = f"{row['n_same']:,} of {run.metrics['n']:,}"
    return (percent(known), speed(row), number(1 / (1 - known), 2), same)


def _chats(results_dir: Path) -> Iterator[Row]:
    for run in runs_of(results_dir, "prefix_chat"):
        stream, known = run.config["task"]["stream"], run.metrics["methods"]["llmcache"]
        what = f"conversations that [grow](configs/prefix_chat.yaml), {stream['turns']} turns"
        if run.task == "chat_window":
            share = f"{100 * stream['shared']:.0f} %"
            what = f"[{stream['length']} tokens](configs/prefix_chat.yaml), {share} of them those of the turn before"
        yield f"{what}; all turns", *_all_prompts(run, "llmcache")
        spread = known["known"]
        yield (
            "the same without first turns, which know nothing",
            percent(known["known_share"]),
            f"{spread['median']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})",
            number(known["known_ceiling"], 2),
            "",
        )


def _others(results_dir: Path) -> Iterator[Row]:
    for run in runs_of(results_dir, "prefix_system_prompt"):
        n, system = run.metrics["n"], run.config["task"]["stream"]["system"]
        what = f"{n} users after one [system prompt](configs/prefix_system_prompt.yaml) of {system} tokens"
        yield what, *_all_prompts(run, "llmcache")
    for run in runs_of(results_dir, "prefix_nothing_shared"):
        length = run.config["task"]["stream"]["length"]
        for label, told in (("llmcache", "as by default"), ("prefixes alone", "`exact=False`")):
            what = f"{length} tokens, [none of them known](configs/prefix_nothing_shared.yaml), {told}"
            yield what, *_all_prompts(run, label)


def prefix_limit(results_dir: Path) -> str:
    """Return the table of TTFT beside the least possible time; times are empty if the machine was busy."""
    runs = runs_if_any(results_dir, "prefix_limit")
    if not runs:
        return table(tuple(LIMIT), [(MISSING, *[""] * (len(LIMIT) - 1))])
    rows = [
        {**row, "rounds": run.config["rounds"], **({} if run.is_timed else UNTIMED)}
        for run in runs
        for row in run.metrics["ways"]
    ]
    return columns(LIMIT, sorted(rows, key=lambda row: (row["model"], row["length"], row["share"] or 0.0)))


def _ms(name: str) -> Cell:
    return lambda row: "" if row[name] is None else number(row[name])


LIMIT: Mapping[str, Cell] = {
    "model": itemgetter("model"),
    "tokens": of(count, "length"),
    "known": lambda row: "" if row["n_known"] is None else count(row["n_known"]),
    "model alone, ms": _ms("plain_ms"),
    "llmcache": _ms("cache_ms"),
    "limit": _ms("limit_ms"),
    "of limit": lambda row: "" if row["of_limit"] is None else percent(row["of_limit"]),
    "continuous batching": _ms("batching_ms"),
    "copy of the ready cache": _ms("copy_ms"),
    "same first token": lambda row: "" if row["n_same"] is None else f"{row['n_same']} of {row['rounds']}",
    "logits": lambda row: "" if row["max_diff"] is None else f"{row['max_diff']:.0e}",
    "not run": itemgetter("not_run"),
}


UNTIMED = dict.fromkeys(("plain_ms", "cache_ms", "limit_ms", "batching_ms", "copy_ms", "of_limit"))


def parity(results_dir: Path) -> str:
    """Return the table of continuations that keep the model's own tokens."""
    groups = ("prefix_parity", "prefix_parity_bfloat16", "prefix_soak")
    return table(
        (
            "greedy continuations",
            "model",
            "same tokens",
            "near ties",
            "wrong",
            "blocks that left",
            "resident, tenth to end",
        ),
        [
            (
                f"[{run.metrics['dtype']}](configs/{group}.yaml)",
                _model(run),
                f"{run.metrics['n_same']:,} of {run.metrics['n']:,}",
                f"{run.metrics['n_near_ties']}",
                f"{run.metrics['n_wrong']}",
                f"{run.metrics['n_evicted']:,}",
                f"{' to '.join(size(run.metrics['memory'][at]['resident_bytes']) for at in (0, -1))}",
            )
            for group in groups
            for run in runs_of(results_dir, group)
        ],
    )


def _model(run: Run) -> str:
    trained = "random weights" if run.metrics["facts"]["weights"] == "random" else "trained"
    return f"{run.metrics['model']} ({trained})"


def generation(results_dir: Path) -> str:
    """Return the table of whole generations by the known part of the prompt."""
    return table(
        ("generation", "first token, ms", "each further token, ms", "whole, ms", "of the time with a K/V cache"),
        [
            (
                KINDS[kind],
                *(number(row["times"][kind][f"{name}_ms"]["median"], 0) for name in ("ttft", "tpot", "e2el")),
                "" if kind == "kv_cache" else ratio(row["ratios"][f"{kind}/kv_cache"]),
            )
            for run in runs_of(results_dir, "prefix_decode")
            for row in run.metrics["generation"]
            for kind in KINDS
        ],
    )
