"""With which settings a save is loaded."""

from pathlib import Path
from typing import Any

import pytest

from llmcache import BankFileError, CacheConfig, ConfigError, LLMCache, UnfitBankError
from llmcache.saved_settings import choose_settings
from tests.saves import edit_manifest
from tests.tiny_models import BARE, build, padded


def choose(saved: dict[str, Any], given: dict[str, Any] | None, is_calibrated: bool = False) -> CacheConfig:
    return choose_settings(saved, None if given is None else CacheConfig.make(given), is_calibrated, "folder")


def test_what_says_nothing_of_what_is_kept_may_change() -> None:
    saved = {"max_bytes": 1000, "policy": "lfu"}
    assert choose(saved, None) == CacheConfig.make(saved)
    given = {"max_bytes": 500, "auto_bypass": False}
    assert choose(saved, given) == CacheConfig.make(given)
    assert choose({"max_bytes": 1000}, {"max_bytes": 1000, "learn": None}).max_bytes == 1000  # a default that is named


def test_others_are_refused_by_both_values() -> None:
    with pytest.raises(
        ConfigError, match=r"folder: .*learn is 9, and was 7; max_drop is 0\.1, and was 0\.005\. "
    ) as error:
        choose({"learn": 7, "max_bytes": 5}, {"learn": 9, "max_drop": 0.1})
    assert not isinstance(error.value, BankFileError) and "max_bytes" not in str(error.value)


@pytest.mark.parametrize("budget", ["max_bytes", "max_entries"])
def test_a_calibration_keeps_the_room_that_it_needs(budget: str) -> None:
    assert choose({budget: 10}, {budget: 11}, is_calibrated=True) == CacheConfig.make({budget: 11})
    with pytest.raises(ConfigError, match=f"{budget} is 9, and was 10"):
        choose({budget: 10}, {budget: 9}, is_calibrated=True)
    if budget == "max_entries":
        assert choose({budget: 10}, {}, is_calibrated=True).max_entries is None
        with pytest.raises(ConfigError, match="was None"):
            choose({}, {budget: 10}, is_calibrated=True)


@pytest.mark.parametrize("config", [{"nosuch": 1}, {"max_bytes": -1}, {"policy": "nosuch"}, {"layers": [99]}])
def test_settings_that_are_not_taken_here_make_a_save_unfit(tmp_path: Path, config: dict[str, Any]) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        cache.save(tmp_path)
    edit_manifest(tmp_path, config=config)
    model = build(BARE["bert"])
    with pytest.raises(UnfitBankError) as error:
        LLMCache.load(model, tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
    LLMCache.wrap(model).unwrap()


def test_a_cache_is_loaded_into_a_smaller_budget(tmp_path: Path) -> None:
    with LLMCache.wrap(build(BARE["bert"])) as cache:
        for length in (5, 6, 7):
            cache(**padded([length]))
        cache.save(tmp_path)
    with LLMCache.load(build(BARE["bert"]), tmp_path, config={"max_entries": 2, "policy": "fifo"}) as cache:
        assert cache.stats().n_stored == 2
        for length in (6, 7):
            cache(**padded([length]))
        assert cache.stats().hits == {"exact": 2}
