"""Table of prompts: time to first token where prompts share a part, and where they share none."""

from collections.abc import Iterator
from pathlib import Path

from experiments.report.markdown import number, percent, speed, table
from experiments.report.pages.files import runs_of
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
