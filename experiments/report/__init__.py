"""`REPORT.md`: measurements and verdicts on the paper's claims, made from result files only.

results -> read_runs -> judge (claims) + tables -> REPORT.md
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.metrics import paper
from experiments.report import tables
from experiments.report.claims import Claim, judge
from experiments.report.markdown import number, percent, table
from experiments.report.verdict import Judgement, Verdict
from experiments.runs.read import Figures, Run, groups, read_runs, unfinished
from experiments.support.files import write_whole
from llmcache import ConfigError

REPORT = "REPORT.md"

HOW = """\
- *Hit rate*: hits over all measured requests, bypasses included. *Changed answers*: requests with another answer than
  the model alone gives, over all requests; *of hits*: over hits; *precision*: share of hits whose answer stays.
- *Drop*: quality of the model alone minus that with the method, on the same requests; for SQuAD v2 quality is F1.
- Brackets: 95 %. Of shares that of Clopper and Pearson; of drops 2,000 paired bootstrap resamples of the requests, or,
  where no hit changed a score, what as many hits without a change leave open. Where requests come in clusters (a text
  asked again and again, questions on one passage, windows made of one window) all are resamples of clusters. No
  bracket: nothing was served, so nothing can be lost; or resamples of clusters, all alike, would feign certainty.
  After speed-ups: slowest and fastest round.
- *Exact hits*: share of all requests that llmcache served from their own repeat. They are fewer with a tau than
  without: a request that another one's states served is not stored, so its repeats are served as it was.
- *Rows served*: an OpenBookQA question has four rows, one a choice. It counts as a hit when any was served; the share
  of rows says how much was.
- *Speed-up*: sum of the times without a cache over the sum with it, same requests, lookup, copying and storing
  included, methods interleaved request by request. *o*: what a miss costs more. *c*: time of a hit over its time
  without a cache.
- *Most hits in hindsight* is the best threshold chosen on the very requests it is then counted on: an upper limit.
- Hits and quality over many thresholds are replayed from one pass of the model. Tests hold the replay to live runs, for
  every fingerprint, DocCache and the semantic response cache, on every task.
"""


def write_report(results_dir: Path, folders: Sequence[Path]) -> Path:
    """Write the report on these runs, finished or not, into the results folder."""
    runs = read_runs(folders)
    if not runs:
        raise ConfigError(f"{results_dir}: no results of these experiments; measure first: llmcache sweep")
    try:
        text = "\n\n".join(_parts(runs, unfinished(folders))) + "\n"
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{results_dir}: written by another version ({error!r}); measure again with --force"
        ) from error
    path = results_dir / REPORT
    write_whole(path, text)
    return path


def _parts(runs: Sequence[Run], missing: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield "# What was measured, and what holds"
    yield (
        "Written by `llmcache report` from the files in this folder. The claims are those of *LLMCache: Layer-Wise "
        "Caching Strategies for Accelerated Reuse in Transformer Inference* (Bansal 2025); the rules behind the "
        "verdicts are in [docs/claims.md](../docs/claims.md)."
    )
    by_group = dict(groups(runs))
    asked = {*by_group, *missing}
    judged = [(claim, judgement) for claim, judgement in judge(by_group, missing) if claim.config in asked]
    yield (
        f"The paper timed on {paper.HARDWARE}; here times are of the hardware below. Every verdict on latency is about "
        "this hardware, and says so. Quality was measured with small models, held against trivial baselines below."
    )
    if judged:
        yield "## Verdicts"
        yield table(
            ("claim of the paper", "verdict", "shown by"),
            [(claim.said, _verdict(judgement), f"`configs/{claim.config}.yaml`") for claim, judgement in judged],
        ).replace("---:", "---")
    yield from (_paragraph(number, *pair) for number, pair in enumerate(judged, start=1))
    yield "## How it was measured"
    yield HOW.rstrip()
    yield "\n".join(f"- {line}" for line in _surroundings(runs))
    yield "## The models alone"
    yield from _models(runs)
    for group in sorted(by_group):
        seconds = sum(run.metrics["seconds"] for run in by_group[group])
        yield f"## {group}"
        yield f"`llmcache run configs/{group}.yaml`, {seconds / 60:.1f} minutes."
        yield tables.of_runs(by_group[group])


def _verdict(judgement: Judgement) -> str:
    return f"**{judgement.verdict}** {judgement.condition}".rstrip()


def _paragraph(number: int, claim: Claim, judgement: Judgement) -> str:
    if judgement.verdict is Verdict.NOT_MEASURED:
        return f"{number}. *{claim.said}.* Not measured: run `llmcache run configs/{claim.config}.yaml`."
    return "\n".join(
        [
            f"{number}. *{claim.said}.* {_verdict(judgement)}.",
            f"   - Measured: {judgement.measured}.",
            f"   - Why: {judgement.why}",
        ]
    )


def _surroundings(runs: Sequence[Run]) -> Iterator[str]:
    minutes = sum(run.metrics["seconds"] for run in runs) / 60
    yield f"{len(runs)} runs, {minutes:.0f} minutes together, after `llmcache prepare all`."
    yield f"CPU: {_all(runs, 'cpu')}, {_all(runs, 'n_cpus')} cores; GPU: {_all(runs, 'gpu') or 'none'}."
    threads = sorted({f"{run.env['threads']['torch']} torch, {run.env['threads']['faiss']} FAISS" for run in runs})
    yield f"Threads: {'; '.join(threads)}. Seeds: {_all(runs, 'seed')}."
    versions = {f"{name} {version}" for run in runs for name, version in run.env["versions"].items() if version}
    yield f"Python {_all(runs, 'python')}, {', '.join(sorted(versions))}."
    commits = sorted(
        {f"{run.env['git'] or 'unknown'}{' with changes' if run.env['git_dirty'] else ''}" for run in runs}
    )
    yield f"Code: {', '.join(commits)}."
    cut = sorted({f"{run.group}: {run.task} {run.metrics['n']:,}" for run in runs if _is_cut(run)})
    yield f"Not all requests of these were used, for time: {'; '.join(cut) or 'none'}."
    timed = [run for run in runs if run.measure == "serve" or run.metrics.get("live")]
    few = sorted({f"{run.group} {run.config['rounds']}" for run in timed if run.config["rounds"] < 5})
    yield f"Streams with fewer than five timed rounds, for time: {'; '.join(few) or 'none'}."


def _all(runs: Sequence[Run], key: str) -> str:
    return ", ".join(sorted({str(run.env[key]) for run in runs if run.env.get(key) is not None}))


def _is_cut(run: Run) -> bool:
    """Whether the run used only a part of its data set."""
    n_all = run.metrics.get("facts", {}).get("n_all", 0)
    return run.metrics.get("limit") is not None or n_all > run.metrics.get("n", n_all)


def _models(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the models' figures from `llmcache prepare`, as recorded in the runs."""
    found: dict[str, Figures] = {}
    for run in runs:
        known = run.metrics.get("facts", {}).get("prepared")
        if known:
            found[Path(run.config["task"]["model"]).name] = known
    rows = [(name, what, shown, trivial) for name in sorted(found) for what, shown, trivial in _lines(found[name])]
    yield (
        "Trained by `llmcache prepare` on public data; every method serves the same model. A model under its trivial "
        "baseline would measure nothing."
    )
    yield table(("model", "figure", "the model", "trivial baseline"), rows)


def _lines(figures: Figures) -> Iterator[tuple[str, str, str]]:
    """Yield the name of a figure, the model's value, and the value of a trivial baseline."""
    if "evaluation" in figures:
        reached, trivial = figures["evaluation"], figures["always_no_answer"]
        for name in reached:
            yield (
                f"SQuAD v2, {name.replace('_', ' ')}",
                _share(reached[name]),
                f"{_share(trivial[name])} (no answer ever)",
            )
        yield "threshold for no answer, logits", number(figures["threshold"], 2), ""
    elif "chance" in figures:
        for split in ("validation", "test"):
            yield f"OpenBookQA {split}, accuracy", percent(figures[split]), f"{percent(figures['chance'])} (chance)"
    elif "commonest" in figures:
        about = f"accuracy on {figures['n_test']:,} unseen requests"
        yield about, percent(figures["accuracy"]), f"{percent(figures['commonest'])} (commonest intent)"
    else:
        for split in ("validation", "test"):
            own, trivial = figures[split], figures[split]["unigram"]
            yield f"WikiText {split}, next token", percent(own["accuracy"]), f"{percent(trivial['accuracy'])} (unigram)"
            told = (f"{value:,.1f}" for value in (own["perplexity"], trivial["perplexity"]))
            yield f"WikiText {split}, perplexity a token", next(told), f"{next(told)} (unigram)"
            yield f"WikiText {split}, perplexity a word", number(own["word_perplexity"]), ""
            yield f"WikiText {split}, share of `<unk>`, never a target", percent(own["unk_rate"]), ""


def _share(value: float | None) -> str:
    return "" if value is None else percent(value)
