"""What a server's cache is restored from at its start, and saved to: a folder, whose save of something else stays."""

import logging
from pathlib import Path

from llmcache.cache import LLMCache
from llmcache.config import CacheConfig
from llmcache.errors import BankFileError, LLMCacheError, StoreError, UnfitBankError
from llmcache.folder import MANIFEST, check_ours, check_writable
from llmcache.models.sentences import find_pooled
from llmcache.serving.loading import Served
from llmcache.serving.refusals import described

logger = logging.getLogger("llmcache.serving")


class Saves:
    """The folder of one server, or none. What `is_kept` there stays, and nothing is saved."""

    def __init__(self, folder: Path | None, is_kept: bool = False) -> None:
        """Make the folder if needed; one that `is_kept` is only restored from, and has to be there."""
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
        """Wrap a model in the cache that was saved, if it fits; else in a new one.

        `config` None: the settings of the save, or the defaults. Settings that contradict the save are refused.
        """
        given = None if config is None else _for_pooled(config, served)
        restored = None if self.folder is None else self._restored(self.folder, served, given)
        if restored is not None:
            return restored
        config = given or _for_pooled(CacheConfig(), served)
        return LLMCache.wrap(served.model, config=config, tokenizer=served.tokenizer, answer_of=served.answer_of)

    def save(self, cache: LLMCache) -> None:
        """Save, where anything is saved. If it fails, an earlier save is still whole."""
        if self.folder is None or self.is_kept:
            return
        try:
            cache.save(self.folder)
        except BaseException:
            self.has_failed = True
            raise
        self.has_failed = False

    def try_to_save(self, cache: LLMCache) -> None:
        """Save, and log a failure, so that the next save is tried."""
        try:
            self.save(cache)
        except Exception as error:
            told = error if isinstance(error, LLMCacheError | OSError) else described(error)
            logger.error("the cache could not be saved: %s", told)

    def _restored(self, folder: Path, served: Served, config: CacheConfig | None) -> LLMCache | None:
        """Load the cache that was saved; None: there is none, or it cannot be used, which is logged."""
        try:
            if not self.is_kept:
                check_ours(folder)
        except StoreError as error:
            self._keep(error)
            return None
        if not (folder / MANIFEST).is_file():
            return None
        try:
            return LLMCache.load(
                served.model, folder, config=config, tokenizer=served.tokenizer, answer_of=served.answer_of
            )
        except UnfitBankError as error:
            self._keep(error)
        except BankFileError as error:
            logger.error("the save is not used, and will be replaced: %s", error)
        return None

    def _keep(self, error: LLMCacheError) -> None:
        self.is_kept = True
        logger.error("what lies there is not used and stays as it is, and nothing is saved: %s", error)


def _for_pooled(config: CacheConfig, served: Served) -> CacheConfig:
    """Keep one vector where a model pools its states: states of all tokens are computed by their own route."""
    pooled = find_pooled(served.model)
    if pooled is None or config.payload != "auto":
        return config
    return config.model_copy(update={"payload": pooled.kept})
