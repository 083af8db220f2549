"""The measure `prefix_limit`: all ways give the same token; rows that were not run say why."""

from pathlib import Path

import pytest
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from experiments.measures.prefix_limit import n_known
from experiments.support.files import Folders
from llmcache.errors import ConfigError
from tests.experiments.measuring import measured, told
from tests.experiments.test_measure_latency import save_gpt2

LIMIT = {"measure": "prefix_limit", "models": ["tiny"], "lengths": [64, 256], "shares": [0.5, 0.75], "rounds": 2}


def test_every_way_gives_the_same_token_and_lengths_that_a_model_does_not_take_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, search = [], PagedAttentionCache.search_prefix_match
    monkeypatch.setattr(
        PagedAttentionCache,
        "search_prefix_match",
        lambda *args: shared.append(search(*args)) or shared[-1],
    )
    save_gpt2(tmp_path / "tiny")
    outcome = measured(LIMIT, Folders(models=tmp_path))
    first, second, third = outcome.rows
    for row, share in ((first, 0.5), (second, 0.75)):
        assert (row["length"], row["share"], row["n_known"]) == (64, share, 64 * share)
        assert (row["n_same"], row["not_run"]) == (2, "")
        assert row["max_diff"] < 1e-4
        assert min(row[name] for name in ("plain_ms", "cache_ms", "limit_ms", "batching_ms", "copy_ms")) > 0
    assert shared == [0, 32, 32, 0, 48, 48]  # continuous batching shares from the second prompt on
    assert (third["length"], third["limit_ms"]) == (256, None)
    assert "128 tokens (got 256)" in third["not_run"]
    assert "| 64 | 0.75 | 48 |" in told(LIMIT, outcome)


def test_known_are_whole_blocks_and_something_is_left() -> None:
    assert n_known(512, 0.97) == 496
    for share in (0.1, 1.0):
        with pytest.raises(ConfigError, match="shares"):
            measured({**LIMIT, "lengths": [64], "shares": [share]}, Folders())
