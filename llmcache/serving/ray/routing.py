"""Which replica a request goes to: all of a session to one, else all of a key, by a consistent hash.

Ray pickles this module by value and sends it to its proxies, so it imports nothing of llmcache.
"""

import hashlib
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

_AUTHORISATION = b"authorization"


class KeyRouter(ConsistentHashRouter):  # type: ignore[misc]  # of Ray, which has no types
    """Sends requests of one `X-Session-Id`, or without it of one key, to one replica; others to any.

    Keys stand for namespaces, in which requests are stored and found. A replica that is full or gone leaves its
    requests to the next of the ring, and only those.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank replicas for a request; the proxy has read `X-Session-Id` already."""
        if pending_request is not None and not pending_request.metadata.session_id:
            pending_request.metadata.session_id = routing_key(pending_request.args)
        ranked: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        return ranked


def routing_key(args: Sequence[Any]) -> str:
    """Return a hash of the key that a request has, as logs may hold it; empty: it has none.

    The proxy sends a replica one pickled request of HTTP; calls from Python have other arguments.
    """
    if len(args) != 1 or not isinstance(args[0], bytes):
        return ""
    headers: Iterable[tuple[bytes, bytes]] = pickle.loads(args[0]).asgi_scope["headers"]
    given = [value.strip() for name, value in headers if name.lower() == _AUTHORISATION]
    return hashlib.sha256(given[0]).hexdigest() if given else ""
