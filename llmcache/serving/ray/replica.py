"""One replica, and the application that Ray Serve deploys."""

from typing import Any, Final

import ray
import torch
from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmcache.serving.app import create_app
from llmcache.serving.loading import load_served
from llmcache.serving.ray.settings import ReplicaSettings
from llmcache.serving.saving import Saves
from llmcache.serving.server import Server

#: Options of the deployment, which its file may replace.
OPTIONS: Final[dict[str, Any]] = {
    "num_replicas": 2,
    "ray_actor_options": {"num_cpus": 1},
    "max_ongoing_requests": 64,  # above it requests go to the next replica of the ring
    "max_queued_requests": 256,  # of each proxy, when all are full; above it they are refused with 503
    "health_check_period_s": 5.0,
    "health_check_timeout_s": 10.0,
    "graceful_shutdown_wait_loop_s": 0.5,
    "graceful_shutdown_timeout_s": 60.0,  # in which requests under way may end
}
_ROUTER = "llmcache.serving.ray.routing.KeyRouter"


class Replica:
    """A server around a model of its own, which it loads where it runs."""

    def __init__(self, settings: ReplicaSettings) -> None:
        """Load the model, and hang a cache on it; Ray starts the application then, which warms up."""
        torch.set_num_threads(settings.threads or _cpus())
        served = load_served(settings.model, settings.models_dir)
        saves = Saves(settings.saved, is_kept=True)  # replicas would write over each other's
        config = settings.cache_config if settings.saved is None else None
        self.server = Server(settings.server_settings, served, saves.hang_cache(served, config), saves)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application; Ray ends it, and so the server, once no request is under way."""
        made = create_app(self.server)
        made.add_middleware(_WithoutId)
        return made

    def check_health(self) -> None:
        """Raise an error unless requests are answered now; Ray replaces a replica that fails three times."""
        if self.server.phase != "ready":
            raise RuntimeError(f"the server is {self.server.phase}")


class _WithoutId:
    """ASGI middleware: leaves `X-Request-Id` to Ray's proxy, which adds it to what it got."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [one for one in message["headers"] if one[0].lower() != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, without)


def app(args: dict[str, Any]) -> serve.Application:
    """The application of a file: `import_path: llmcache.serving.ray:app`.

    Args:
        args: Fields of `ReplicaSettings`.

    Raises:
        ConfigError: With the key, its value and the fix.
    """
    return replicas(ReplicaSettings.make(args))


def replicas(settings: ReplicaSettings, **options: Any) -> serve.Application:
    """Replicas of a server; `options` of their deployment replace `OPTIONS`."""
    router = RequestRouterConfig(request_router_class=_ROUTER)
    found = {**OPTIONS, "request_router_config": router, **options}
    return serve.deployment(serve.ingress()(Replica), name="llmcache", **found).bind(settings)


def _cpus() -> int:
    """CPUs that Ray has given this replica, at least one."""
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
