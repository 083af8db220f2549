"""The wheel: it holds only the library, and its commands work without a checkout."""

import json
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
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel, and with this environment's packages as dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    target = ["--target", str(packages), str(wheel)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", *target], check=True, capture_output=True
    )
    # A folder added by a .pth file does not have its own .pth files read: no editable checkout comes along.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


#: Runs commands in one process, which loads torch and transformers once; each output ends with "\0".
RUN_EACH = """
import json, sys
from llmcache.cli.main import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, (words, end.code)
    print(end="\\0")
"""


def run(environment: Path, code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run code in the environment, isolated from `PYTHONPATH` and the working directory."""
    command = [environment, "-I", "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_wheel_holds_the_library_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"llmcache"}
    assert "llmcache/py.typed" in names


def test_what_is_imported_is_the_wheel(environment: Path) -> None:
    done = run(environment, "import llmcache; print(llmcache.__file__); import experiments")
    assert Path(done.stdout.strip()).is_relative_to(environment.parents[1])
    assert "ModuleNotFoundError: No module named 'experiments'" in done.stderr


def test_commands_of_the_library_work_without_the_experiments(environment: Path, tmp_path: Path) -> None:
    models = write_prompts(tmp_path).models
    asked = ["--model", "tiny", "--models-dir", str(models), "--prompt", "a train in winter", "--max-new-tokens", "4"]
    commands = [["--help"], ["info"], ["generate", *asked, "--verbose"]]
    done = run(environment, RUN_EACH, json.dumps(commands))
    assert done.returncode == 0, done.stderr
    shown, info, generated, rest = done.stdout.split("\0")
    names = {line.split()[0] for line in shown.partition("Commands:")[2].splitlines() if line.strip()}
    assert names == {"generate", "repl", "serve", "keys", "info"}
    assert info.startswith("llmcache ")
    assert generated.count("computed") == 1 and rest == ""
