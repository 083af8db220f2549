"""Saves of a cache that are edited by hand."""

import json
from pathlib import Path
from typing import Any

from llmcache import folder


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
