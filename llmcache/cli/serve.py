"""`llmcache serve`: one model over HTTP."""

import logging
from pathlib import Path
from typing import Annotated

import typer

from llmcache.cli import options
from llmcache.errors import ConfigError

_LOG = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def command(
    model: Annotated[str, typer.Option(help="'minilm' (packaged), a folder, or a name on the hub.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all. Give keys then.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8080,
    served_name: Annotated[
        str | None, typer.Option(help="Name of the model for clients; as --model by default.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Settings of the cache: a YAML file; by default those of the save."
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder that the cache is restored from and saved to.")
    ] = None,
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between saves; 0: only at the end.")] = 0.0,
    cache: Annotated[bool, typer.Option(help="Serve from the cache, or compute every request.")] = True,
    keys: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of keys; see llmcache keys.")
    ] = None,
    max_concurrent_requests: Annotated[int, typer.Option(min=1, help="Requests under way; more are refused.")] = 512,
    max_client_batch_size: Annotated[int, typer.Option(min=1, help="Inputs of one request.")] = 32,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are computed at once.")] = 16384,
    max_batch_requests: Annotated[int | None, typer.Option(min=1, help="Inputs that are computed at once.")] = None,
    max_streams: Annotated[int, typer.Option(min=1, help="Generations that take turns.")] = 8,
    prefill_chunk: Annotated[
        int, typer.Option(min=0, help="Tokens of a prompt that are run in one turn; 0: all of it.")
    ] = 256,
    payload_limit: Annotated[int, typer.Option(min=1, help="Bytes of a request's body.")] = 2_000_000,
    max_queue: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a request waits before it is refused.")
    ] = 10.0,
    batch_wait: Annotated[float, typer.Option(min=0, help="Milliseconds that a miss waits for others.")] = 2.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds for requests under way to end, once it is told to stop.")
    ] = 20.0,
    auto_truncate: Annotated[bool, typer.Option(help="Cut inputs that are too long.")] = False,
    warmup_tokens: Annotated[int, typer.Option(min=0, help="Tokens of the longest warm-up input; 0: none.")] = 128,
    reveal_hits: Annotated[
        bool,
        typer.Option(
            help="Tell in headers and usage what the cache served, and times: who asks learns what was asked."
        ),
    ] = False,
    otlp_endpoint: Annotated[str | None, typer.Option(help="Where OpenTelemetry sends traces; extra otel.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that compute; by default all cores, of encoders all but one.")
    ] = None,
    models_dir: options.ModelsDir = None,
) -> None:
    """Serve a model over HTTP, in the words of text-embeddings-inference and of OpenAI.

    SIGTERM or Ctrl-C: new requests are refused, those under way finished within --grace seconds, the cache is saved.
    """
    try:
        from llmcache.serving.running import Uvicorn
    except ImportError:
        raise ConfigError("llmcache serve needs packages: pip install 'llmcache-torch[serve]'") from None
    import torch

    from llmcache.config import CacheConfig
    from llmcache.serving.loading import load_served
    from llmcache.serving.saving import Saves
    from llmcache.serving.server import Server
    from llmcache.serving.settings import ServerSettings

    logging.basicConfig(level=logging.WARNING, format=_LOG)
    logging.getLogger("llmcache").setLevel(logging.INFO)
    settings = ServerSettings(
        model=served_name or model,
        cache=cache,
        keys=keys,
        save=save,
        save_every_s=save_every,
        max_concurrent_requests=max_concurrent_requests,
        max_client_batch_size=max_client_batch_size,
        max_batch_tokens=max_batch_tokens,
        max_batch_requests=max_batch_requests,
        max_streams=max_streams,
        prefill_chunk=prefill_chunk,
        payload_limit=payload_limit,
        max_queue_s=max_queue,
        batch_wait_ms=batch_wait,
        grace_s=grace,
        auto_truncate=auto_truncate,
        warmup_tokens=warmup_tokens,
        reveal_hits=reveal_hits,
        otlp_endpoint=otlp_endpoint,
    )
    cache_config = None if config is None else CacheConfig.make(config)
    saves = Saves(save)
    served = load_served(model, models_dir)
    if threads is None and served.kind != "decoder":
        # Hits are served beside what is computed. Threads that compute wait for each other, should one share its core.
        threads = max(1, torch.get_num_threads() - 1)
    if threads is not None:
        torch.set_num_threads(threads)
    server = Server(settings, served, saves.hang_cache(served, cache_config), saves)
    Uvicorn(server, host, port).run()
    if saves.has_failed:
        raise typer.Exit(1)
