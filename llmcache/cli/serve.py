"""`llmcache serve`: serve one model over HTTP."""

import logging
import re
from collections.abc import Iterator
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from llmcache.cli import options
from llmcache.errors import ConfigError
from llmcache.serving.settings import ServerSettings

_LOG = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def _settings() -> Iterator[Parameter]:
    """Yield an option for each setting of the server that has a description. Its name leaves the unit out."""
    for name, field in ServerSettings.model_fields.items():
        if field.description is not None:
            plain = re.sub("_(s|ms)$", "", name)
            names = [] if plain == name else [f"--{plain.replace('_', '-')}"]
            least = next((one.ge for one in field.metadata if hasattr(one, "ge")), None)
            option = typer.Option(field.default, *names, min=least, help=field.description)
            yield Parameter(name, Parameter.KEYWORD_ONLY, default=option, annotation=field.annotation)


@options.taking(_settings())
def command(
    *,
    model: Annotated[str, typer.Option(help="'minilm' (packaged), a folder, or a name on the hub.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a name on the hub.")] = None,
    device: Annotated[
        str, typer.Option(help="Where the model runs, such as cpu or cuda:1; auto: CUDA if there is a device.")
    ] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: float32, float16 or bfloat16; default: as they were saved.")
    ] = None,
    pooling: Annotated[
        str | None, typer.Option(help="Of an embedding model: mean, cls or last-token; default: the model's own.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all: then give --keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8080,
    served_name: Annotated[str | None, typer.Option(help="Name of the model for clients; default: --model.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="YAML file with the cache's settings; default: the save's."),
    ] = None,
    engine: options.Engine = None,
    draft: options.Draft = None,
    save: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder to restore the cache from and save it to.")
    ] = None,
    keys: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Key file; see llmcache keys.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Torch threads; default: all cores, for encoders all but one.")
    ] = None,
    models_dir: options.ModelsDir = None,
    **others: Any,
) -> None:
    """Serve a model over HTTP with the routes of text-embeddings-inference and of OpenAI.

    On SIGTERM or Ctrl-C, refuse new requests, finish running ones within --grace seconds, and save the cache.
    """
    try:
        from llmcache.serving.running import Uvicorn, check_address
    except ImportError:
        raise ConfigError("llmcache serve needs the extra 'serve': pip install 'llmcache-torch[serve]'") from None
    import torch
    from pydantic import ValidationError

    from llmcache.config import CacheConfig
    from llmcache.serving.loading import NAMES, load_served
    from llmcache.serving.saving import Saves
    from llmcache.serving.server import Server

    logging.basicConfig(level=logging.WARNING, format=_LOG)
    logging.getLogger("llmcache").setLevel(logging.INFO)
    try:
        settings = ServerSettings(model=served_name or model, keys=keys, save=save, **others)
    except ValidationError as error:  # of what typer does not check
        raise ConfigError(str(error.errors()[0]["ctx"]["error"])) from None
    computed_by = {name: one for name, one in (("engine", engine), ("draft", draft)) if one is not None}
    cache_config = CacheConfig.make(config, **computed_by)  # settings that are wrong show before the model is loaded
    check_address(host, port)  # else the model is loaded for nothing, and another server's save is replaced
    saves = Saves(save)
    log = logging.getLogger("llmcache.serving")
    log.info("loading %s", model)
    served = load_served(model, models_dir, device=device, dtype=dtype, revision=revision, pooling=pooling)
    weights = next(served.model.parameters())
    log.info("loaded %s, %s on %s", NAMES[served.kind], str(weights.dtype).removeprefix("torch."), weights.device)
    if threads is None and served.kind != "decoder":
        # Leave a core for hits, which are served during a batch: a thread that shares its core delays all others.
        threads = max(1, torch.get_num_threads() - 1)
    if threads is not None:
        torch.set_num_threads(threads)
    hung = saves.attach_cache(served, cache_config if config else None, **({} if config else computed_by))
    if hung.config.draft is not None and hung.config.learn is None and hung.calibration is None:
        log.warning("the draft serves nothing without a calibration: --save one, or set learn in --config")
    server = Server(settings, served, hung, saves)
    Uvicorn(server, host, port).run()
    if saves.has_failed:
        raise typer.Exit(1)
