"""The wheel: it holds the whole library and nothing else, and its command works without a checkout."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HELP = """
import importlib.util, sys
sys.path += sys.argv[1:]
import llmcache.cli.main
assert llmcache.__file__.startswith(sys.argv[1]) and importlib.util.find_spec("experiments") is None
llmcache.cli.main.main(["--help"])
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of this checkout's wheel."""
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_the_wheel_holds_the_library_and_nothing_else(unpacked: Path) -> None:
    found = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    (entries,) = (one for one in found if one.endswith(".dist-info/entry_points.txt"))
    listed = subprocess.run(["git", "ls-files", "llmcache"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {one for one in found if ".dist-info/" not in one} == set(listed.stdout.split())
    assert "llmcache = llmcache.cli.main:main" in (unpacked / entries).read_text()


def test_the_command_works_without_the_experiments(unpacked: Path) -> None:
    # Without `site`, which would add the checkout; the dependencies' folder is added by hand.
    python = [sys.executable, "-I", "-S", "-c", HELP, unpacked, sysconfig.get_path("purelib")]
    done = subprocess.run(python, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    names = {line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line.strip()}
    assert names == {"advise", "calibrate", "generate", "repl", "serve", "keys", "info"}
