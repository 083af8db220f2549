"""Routes all requests of a session, or else of an API key, to one replica by a consistent hash.

Ray pickles this module by value and sends it to its proxies, so it imports nothing of llmcache.
"""

import hashlib
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

_AUTHORISATION = b"authorization"


class KeyRouter(ConsistentHashRouter):  # type: ignore[misc]  # Ray has no types
    """Routes requests with the same `X-Session-Id`, or without it the same API key, to one replica; others to any.

    A key stands for a namespace, whose requests share entries. Requests of a replica that is full or gone go to the
    next replica of the ring; other requests keep theirs.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank replicas for a request; the proxy has already read `X-Session-Id`."""
        if pending_request is not None and not pending_request.metadata.session_id:
            pending_request.metadata.session_id = routing_key(pending_request.args)
        ranked: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        return ranked


def routing_key(args: Sequence[Any]) -> str:
    """Return a hash of a request's API key, or "" without one. It is hashed because logs may contain it.

    An HTTP request from the proxy has one argument, the pickled request; calls from Python have other arguments.
    """
    if len(args) != 1 or not isinstance(args[0], bytes):
        return ""
    headers: Iterable[tuple[bytes, bytes]] = pickle.loads(args[0]).asgi_scope["headers"]
    given = [value.strip() for name, value in headers if name.lower() == _AUTHORISATION]
    return hashlib.sha256(given[0]).hexdigest() if given else ""
