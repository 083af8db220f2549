"""`llmcache bench latency`: what each kind of call costs; `llmcache bench memory`: bytes per entry, rate of storing."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli.options import FiguresDir, make_results_folder, write_results
from llmcache.cli.options import ModelsDir
from llmcache.cli.output import check_writable, write_json
from llmcache.cli.table import show_table


def latency(
    model: Annotated[
        str, typer.Option(help="bert-base, distilbert, gpt2, a model folder, or a name in the models folder.")
    ] = "bert-base",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows a call.")] = 1,
    seq_len: Annotated[int, typer.Option(min=4, help="Tokens a row.")] = 128,
    entries: Annotated[int, typer.Option(min=64, help="Entries in each bank, filled before measuring.")] = 10_000,
    payload: Annotated[str, typer.Option(help="What entries keep: cls, last, mean or sequence.")] = "cls",
    layers: Annotated[str, typer.Option(help="last, one search a call, or all, one a layer.")] = "last",
    index: Annotated[str, typer.Option(help="Index: auto, flat or hnsw.")] = "auto",
    head: Annotated[str, typer.Option(help="class, or token: a causal language model's, at every token.")] = "class",
    tau: Annotated[float, typer.Option(help="Similarity from which the near requests of the benchmark hit.")] = 0.98,
    device: Annotated[str, typer.Option(help="Torch device, cpu or cuda.")] = "cpu",
    banks: Annotated[str, typer.Option(help="On a GPU, where entries are kept: host or device.")] = "host",
    dtype: Annotated[str, typer.Option(help="Of weights and states: float32 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option(min=10, help="Interleaved calls of a kind; p90 and p99 take 200.")] = 200,
    service_rounds: Annotated[int, typer.Option(min=0, help="Rounds of whole blocks of each kind of call.")] = 2,
    block: Annotated[int, typer.Option(min=10, help="Calls of a block; 200 or more, or it is a try.")] = 200,
    seed: Annotated[int, typer.Option(help="Of random weights and requests.")] = 0,
    models_dir: ModelsDir = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    results_dir: FiguresDir = None,
) -> None:
    """Time no cache, miss, hit, exact hit and floor (zero layers), interleaved and in service rounds."""
    from experiments.measures.bench.latency import Settings, measure
    from experiments.models.loading import find
    from experiments.support.environment import describe

    source = find(model, models_dir)
    calls = (source, batch_size, seq_len, entries, payload, layers, index, head, tau, device, banks, dtype)
    settings = Settings(*calls, rounds, seed, service_rounds, block)
    check_writable(json_file)
    make_results_folder(results_dir)
    env = describe(seed)
    figures = measure(settings)
    _print(figures)
    write_json(json_file, figures | {"environment": env})
    write_results(results_dir, "bench_latency", asdict(settings) | {"model": Path(source).name}, env, figures)


def _print(figures: dict[str, Any]) -> None:
    weights = "random weights" if figures["weights"] == "random" else f"weights of {figures['weights']}"
    device = "cpu" if figures["device"] == "cpu" else "{device}, banks on the {banks}, by {clock}".format(**figures)
    title = (
        f"{figures['model']} ({weights}), {figures['dtype']} on {device}, {figures['threads']} threads, "
        f"batch {figures['batch_size']}, {figures['seq_len']} tokens, "
        f"{figures['entries']:,} entries of {figures['entry_bytes']:,} bytes"
    )
    show_table(f"Interleaved: {title}", _rows(figures))
    if figures["service"]:
        show_table(
            f"{figures['service']['rounds']} service rounds of {figures['block']} calls", _rows(figures["service"])
        )
    is_equal = "equal" if figures["exact_hit_is_equal"] else "not equal"
    typer.echo(f"an exact hit is {is_equal} to the stored run, bit for bit")
    if figures["n_overlooked"]:
        typer.echo(f"{figures['n_overlooked']} calls were drawn again: the index had overlooked a neighbour")
    if figures["nocache_ms"]["p90"] is None:
        typer.echo(f"{figures['nocache_ms']['n']} calls of each kind: too few for p90 and p99")


def _rows(figures: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the table rows of one way of measuring, one per kind of call."""
    times = {key.removesuffix("_ms"): times for key, times in figures.items() if key.endswith("_ms")}
    floor = times["floor"]["median"]
    return [_row(kind, times[kind], floor, figures["ratios"].get(f"{kind}/nocache")) for kind in times]


def _row(kind: str, times: Mapping[str, Any], floor: float, ratio: Mapping[str, float] | None) -> Mapping[str, Any]:
    shown = {f"{which} ms": "" if times[which] is None else f"{times[which]:.3f}" for which in ("median", "p90", "p99")}
    told = ""
    if ratio is not None:  # ends over rounds: 5th and 95th percentile of many, minimum and maximum of few
        ends = ("p5", "p95") if "p5" in ratio else ("min", "max")
        told = f"{ratio['median']:.4f} ({' to '.join(f'{ratio[end]:.4f}' for end in ends)})"
    return {
        "call": kind,
        **shown,
        "n": times["n"],
        "of the floor": f"{times['median'] / floor:.1f}",
        "of no cache": told,
    }


def memory(
    entries: Annotated[int, typer.Option(min=1000, help="Entries to store.")] = 100_000,
    width: Annotated[int, typer.Option(min=8, help="Hidden width, a multiple of 8.")] = 768,
    seq_len: Annotated[int, typer.Option(min=4, help="Tokens a request.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows a call.")] = 8,
    payload: Annotated[str, typer.Option(help="What entries keep: cls, last, mean or sequence.")] = "cls",
    compression: Annotated[str, typer.Option(help="Codec: none, fp16, int8, pca or autoencoder.")] = "fp16",
    fingerprint: Annotated[
        str, typer.Option(help="mean, simhash (leaves the fingerprint out of the figure) or pca.")
    ] = "simhash",
    seed: Annotated[int, typer.Option(help="Of random weights and requests.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Measure the memory of an entry by the growth of the process, and the rate of storing."""
    from experiments.measures.bench.memory import Settings, measure

    settings = Settings(entries, width, seq_len, batch_size, payload, compression, fingerprint, seed)
    check_writable(json_file)
    figures = measure(settings)
    for name, value in figures.items():
        typer.echo(f"{name:<26}{value:,.1f}" if isinstance(value, float) else f"{name:<26}{value}")
    write_json(json_file, figures)
