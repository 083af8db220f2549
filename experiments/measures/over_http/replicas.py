"""Replicas on a Ray of one's own on this machine, which ends with all its processes."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import TYPE_CHECKING

import psutil

from experiments.measures.over_http.client import HOST
from experiments.measures.over_http.processes import ServerError, free_port

if TYPE_CHECKING:
    from llmcache.serving.ray import ReplicaSettings

_LOOK_S = 0.5
_NAME = "llmcache"
_TITLE = "ray::ServeReplica"  # what Ray calls the process of a replica
_OBJECTS = 100_000_000  # bytes of Ray's own store, which holds next to nothing


class Replicas:
    def __init__(self, port: int, settings: "ReplicaSettings", n: int) -> None:
        self.port = port
        self._settings, self._n = settings, n

    def deploy(self) -> None:
        """Have Ray start them, or a new version in the place of those that run; until all are ready."""
        from ray import serve

        from llmcache.serving.ray import replicas

        serve.run(replicas(self._settings, num_replicas=self._n), name=_NAME, route_prefix="/")

    def pids(self) -> list[int]:
        """Processes of replicas, those that still start included."""
        return [one.pid for one in psutil.Process().children(recursive=True) if _title(one).startswith(_TITLE)]

    def replaced(self, pid: int, longest_s: float) -> None:
        """Wait until this process, which was killed, has ended, and as many are ready as there are to be.

        Raises:
            ServerError: They are not in time.
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
    """Within: so many replicas are ready, each with a CPU of Ray's; afterwards Ray has ended."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else it writes one to the home folder
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # it gives up after 5 s on a busy machine
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
            with suppress(Exception):  # it may never have begun, and ends below in any case
                serve.shutdown()
            ray.shutdown()


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
