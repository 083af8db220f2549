"""With which settings a save is loaded: its own, or others that what it holds can be served with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from llmcache.config import CacheConfig
from llmcache.errors import ConfigError, UnfitBankError

#: Settings that say nothing of what is kept, or of what a calibration promises.
_FREE: Final = frozenset(("auto_bypass", "policy"))
_BUDGETS: Final = frozenset(("max_bytes", "max_entries"))


def choose_settings(
    saved: Mapping[str, Any], given: CacheConfig | None, is_calibrated: bool, folder: str | Path
) -> CacheConfig:
    """The settings of a cache that is loaded.

    Args:
        saved: Those of the save.
        given: Those that are wanted instead; None: the saved ones.
        is_calibrated: The save has a calibration, all of whose requests need room.
        folder: Of the save, for errors.

    Raises:
        UnfitBankError: This version does not know the saved ones.
        ConfigError: Those that are wanted do not suit what was saved.
    """
    try:
        known = CacheConfig.make(saved)
    except ConfigError as error:
        raise UnfitBankError(f"{folder}: saved with settings that are not taken here: {error}") from error
    if given is None:
        return known
    before, now = known.model_dump(mode="json"), given.model_dump(mode="json")
    differing = [
        f"{key} is {now[key]!r}, and was {before[key]!r}"
        for key in now
        if now[key] != before[key] and not _may_change(key, before[key], now[key], is_calibrated)
    ]
    if differing:
        raise ConfigError(
            f"{folder}: saved with other settings than those given: {'; '.join(differing)}. Leave the settings out to "
            "go on with those of the save, or begin anew in another folder"
        )
    return given


def _may_change(key: str, before: Any, now: Any, is_calibrated: bool) -> bool:
    if key in _BUDGETS:  # of None there is no end
        return not is_calibrated or now is None or (before is not None and now >= before)
    return key in _FREE
