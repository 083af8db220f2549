"""What a user installs: the wheel holds the library alone, and its commands work where no checkout is."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.tiny_prompts import write_prompts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llmcache` in an environment that holds the wheel and, from this one, what the wheel depends on."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    target = ["--target", str(packages), str(wheel)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", *target], check=True, capture_output=True
    )
    # A plain line of a .pth file adds a folder without reading the .pth files in it: no checkout comes along.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = folder / "llmcache"
    script.write_text(f"#!{folder / 'bin' / 'python'}\nfrom llmcache.cli.main import main\nmain()\n")
    script.chmod(0o755)
    return script


def run(command: Path, *args: str) -> str:
    done = subprocess.run([command, *args], capture_output=True, text=True, cwd=command.parent, check=True)
    return done.stdout


def test_the_wheel_holds_the_library_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"llmcache"}
    assert "llmcache/py.typed" in names


def test_commands_of_the_library_are_there_without_the_experiments(command: Path) -> None:
    shown = run(command, "--help")
    assert {line.split()[0] for line in shown.partition("Commands:")[2].splitlines() if line.strip()} == {
        "generate",
        "repl",
        "info",
    }


def test_info_tells_the_version(command: Path) -> None:
    assert run(command, "info").startswith("llmcache ")


def test_a_folder_generates(command: Path, tmp_path: Path) -> None:
    models = write_prompts(tmp_path).models
    asked = ("--model", "tiny", "--models-dir", str(models), "--prompt", "a train in winter", "--max-new-tokens", "4")
    assert run(command, "generate", *asked, "--verbose").count("computed") == 1
