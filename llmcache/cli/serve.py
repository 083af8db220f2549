"""`llmcache serve`: serve one model over HTTP."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from llmcache.cli import options
from llmcache.errors import ConfigError

_LOG = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def command(
    context: typer.Context,
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
    model_alias: Annotated[
        list[str] | None,
        typer.Option(help="Another name of the model for clients, such as text-embedding-3-small. May be repeated."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="YAML file with the cache's settings; default: the save's."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="What computes misses: eager, onnxruntime or auto; overrides --config.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="int8: also serve an int8 copy's answers, within the bound; overrides --config.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder to restore the cache from and save it to.")
    ] = None,
    save_every_s: Annotated[
        float, typer.Option("--save-every", min=0, help="Seconds between saves; 0: only at the end.")
    ] = 0.0,
    cache: Annotated[bool, typer.Option(help="Serve from the cache, or compute every request.")] = True,
    keys: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Key file; see llmcache keys.")] = None,
    max_concurrent_requests: Annotated[
        int, typer.Option(min=1, help="Maximum concurrent requests; more are refused.")
    ] = 512,
    max_client_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Maximum inputs per request; default: 2048, of a decoder 32.")
    ] = None,
    allow_token_ids: Annotated[
        bool, typer.Option(help="Accept token ids in /v1/embeddings, where most clients send OpenAI's.")
    ] = False,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per batch.")] = 16384,
    max_batch_requests: Annotated[int | None, typer.Option(min=1, help="Maximum inputs per batch.")] = None,
    max_streams: Annotated[int, typer.Option(min=1, help="Maximum concurrent generations.")] = 8,
    prefill_chunk: Annotated[
        int, typer.Option(min=0, help="Prompt tokens computed per turn; 0: the whole prompt.")
    ] = 256,
    payload_limit: Annotated[int, typer.Option(min=1, help="Maximum bytes of a request's body.")] = 2_000_000,
    max_queue_s: Annotated[
        float, typer.Option("--max-queue", min=0.001, help="Seconds a request may wait before it is refused.")
    ] = 10.0,
    batch_wait_ms: Annotated[
        float, typer.Option("--batch-wait", min=0, help="Milliseconds a miss waits for others to share its batch.")
    ] = 2.0,
    grace_s: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds for requests in progress to finish when stopping.")
    ] = 20.0,
    auto_truncate: Annotated[bool, typer.Option(help="Cut inputs that are too long.")] = False,
    warmup_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of the longest warm-up input; 0: no warm-up.")
    ] = 128,
    reveal_hits: Annotated[
        bool,
        typer.Option(help="Reveal hits and times in headers and usage. Clients can then find out what others asked."),
    ] = False,
    cors_allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may send requests, such as https://example.org, or *. May be repeated."),
    ] = None,
    access_log: Annotated[
        bool, typer.Option(help="Log each request: route, status, time, key; never its text.")
    ] = False,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Address for OpenTelemetry traces; needs extra otel.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Torch threads; default: all cores, for encoders all but one.")
    ] = None,
    models_dir: options.ModelsDir = None,
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
    from llmcache.serving.settings import ServerSettings

    logging.basicConfig(level=logging.WARNING, format=_LOG)
    logging.getLogger("llmcache").setLevel(logging.INFO)
    # Options have the names of the settings.
    repeated = {"cors_allow_origin": tuple(cors_allow_origin or ()), "model_alias": tuple(model_alias or ())}
    given = context.params | repeated
    named = {name: value for name, value in given.items() if name in ServerSettings.model_fields}
    try:
        settings = ServerSettings(**{**named, "model": served_name or model})
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
