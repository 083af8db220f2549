"""The folder from which a server's cache is restored at startup and to which it is saved."""

import logging
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from llmcache.cache import LLMCache
from llmcache.calls.save import CALIBRATED
from llmcache.config import CacheConfig
from llmcache.errors import BankFileError, LLMCacheError, StoreError, UnfitBankError
from llmcache.models.sentences import find_pooled
from llmcache.serving.loading import Served
from llmcache.serving.refusals import described
from llmcache.support.folder import MANIFEST, check_ours, check_writable

logger = logging.getLogger("llmcache.serving")


class Saves:
    """The save folder of one server, or none. If `is_kept`, the folder's content stays and nothing is saved."""

    def __init__(self, folder: Path | None, is_kept: bool = False) -> None:
        """Create the folder if needed. With `is_kept` it is only read, and must exist."""
        self.folder = folder
        self.is_kept = is_kept
        self.has_failed = False
        if folder is not None and not is_kept:
            check_writable(folder)

    @property
    def is_saving(self) -> bool:
        return self.folder is not None and not self.is_kept

    def attach_cache(self, served: Served, config: CacheConfig | None, **settings: Any) -> LLMCache:
        """Wrap the model in the saved cache if it fits, else in a new one, and return the cache.

        With `config` None, the settings are those of the save, or the defaults, with the single `settings` replaced.
        Settings that contradict the save raise an error.
        """
        made, pooled = CacheConfig.make(config, **settings), find_pooled(served.model)
        if pooled is not None and made.payload == "auto":  # keep the pooled vector: `/embed_all` computes states anew
            made = made.model_copy(update={"payload": pooled.kept})
        given = settings if config is None else {"config": made}
        restored = None if self.folder is None else self._restore(self.folder, served, given)
        if restored is not None:
            return restored
        return LLMCache.wrap(served.model, config=made, tokenizer=served.tokenizer, answer_of=served.answer_of)

    def save(self, cache: LLMCache) -> None:
        """Save the cache if `is_saving`. If this fails, the previous save stays intact."""
        if self.folder is None or self.is_kept:
            return
        began = perf_counter()
        try:
            cache.save(self.folder)
        except BaseException:
            self.has_failed = True
            raise
        self.has_failed = False
        logger.info("saved %d requests to %s in %.1f s", cache.stats().n_stored, self.folder, perf_counter() - began)

    def try_to_save(self, cache: LLMCache) -> None:
        """Save the cache; log a failure instead of raising it, so that later saves are still tried."""
        try:
            self.save(cache)
        except Exception as error:
            reason = error if isinstance(error, LLMCacheError | OSError) else described(error)
            logger.error("the cache could not be saved: %s", reason)

    def _restore(self, folder: Path, served: Served, given: Mapping[str, Any]) -> LLMCache | None:
        """Return the saved cache, with settings as for `LLMCache.load`; None if it cannot be used, which is logged."""
        try:
            if not self.is_kept:
                check_ours(folder)
        except StoreError as error:
            self._keep_folder(error)
            return None
        if not (folder / MANIFEST).is_file():
            return None
        began = perf_counter()
        try:
            cache = LLMCache.load(served.model, folder, tokenizer=served.tokenizer, answer_of=served.answer_of, **given)
            took = perf_counter() - began
            logger.info("restored %d requests from %s in %.1f s", cache.stats().n_stored, folder, took)
            if cache.calibration is not None:
                logger.info("calibrated: %s", str(cache.calibration).partition("\n")[0])
            elif given and any(folder.glob(f"{CALIBRATED}-*")):  # made with another engine or draft
                self.is_kept = True
                logger.error(
                    "the calibration of the save does not serve with these settings; nothing is saved, so it stays"
                )
            return cache
        except UnfitBankError as error:
            self._keep_folder(error)
        except BankFileError as error:
            logger.error("the save is not used, and will be replaced: %s", error)
        return None

    def _keep_folder(self, error: LLMCacheError) -> None:
        self.is_kept = True
        logger.error("the content of the save folder is not used and stays as it is, and nothing is saved: %s", error)
