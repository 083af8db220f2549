"""`llmcache calibrate`: how much may be reused on a stream, and with which bound."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.options import Changes, DataDir, told_apart
from llmcache import ConfigError
from llmcache.cli.options import ModelsDir
from llmcache.cli.output import check_writable, write_json
from llmcache.cli.table import show_table

if TYPE_CHECKING:
    from llmcache import Calibration

_MOST_SHOWN = 20  # settings of the curve, to fit one screen; the JSON file has all


def command(
    config: Annotated[
        list[Path], typer.Argument(help="YAML file of an experiment that learns: configs/trust_banking77.yaml.")
    ],
    data_dir: DataDir = None,
    models_dir: ModelsDir = None,
    changes: Changes = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Save the calibrated cache there; asks for one loss.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")] = None,
) -> None:
    """Calibrate on the first requests of a stream, and show what was chosen.

    Each loss of max_drops is asked for, one after the other: --set max_drops=0.01 cache.sources=growing asks for one,
    --set data.path=mine.csv data.text=question data.label=intent takes requests of your own: a file, and two of its
    columns. Of a file that is a grid the first run counts; --set chooses another, seed=1 for instance.
    """
    files, changed = told_apart(config, changes)
    if len(files) != 1:
        raise ConfigError(f"give one CONFIG (got {', '.join(map(str, files)) or 'none'})")
    check_writable(json_file)
    from experiments.measures.learning import calibrate
    from experiments.runs.runner import load_all
    from experiments.support.files import Folders

    run, *others = load_all(files, changed)
    settings = run.experiment.to_dict()
    if save is not None and len(drops := settings.get("max_drops", ())) > 1:
        raise ConfigError(f"--save keeps one calibration: choose a loss of {drops}, --set max_drops={drops[0]}")
    cache, calibrations = calibrate(run.experiment, Folders(data_dir, models_dir))
    title = f"{run.group} {run.name}{f', the first of {len(others) + 1} runs' if others else ''}"
    for found in calibrations:
        _show(title, found)
        typer.echo()
    write_json(
        json_file,
        {"run": run.name, "settings": settings, "calibrations": [found.to_dict() for found in calibrations]},
    )
    if save is not None:
        cache.save(save)
        typer.echo(f"saved to {save}: LLMCache.load(model, {str(save)!r})")


def _show(title: str, found: "Calibration") -> None:
    chosen = found.chosen
    figures = {
        "asked": f"{found.metric} <= {100 * found.max_drop:g} %, {100 * (1 - found.delta):g} % sure",
        "bound": "" if chosen is None else f"{100 * chosen.bound:.2f} %",
        "bound holds for what is served": "yes" if found.is_certified else "no",
        "hit rate expected": None if chosen is None else chosen.hit_rate,
        "speed-up expected": found.speedup,
        "changed of those tested": None if chosen is None else chosen.loss,
        "largest risk allowed": None if chosen is None else chosen.limit,
        "sources": f"{found.sources}, {found.n_sources:,}",
        "tested on": found.n_tested,
        "seconds, computing left out": found.seconds,
    }
    show_table(title, [{"figure": name, "value": value} for name, value in figures.items()], n_names=2)
    if chosen is None:
        typer.echo("nothing is reused approximately: not even the strictest limit kept to what was asked")
    step = -(-len(found.curve) // _MOST_SHOWN)
    rows = [
        {"largest risk": tried.limit, "hit rate": tried.hit_rate, "loss": tried.loss, "bound": tried.bound}
        for tried in found.curve[::-1][::step][::-1]  # including the last one, which ended the curve
    ]
    typer.echo()
    show_table(f"Limits in the order of trial{f', one of {step}' if step > 1 else ''}; a failure ends it", rows)
