"""A server starts from what the last one left on the disk: a save that is whole, or one that was cut short."""

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmcache.folder import JOURNAL, MANIFEST
from llmcache.serving.encoder import Output
from llmcache.serving.loading import load_served
from llmcache.serving.server import Server
from tests.saves import OURS, Died, failing, names, read_manifest
from tests.serving.served import WORDS, make_server, within


async def _ask(server: Server, texts: tuple[str, ...]) -> list[Output]:
    """Each text by itself: what is computed at once rounds otherwise."""
    assert server.encoder is not None
    found = [(await server.encoder.run([text], "default", True, "right"))[0] for text in texts]
    return [one for one in found if isinstance(one, Output)]


@pytest.mark.slow
def test_a_save_that_dies_at_any_step_leaves_the_last_one_to_the_next_start(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server starts on a copy of what the one before it had on the disk when it died, one step later each time."""
    alone = load_served(str(models / "classifier"))
    saved: tuple[str, ...] = ()
    n_cut_short = 0
    (tmp_path / "0").mkdir()

    async def live_and_die(server: Server, at: int) -> tuple[list[Output], int]:
        left = tmp_path / str(at - 1)
        found = await _ask(server, WORDS[:at])
        with failing(monkeypatch, at, Died(), forever=True) as done, suppress(Died):
            server.save(left)
        shutil.copytree(left, tmp_path / str(at))
        return found, done[0]

    for at in range(1, 100):
        before = _manifest(tmp_path / str(at - 1))
        server = make_server(models / "classifier", {"auto_bypass": False}, save=tmp_path / str(at - 1))
        found, n_steps = within(server, partial(live_and_die, server, at))
        assert [one.rung for one in found[: len(saved)]] == ["exact"] * len(saved)
        for text, one in zip(WORDS, found, strict=False):
            with torch.inference_mode():
                own = alone.forward(dict(alone.tokenizer(text, return_tensors="pt")))
            assert np.array_equal(one.values, own[0].numpy())
        assert len(names(tmp_path / str(at - 1))) == OURS  # it saved when it was stopped, and tidied up
        if n_steps < at:
            break
        n_cut_short += JOURNAL in names(tmp_path / str(at))
        if _manifest(tmp_path / str(at)) != before:
            saved = WORDS[:at]
    assert at > 15 and n_cut_short > 10 and saved


def _manifest(folder: Path) -> Any:
    return read_manifest(folder) if (folder / MANIFEST).is_file() else None


@pytest.mark.parametrize("damage", ["cut short", "gone", "no manifest"])
def test_a_save_that_cannot_be_read_is_told_and_replaced(
    damage: str, models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rungs() -> list[str | None]:
        server = make_server(models / "classifier", save=tmp_path / "save")
        return [one.rung for one in within(server, partial(_ask, server, ("card",)))]

    assert rungs() == [None]
    (path,) = (tmp_path / "save").glob("states-*")
    if damage == "cut short":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "gone":
        path.unlink()
    else:
        (tmp_path / "save" / MANIFEST).unlink()
    assert rungs() == [None]
    assert ("is not used" in caplog.text) == (damage != "no manifest")
    assert rungs() == ["exact"]
