"""Replicas on a private local Ray, which ends with all its processes."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import TYPE_CHECKING

import psutil

from experiments.measures.over_http.client import HOST
from experiments.measures.over_http.servers import ServerError, free_port

if TYPE_CHECKING:
    from llmcache.serving.ray import ReplicaSettings

_LOOK_S = 0.5
_NAME = "llmcache"
_TITLE = "ray::ServeReplica"  # title of a replica's process in Ray
_OBJECTS = 100_000_000  # bytes of Ray's object store, which is nearly unused


class Replicas:
    def __init__(self, port: int, settings: "ReplicaSettings", n: int) -> None:
        self.port = port
        self._settings, self._n = settings, n

    def deploy(self) -> None:
        """Deploy the replicas, or a new version in place of the running ones; return once all are ready."""
        from ray import serve

        from llmcache.serving.ray import replicas

        serve.run(replicas(self._settings, num_replicas=self._n), name=_NAME, route_prefix="/")

    def pids(self) -> list[int]:
        """Return the process ids of replicas, including those still starting."""
        return [one.pid for one in psutil.Process().children(recursive=True) if _title(one).startswith(_TITLE)]

    def replaced(self, pid: int, longest_s: float) -> None:
        """Wait until a killed process has ended and all replicas are ready.

        Raises:
            ServerError: They were not ready in time.
        """
        until = monotonic() + longest_s
        while pid in (pids := self.pids()) or len(pids) != self._n or self._n_ready() != self._n:
            if monotonic() > until:
                raise ServerError(f"{self._n_ready()} of {self._n} replicas were ready after {longest_s:g} s")
            sleep(_LOOK_S)

    def _n_ready(self) -> int:
        from ray import serve

        deployments = serve.status().applications[_NAME].deployments
        return int(deployments[_NAME].replica_states.get("RUNNING", 0))


@contextmanager
def running_replicas(settings: "ReplicaSettings", n: int) -> Iterator[Replicas]:
    """Start `n` replicas, one Ray CPU each, and yield them once ready; Ray ends with the context."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes a token to the home folder
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # 5 s by default, too short on a busy machine
    import ray
    from ray import serve

    port = free_port()
    with TemporaryDirectory(prefix="ray-") as folder:
        try:
            ray.init(
                "local",
                num_cpus=n,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=_OBJECTS,
                _node_ip_address=HOST,
                _temp_dir=folder,
            )
            serve.start(http_options={"host": HOST, "port": port})
            found = Replicas(port, settings, n)
            found.deploy()
            yield found
        finally:
            if ray.is_initialized():  # else Serve would start another Ray
                with suppress(Exception):  # Ray ends below in any case
                    serve.shutdown()
                ray.shutdown()


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
