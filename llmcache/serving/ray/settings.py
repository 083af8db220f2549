"""Settings of replicas: the `args` of an application in a file of Ray Serve's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmcache.config import CacheConfig, explain
from llmcache.errors import ConfigError
from llmcache.folder import MANIFEST
from llmcache.serving.settings import ServerSettings

_OWN = {
    "model": "the settings beside it name the model",
    "save": "replicas would write over each other's folder; give a store, which all of them share",
    "save_every_s": "replicas save nothing; give a store, which all of them share",
}


class ReplicaSettings(BaseModel):
    """What each replica is made of. Number, CPUs and scaling are options of the deployment, which Ray reads.

    Attributes:
        model: `minilm` (packaged), a folder, or a name on the hub. Each machine of the cluster has to have it.
        served_name: Name of the model for clients; None: as `model`.
        models_dir: Folder of models that are named.
        restore: Folder of a saved cache, with its settings and its calibration, that each replica starts from; nothing
            is saved there. It takes the place of `cache`.
        cache: Settings of the cache, `CacheConfig`.
        server: Settings of the server, `ServerSettings`, but for its model and for saving.
        threads: Threads that compute; None: as many as the replica has CPUs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    served_name: str | None = None
    models_dir: Path | None = None
    restore: Path | None = None
    cache: dict[str, Any] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)
    threads: int | None = Field(default=None, ge=1)

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Self:
        """Check all settings, those of cache and server included.

        Raises:
            ConfigError: With the key, its value and the fix.
        """
        for name, reason in _OWN.items():
            if name in (values.get("server") or {}):
                raise ConfigError(f"server.{name}: {reason}")
        try:
            made = cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(explain(error, list(cls.model_fields))) from error
        if made.restore is not None and made.cache:
            raise ConfigError("cache: a cache that is restored has its own settings; give either it or `restore`")
        assert made.cache_config and made.server_settings  # checked here, not by each replica
        return made

    @property
    def cache_config(self) -> CacheConfig:
        """Settings of the cache."""
        return CacheConfig.make(self.cache)

    @property
    def server_settings(self) -> ServerSettings:
        """Settings of the server."""
        try:
            return ServerSettings(**{**self.server, "model": self.served_name or self.model})
        except ValidationError as error:
            raise ConfigError(f"server: {explain(error, list(ServerSettings.model_fields))}") from error

    @property
    def saved(self) -> Path | None:
        """The folder that is restored.

        Raises:
            ConfigError: It holds no saved cache.
        """
        if self.restore is not None and not (self.restore / MANIFEST).is_file():
            raise ConfigError(f"restore: there is no saved cache in {self.restore}")
        return self.restore
