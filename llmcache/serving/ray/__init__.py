"""The server as replicas on Ray Serve, an extra (`ray`): `serve run deploy/ray.yaml`.

    proxy -> session, else key, else none -> consistent hash -> replica: the application of `llmcache serve`

Each replica loads the model, and has a cache of its own in memory. What is to outlive a replica, and to be had by all
of them, is in a store behind that (`cache: {store: {name: redis, url: ...}}`).
"""

from llmcache.errors import ConfigError
from llmcache.serving.ray.settings import ReplicaSettings

try:
    from llmcache.serving.ray.replica import Replica, app, replicas
except ImportError as error:
    raise ConfigError(
        f"replicas need the extra 'ray' ({error.name} is missing): pip install 'llmcache-torch[ray]'"
    ) from error

__all__ = ["Replica", "ReplicaSettings", "app", "replicas"]
