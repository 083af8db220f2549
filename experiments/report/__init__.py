"""`REPORT.md`: what was measured, and what became of the paper's claims. Made from files of results alone.

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

#: What the experiments ask, in the order of the report; others follow.
ABOUT: Mapping[str, str] = {
    "table1_latency": "Table 1: what one request of 128 tokens costs, by what happens to it.",
    "compiled": "One call with and without torch.compile, with and without a cache.",
    "table2_accuracy": "Table 2: quality on the paper's three tasks, for every method, interleaved.",
    "fig3_hit_rate_by_layer": "Figure 3: where, layer by layer, states could be reused.",
    "fig4_memory": "Figure 4: hit rate over cache sizes and compressions.",
    "fig5_tau": "Figure 5: hits, quality and speed over the threshold, on every task and model.",
    "ablation_fingerprint": "Every fingerprint. Similarities are different scales: compare curves, not thresholds.",
    "ablation_eviction": "Every policy, where popular requests stay the same and where they change six times.",
    "policies": "What each policy finds of streams of keys, beside the most that any could.",
    "ablation_layers": "Which layers are stored.",
    "banking77": "One stream at one threshold, as one would serve it.",
    "trust_banking77": "Calibrated reuse: bank support requests, 77 intents.",
    "trust_hwu64": "Calibrated reuse: home assistant requests, 64 intents.",
    "trust_snips": "Calibrated reuse: voice assistant requests, 7 intents.",
    "trust_bursts": "Calibrated reuse in time order, where intents come in bursts.",
    "trust_repeats": "Calibrated reuse where texts come again, by a Zipf law.",
    "trust_bound": "Whether the bound of a calibration holds as often as it says.",
    "trust_bound_time": "Whether it does where requests have an order in time.",
    "trust_adversaries": "Requests that are edited to mislead, with and without the content gate.",
    "service_small": "Whole passes of a service with a small model.",
    "service_exact": "Whole passes of a service that learns nothing: repeats alone are served.",
    "service_second_pass": "Texts that are embedded again, with the default settings of the cache.",
    "serve_load": "Goodput over HTTP: with a calibrated cache, without, and the server that people write themselves.",
    "serve_soak": "More traffic than the server can answer, for minutes: errors, answers, memory and queue.",
    "ray_replicas": "Replicas on Ray Serve of which some are killed during load: what fails, and whether hits go on.",
    "prefix_mooncake": "Time to first token on conversations drawn from a real trace.",
    "prefix_chat": "Time to first token in conversations.",
    "prefix_system_prompt": "Time to first token of many users after one system prompt.",
    "prefix_nothing_shared": "What prefixes cost where no two prompts begin alike.",
    "prefix_limit": "Time to first token where a share of the prompt is known, beside the least that it can take.",
    "store_faults": "Faults of a shared Redis and of workers: wrong answers, what was purged and served, crashes.",
    "prefix_decode": "Generation, to its first token and after, in each way that one would serve it.",
    "prefix_parity": "Whether generation with llmcache gives the model's own tokens.",
    "prefix_parity_bfloat16": "Parity in bfloat16, where the same sums round otherwise.",
    "prefix_soak": "Parity over 2,000 requests under a budget that forces eviction.",
}

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
    """Write the report of these runs, finished or not, beside the results that it is made of."""
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
    judged = judge(by_group, missing)
    yield (
        f"The paper timed on {paper.HARDWARE}; here times are of the hardware below. Every verdict on latency is about "
        "this hardware, and says so. Quality was measured with small models, held against trivial baselines below."
    )
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
    for group in (*(name for name in ABOUT if name in by_group), *(name for name in by_group if name not in ABOUT)):
        seconds = sum(run.metrics["seconds"] for run in by_group[group])
        yield f"## {group}"
        yield f"{ABOUT.get(group, '')} `llmcache run configs/{group}.yaml`, {seconds / 60:.1f} minutes.".lstrip()
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
    """Whether its data set has more requests than were asked."""
    n_all = run.metrics.get("facts", {}).get("n_all", 0)
    return run.metrics.get("limit") is not None or n_all > run.metrics.get("n", n_all)


def _models(runs: Sequence[Run]) -> Iterator[str]:
    """Figures that `llmcache prepare` wrote beside the models, as the runs quote them."""
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
    """What a model reaches, and what one reaches without a model."""
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
