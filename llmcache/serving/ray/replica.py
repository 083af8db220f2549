"""A replica, and the Ray Serve application that deploys it."""

from typing import Any, Final

import ray
import torch
from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig

from llmcache.serving.app import create_app
from llmcache.serving.loading import load_served
from llmcache.serving.ray.settings import ReplicaSettings
from llmcache.serving.saving import Saves
from llmcache.serving.server import Server

#: Default options of the deployment; its file may override them.
OPTIONS: Final[dict[str, Any]] = {
    "num_replicas": 2,
    "ray_actor_options": {"num_cpus": 1},
    "max_ongoing_requests": 64,  # further requests go to the next replica of the ring
    "max_queued_requests": 256,  # per proxy, when all replicas are full; further requests are refused with 503
    "health_check_period_s": 5.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_wait_loop_s": 0.5,
    "graceful_shutdown_timeout_s": 60.0,  # time for requests in progress to finish
}
_ROUTER = "llmcache.serving.ray.routing.KeyRouter"


class Replica:
    """A server with its own model, loaded on the machine where the replica runs."""

    def __init__(self, settings: ReplicaSettings) -> None:
        """Load the model and wrap it in a cache. Ray then starts the application, which warms up."""
        n_threads = settings.threads
        if n_threads is None:
            n_threads = max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
        torch.set_num_threads(n_threads)
        served = load_served(settings.model, settings.models_dir)
        saves = Saves(settings.saved, is_kept=True)  # replicas would overwrite each other's saves
        config = settings.cache_config if settings.saved is None else None
        self.server = Server(settings.server_settings, served, saves.attach_cache(served, config), saves)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application. Ray shuts it, and with it the server, down once no request is in progress."""
        return create_app(self.server, names_requests=False)  # Ray's proxy does

    def check_health(self) -> None:
        """Raise an error unless the server is ready; Ray replaces a replica after three failures."""
        if self.server.phase != "ready":
            raise RuntimeError(f"the server is {self.server.phase}")


def app(args: dict[str, Any]) -> serve.Application:
    """Return the application for a Ray Serve file with `import_path: llmcache.serving.ray:app`.

    Args:
        args: Fields of `ReplicaSettings`.

    Raises:
        ConfigError: A setting is invalid; the message has the key, its value and the fix.
    """
    return replicas(ReplicaSettings.make(args))


def replicas(settings: ReplicaSettings, **options: Any) -> serve.Application:
    """Return an application of replicas; `options` of the deployment override `OPTIONS`."""
    router = RequestRouterConfig(request_router_class=_ROUTER)
    found = {**OPTIONS, "request_router_config": router, **options}
    return serve.deployment(serve.ingress()(Replica), name="llmcache", **found).bind(settings)
