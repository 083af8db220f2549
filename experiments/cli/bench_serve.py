"""`llmcache bench serve`: servers under load, over HTTP."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli.options import DataDir, FiguresDir
from experiments.cli.output import make_results_folder, write_results
from llmcache import ConfigError
from llmcache.cli.options import ModelsDir
from llmcache.cli.output import check_writable, write_json
from llmcache.cli.table import show_table

KEY_VARIABLE = "LLMCACHE_KEY"
WHAT = ("load", "soak")


def command(
    what: Annotated[
        str,
        typer.Argument(help="load: goodput, open loop. soak: overload."),
    ] = "load",
    url: Annotated[
        str | None, typer.Option(help="Load a server that runs already, http://HOST:PORT; starts none.")
    ] = None,
    key: Annotated[str | None, typer.Option(envvar=KEY_VARIABLE, help="Bearer key for --url.")] = None,
    servers: Annotated[
        str | None, typer.Option(help="Of cache, no_cache and baseline, with commas. Default: all that apply.")
    ] = None,
    stream: Annotated[
        str, typer.Option(help="Texts: banking77, snips or hwu64 of the data folder, or support_desk, which is made.")
    ] = "banking77",
    arrivals: Annotated[str, typer.Option(help="fixed, poisson, azure or mooncake.")] = "poisson",
    rate: Annotated[
        list[float] | None, typer.Option(min=0.001, help="Requests a second to hold; else the largest is searched.")
    ] = None,
    slo_ms: Annotated[float, typer.Option(min=1, help="99 % of requests are to be answered within this.")] = 100.0,
    hold_s: Annotated[float, typer.Option(min=0.1, help="Seconds that each rate is held for.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of all loads; the order of the servers alternates.")] = 2,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of the soak.")] = 10.0,
    max_drop: Annotated[
        float, typer.Option(help="Share of answers that may change; the cache is calibrated for it.")
    ] = 0.01,
    seed: Annotated[int, typer.Option(min=0, help="Of streams and arrivals.")] = 0,
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    results_dir: FiguresDir = None,
) -> None:
    """Start servers as processes of their own, and load them: with the cache, without, and a plain one.

    Classifier and calibrated cache are made first, and kept in --models-dir if it is given. The same as files, for
    llmcache run: configs/serve_load.yaml, serve_soak.yaml.
    """
    from experiments.support.environment import describe
    from experiments.support.folders import Folders

    if what not in WHAT:
        raise ConfigError(f"{what!r} is nothing to measure; known: {', '.join(WHAT)}")
    if url is not None and what != "load":
        raise ConfigError(f"--url: a server that runs already is loaded, no more; leave out {what!r}")
    check_writable(json_file)
    if results_dir is not None:
        make_results_folder(results_dir)
    folders, env = Folders(data_dir, models_dir), describe(seed)
    load = {"arrivals": arrivals, "rates": rate or [], "slo_ms": slo_ms, "hold_s": hold_s}
    if url is not None:
        settings, figures = _at_url({"url": url, "stream": stream, "seed": seed, **load}, folders, key)
        show_table(f"{url}, texts of {stream}", [_shown(row) for row in figures["loads"]], 0)
    else:
        own = load | {"rounds": rounds} if what == "load" else {"seconds": 60 * minutes}
        values = {"seed": seed, **own, **_classifier(stream if what == "load" else "support_desk", max_drop)}
        settings, figures = _measured(what, values, servers, folders)
        show_table(f"serve_{what}, {figures['task']}", [_shown(row) for row in figures["summary"]])
    write_json(json_file, figures | {"environment": env})
    write_results(results_dir, "bench_serve", settings, env, figures)


def _at_url(values: Mapping[str, Any], folders: Any, key: str | None) -> tuple[Mapping[str, Any], dict[str, Any]]:
    from experiments.measures.bench.at_url import Settings, measure

    settings = Settings(**values)
    figures = measure(settings, folders, key)
    if figures["goodput"] is not None:
        typer.echo(f"goodput: {figures['goodput']:.1f} requests a second")
    return asdict(settings), figures


def _classifier(stream: str, max_drop: float) -> dict[str, Any]:
    """Settings of a classifier on a stream, and of what it learns from."""
    data: dict[str, Any] = {"path": stream, "order": "shuffled"}
    if stream == "support_desk":
        data["limit"] = 10_000
    task = {"name": "held_out", "model": "minilm", "data": data}
    return {"task": task, "max_drops": [max_drop], "cache": {"answer": "class"}}


def _measured(
    what: str, values: Mapping[str, Any], servers: str | None, folders: Any
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Settings of the run, and its figures."""
    from experiments.measures import MEASURES
    from experiments.runs.grid import make_experiment

    measure = f"serve_{what}"
    known = MEASURES[measure].settings.model_fields["servers"].get_default(call_default_factory=True)
    names: Sequence[str] = list(known) if servers is None else servers.split(",")
    if strange := [name for name in names if name not in known]:
        raise ConfigError(f"--servers: {', '.join(strange)} is none of {', '.join(known)}")
    experiment = make_experiment({"measure": measure, **values, "servers": {name: known[name] for name in names}})
    return experiment.to_dict(), dict(MEASURES[measure].run(experiment, folders).metrics)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the screen has room for."""
    return {name: value for name, value in row.items() if not isinstance(value, dict)}
