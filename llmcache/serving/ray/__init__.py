"""Runs the server as replicas on Ray Serve (extra `ray`): `serve run deploy/ray.yaml`.

    proxy -> session id, else API key, else neither -> consistent hash -> replica: the application of `llmcache serve`

Each replica loads the model and has its own cache in memory. Use a store behind it to share entries between replicas
and to keep them when a replica ends (`cache: {store: {name: redis, url: ...}}`).
"""

from llmcache.errors import ConfigError
from llmcache.serving.ray.settings import ReplicaSettings

try:
    from llmcache.serving.ray.replica import Replica, app, replicas
except ImportError as error:
    raise ConfigError(f"replicas need {error.name}: pip install 'llmcache-torch[ray]'") from error

__all__ = ["Replica", "ReplicaSettings", "app", "replicas"]
