"""Fetches other people's tests, if no checkout is named: the source archive of the installed release, from PyPI.

The archive goes into a folder that git ignores. transformers' archive has the common mixins (`tests/test_*.py`), but
not the tests of each family, nor two modules that the mixins import: our `stand_ins.py` replaces these.
"""

import importlib.metadata
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

import stand_ins

HERE = Path(__file__).resolve().parents[1]
ARCHIVES = HERE.parents[1] / "build" / "outside"
PACKAGE = "transformers_tests"
MISSING = ("generation.test_utils", "exporters.test_export")


def fetch(distribution: str, folder: Path = ARCHIVES) -> Path:
    """Return the folder of the installed version's source archive; download and unpack it if necessary."""
    version = importlib.metadata.version(distribution)
    stem = f"{distribution.replace('-', '_')}-{version}"
    source = folder / stem
    if (source / "PKG-INFO").is_file():
        return source
    folder.mkdir(parents=True, exist_ok=True)
    packed = folder / f"{stem}.tar.gz"
    if not packed.is_file():
        _download(f"{distribution}=={version}", folder)
    if not packed.is_file():
        raise RuntimeError(f"{distribution}=={version}: PyPI gave no {packed.name}; name a checkout instead")
    with tarfile.open(packed) as archive:
        facts = archive.extractfile(f"{stem}/PKG-INFO")
        if facts is None or f"\nVersion: {version}\n" not in facts.read().decode():
            raise RuntimeError(f"{packed}: is not version {version}; remove it and call this again")
        # Filters exist from Python 3.11.4 on; the archive is PyPI's, of the installed version.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return source


def _download(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{requirement}: pip could not fetch the source archive:\n{done.stderr.strip()[-800:]}")


def enter(source: Path) -> None:
    """Make an archive's test modules importable as `transformers_tests.test_*`, with stand-ins for what it lacks."""
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(source / "tests")]
    sys.modules[PACKAGE] = package
    for missing in MISSING:
        parent, _, name = missing.partition(".")
        folder: Any = types.ModuleType(f"{PACKAGE}.{parent}")
        folder.__path__, folder.__dict__[name] = [], stand_ins
        sys.modules |= {folder.__name__: folder, f"{PACKAGE}.{missing}": stand_ins}
