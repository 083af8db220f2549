"""Saves of a cache that are edited by hand, or cut short."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from llmcache import folder

OURS = 3  # files of one save of an encoder: manifest, data, lock


def names(path: Path) -> set[str]:
    """What a folder holds."""
    return {one.name for one in path.iterdir()}


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the save in a folder."""
    found: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return found


def edit_manifest(path: Path, **fields: object) -> None:
    """Replace fields of a manifest; None leaves one out."""
    found = read_manifest(path) | fields
    (path / "manifest.json").write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def accept(path: Path) -> None:
    """Have the manifest beside a data file name it as it is now."""
    edit_manifest(path.parent, files=read_manifest(path.parent)["files"] | {path.name: folder.sha256(path)})


class Died(BaseException):
    """The process was killed: nothing was done any more."""


@contextmanager
def failing(patch: pytest.MonkeyPatch, at: int, error: BaseException, forever: bool) -> Iterator[list[int]]:
    """Let step number `at` of those that write to the disk fail; if forever, all later ones, too."""
    done = [0]

    def broken(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            done[0] += 1
            if done[0] == at or (forever and done[0] > at):
                if step is safetensors.torch.save_file:  # it writes to a file with a name of its own, then renames it
                    (Path(args[1]).parent / ".tmp123456").write_text("half")
                raise error
            return step(*args, **kwargs)

        return run

    with patch.context() as patched:
        for holder, name in [
            *((os, name) for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")),
            (safetensors.torch, "save_file"),
        ]:
            patched.setattr(holder, name, broken(getattr(holder, name)))
        yield done
