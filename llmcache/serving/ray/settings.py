"""Settings of replicas: the `args` of the application in a Ray Serve file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from llmcache.config import CacheConfig, explain
from llmcache.errors import ConfigError
from llmcache.serving.settings import ServerSettings
from llmcache.support.folder import MANIFEST
from llmcache.support.registry import without_secrets

_NOT_ALLOWED = {
    "model": "give `model` beside `server`, not in it",
    "save": "replicas would overwrite each other's folder; give a store, which all of them share",
    "save_every_s": "replicas do not save; give a store, which all of them share",
}


class ReplicaSettings(BaseModel):
    """Model, cache and server of each replica. Replica count, CPUs and scaling are options of the Ray deployment.

    Attributes:
        model: `minilm` (packaged), a folder, or a hub name. It must be available on each machine of the cluster.
        served_name: Name of the model for clients; None: the same as `model`.
        models_dir: Folder in which models are looked up by name.
        restore: Folder of a saved cache that each replica loads, with its settings and calibration, in place of
            `cache`. Nothing is saved there.
        cache: Settings of the cache, as `CacheConfig`.
        server: Settings of the server, as `ServerSettings`, without `model`, `save` and `save_every_s`.
        threads: Number of torch threads; None: the replica's number of CPUs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    model: str
    served_name: str | None = None
    models_dir: Path | None = None
    restore: Path | None = None
    cache: Annotated[dict[str, Any], BeforeValidator(without_secrets)] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)
    threads: int | None = Field(default=None, ge=1)

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Self:
        """Return validated settings; those of cache and server are checked too.

        Raises:
            ConfigError: A setting is invalid; the message has the key, its value and the fix.
        """
        for name, reason in _NOT_ALLOWED.items():
            if name in (values.get("server") or {}):
                raise ConfigError(f"server.{name}: {reason}")
        try:
            made = cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(explain(error, list(cls.model_fields))) from error
        if made.restore is not None and made.cache:
            raise ConfigError("cache: a restored cache has its own settings; give either `cache` or `restore`")
        assert made.cache_config and made.server_settings  # raise errors here, not in each replica
        return made

    @property
    def cache_config(self) -> CacheConfig:
        return CacheConfig.make(self.cache)

    @property
    def server_settings(self) -> ServerSettings:
        try:
            return ServerSettings(**{**self.server, "model": self.served_name or self.model})
        except ValidationError as error:
            raise ConfigError(f"server: {explain(error, list(ServerSettings.model_fields))}") from error

    @property
    def saved(self) -> Path | None:
        """Folder of the saved cache to load, or None; `ConfigError` if it holds none."""
        if self.restore is not None and not (self.restore / MANIFEST).is_file():
            raise ConfigError(f"restore: there is no saved cache in {self.restore}")
        return self.restore
