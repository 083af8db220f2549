"""Edits saved caches by hand, and interrupts saves."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from llmcache.support import folder

OURS = 3  # files of one save of an encoder: manifest, data, lock


def names(path: Path) -> set[str]:
    """Return the names of a folder's entries."""
    return {one.name for one in path.iterdir()}


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the save in a folder."""
    found: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return found


def edit_manifest(path: Path, **fields: object) -> None:
    """Replace fields of a manifest; None removes a field."""
    found = read_manifest(path) | fields
    (path / "manifest.json").write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def accept(path: Path) -> None:
    """Write a data file's current checksum to the manifest beside it."""
    edit_manifest(path.parent, files=read_manifest(path.parent)["files"] | {path.name: folder.sha256(path)})


class Died(BaseException):
    """Simulates a killed process: no later step runs."""


@contextmanager
def failing(patch: pytest.MonkeyPatch, at: int, error: BaseException, forever: bool) -> Iterator[list[int]]:
    """Make disk operation number `at` fail, and with `forever` all later ones; yield the count so far."""
    done = [0]

    def broken(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            done[0] += 1
            if done[0] == at or (forever and done[0] > at):
                if step is safetensors.torch.save_file:  # it writes a temporary file, then renames it
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
