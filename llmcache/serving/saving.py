"""What a server's cache is restored from at its start, and saved to: a folder, whose save of something else stays."""

import logging
from pathlib import Path
from typing import Any

from llmcache.cache import LLMCache
from llmcache.config import CacheConfig
from llmcache.errors import BankFileError, LLMCacheError, StoreError, UnfitBankError
from llmcache.folder import MANIFEST, check_ours, check_writable
from llmcache.models.sentences import find_pooled
from llmcache.serving.loading import Served
from llmcache.serving.refusals import described

logger = logging.getLogger("llmcache.serving")


class Saves:
    """The folder of one server, or none.

    Attributes:
        folder: None: nothing is saved.
        is_kept: It holds a whole save that does not fit the server, or files of others, so nothing is saved there.
        has_failed: The latest save did.
    """

    def __init__(self, folder: Path | None, is_kept: bool = False) -> None:
        """Make the folder if needed; one that `is_kept` is only restored from, and has to be there.

        Raises:
            StoreError: Nothing can be saved there.
        """
        self.folder = folder
        self.is_kept = is_kept
        self.has_failed = False
        if folder is not None and not is_kept:
            check_writable(folder)

    @property
    def is_saving(self) -> bool:
        """Whether anything is saved."""
        return self.folder is not None and not self.is_kept

    def hang_cache(self, served: Served, config: CacheConfig | None) -> LLMCache:
        """The cache of a model that is served: the one that was saved, if it fits; else a new one.

        Args:
            served: The model.
            config: Settings; None: those of the save, or the defaults.

        Raises:
            ConfigError: What was saved cannot be served with these settings, or the model with them.
        """
        given = None if config is None else _for_pooled(config, served)
        restored = None if self.folder is None else self._restored(self.folder, served, given)
        if restored is not None:
            return restored
        return LLMCache.wrap(served.model, config=given or _for_pooled(CacheConfig(), served), **_parts(served))

    def save(self, cache: LLMCache) -> None:
        """Save, where anything is saved.

        Raises:
            StoreError: It failed. An earlier save is still whole.
        """
        if self.folder is None or self.is_kept:
            return
        try:
            cache.save(self.folder)
        except BaseException:
            self.has_failed = True
            raise
        self.has_failed = False

    def try_to_save(self, cache: LLMCache) -> None:
        """Save, and log a failure."""
        try:
            self.save(cache)
        except (LLMCacheError, OSError) as error:
            logger.error("the cache could not be saved: %s", error)
        except Exception as error:  # or the next save would not be tried
            logger.error("the cache could not be saved: %s", described(error))

    def _restored(self, folder: Path, served: Served, config: CacheConfig | None) -> LLMCache | None:
        """The cache that was saved; None: there is none, or it is of no use, of which the log tells."""
        try:
            if not self.is_kept:
                check_ours(folder)
        except StoreError as error:
            self._keep(error)
            return None
        if not (folder / MANIFEST).is_file():
            return None
        try:
            return LLMCache.load(served.model, folder, config=config, **_parts(served))
        except UnfitBankError as error:
            self._keep(error)
        except BankFileError as error:
            logger.error("the save is not used, and will be replaced: %s", error)
        return None

    def _keep(self, error: LLMCacheError) -> None:
        self.is_kept = True
        logger.error("what lies there is not used and stays as it is, and nothing is saved: %s", error)


def _parts(served: Served) -> dict[str, Any]:
    return {"tokenizer": served.tokenizer, "answer_of": served.answer_of}


def _for_pooled(config: CacheConfig, served: Served) -> CacheConfig:
    """Where a model pools its states, one vector is kept: states of all tokens are computed by their own route."""
    pooled = find_pooled(served.model)
    if pooled is None or config.payload != "auto":
        return config
    return config.model_copy(update={"payload": pooled.kept})
