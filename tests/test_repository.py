"""Makefile, CI script, pins, version and pages agree with each other."""

import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import llmcache
from tests.test_rooms import imports

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def package_name(requirement: str) -> str:
    """The normalised name of `Some_Package[extra]>=1`."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_targets_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert named and named <= set(TARGETS)


def test_help_lists_every_target() -> None:
    command = ["make", "--no-print-directory", "help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in result.stdout.splitlines()] == TARGETS


def test_constraints_are_plain_pins_of_every_dependency() -> None:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    wanted = {package_name(requirement) for group in groups for requirement in group} - {PROJECT["name"]}
    assert wanted <= {package_name(line) for line in CONSTRAINTS}
    assert [line for line in CONSTRAINTS if not re.fullmatch(r"[A-Za-z0-9_.-]+==\d[A-Za-z0-9.]*", line)] == []
    assert "torch==2.13.0" in CONSTRAINTS and PROJECT["version"] == llmcache.__version__


def test_project_and_pins_hold_for_every_python_that_is_promised() -> None:
    """Any patch, from the first; of pins, those of the packages that are installed here."""
    minors = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    promised = [f"{minor}.{patch}" for minor in minors for patch in range(30)]
    allowed = {PROJECT["name"]: PROJECT["requires-python"]}
    for pin in CONSTRAINTS:
        name, _, version = pin.partition("==")
        with suppress(PackageNotFoundError):
            found = distribution(name)
            if found.version.partition("+")[0] == version:  # else it is not the pin's
                allowed[pin] = found.metadata["Requires-Python"] or ""
    pytest.importorskip("datasets")  # without the extras that `make setup` installs, few pins are found
    assert "3.11.0" in promised and len(allowed) > 100
    refused = {name: one for name, one in allowed.items() if [*SpecifierSet(one).filter(promised)] != promised}
    assert refused == {}


#: Packages by the name that is imported, if they have another one or come with another one.
PACKAGES = {
    "faiss": "faiss-cpu",
    "huggingface_hub": "transformers",
    "opentelemetry": "opentelemetry-sdk",
    "pydantic_core": "pydantic",
    "sklearn": "scikit-learn",
    "starlette": "fastapi",
    "tokenizers": "transformers",
    "yaml": "pyyaml",
}


@pytest.mark.parametrize("room", ["llmcache", "experiments"])
def test_every_package_that_is_imported_is_declared(room: str) -> None:
    modules = {module.partition(".")[0] for path in (ROOT / room).rglob("*.py") for module, _ in imports(path)}
    imported = modules - {"llmcache", "experiments"} - sys.stdlib_module_names
    extras = {name: group for name, group in PROJECT["optional-dependencies"].items() if name not in ("dev", "outside")}
    declared = {package_name(one) for group in (PROJECT["dependencies"], *extras.values()) for one in group}
    packages = {package_name(PACKAGES.get(name, name)) for name in imported}
    assert "torch" in packages and packages <= declared


def test_ci_runs_what_a_developer_runs_and_judges_coverage() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "set -euo pipefail" in lines
    assert lines[-3:] == ["make check", "make docs", 'make test COVER="$cover"']
    assert "cover=95" in lines
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_no_line_installs_the_package_of_another_project() -> None:
    """`llmcache` on PyPI is another project; ours has another name."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    lines = [
        f"{name}: {line}"
        for name in listed
        if not name.startswith("results/")
        for line in (ROOT / name).read_text(encoding="utf-8", errors="ignore").splitlines()
        if re.search(r"pip3? install .*?[ '\"]llmcache(?![\w/-])", line)
    ]
    assert PROJECT["name"] != "llmcache"
    assert lines == []
