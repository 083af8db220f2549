"""Imports run one way: a room, that is a top-level module or package, imports only rooms of earlier rows."""

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import llmcache
from llmcache import lab

ROOT = Path(__file__).parents[1]

#: In import order: a room may import only rooms of earlier rows.
LIBRARY = (
    ("errors",),
    ("support",),
    ("config", "stats"),
    ("models",),
    ("request",),
    ("memory",),
    ("engines",),
    ("reuse",),
    ("calls",),
    ("paper",),
    ("advice",),
    ("cache",),
    ("testing",),
    ("generation", "sklearn"),
    ("serving",),
    ("lab",),
    ("cli",),
    ("__main__",),
)
EXPERIMENTS = (
    ("support",),
    ("data",),
    ("models",),
    ("tasks", "baseline_server"),
    ("methods",),
    ("metrics",),
    ("replay",),
    ("prepare",),
    ("measures",),
    ("runs",),
    ("report",),
    ("cli",),
    ("decisions",),
)
ROWS = {"llmcache": LIBRARY, "experiments": EXPERIMENTS}
#: Modules of the library that users import.
PUBLIC = {"llmcache", "llmcache.generation", "llmcache.serving.ray"}
#: Rooms that `generation` may import: it works on wrapped models and on plain ones.
GENERATION = {"generation", "models", "request", "errors", "support"}


@functools.cache
def imports(path: Path) -> list[tuple[str, list[str]]]:
    """Return a file's imports, those for types only included: module and names."""
    found: list[tuple[str, list[str]]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", [name.name for name in node.names]))
        elif isinstance(node, ast.Import):
            found += [(name.name, []) for name in node.names]
    return found


def rooms_of(package: str) -> Iterator[tuple[Path, str, str, list[str]]]:
    """Yield each import within the package, but those of its own `__init__`: file, room, imported room, names."""
    for path in sorted((ROOT / package).rglob("*.py")):
        own = path.relative_to(ROOT / package).with_suffix("").parts[0]
        for module, names in imports(path):
            if module.startswith(f"{package}.") and own != "__init__":
                yield path.relative_to(ROOT), own, module.split(".")[1], names


@pytest.mark.parametrize("package", ROWS)
def test_no_files_import_each_other(package: str) -> None:
    """Type imports count. The package's own `__init__` is left out: it names what users import."""
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / package).rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in files.items() if name != f"{package}.__init__"}
    graph = {module: set[str]() for module in modules}
    for module, path in modules.items():
        for imported, names in imports(path):
            inner = {f"{imported}.{name}" for name in names} & modules.keys()
            graph[module] |= inner if len(inner) == len(names) > 0 else {imported} & modules.keys() | inner
        graph[module].discard(module)
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("package", ROWS)
def test_imports_run_one_way_and_take_no_private_name(package: str) -> None:
    rank = {room: number for number, row in enumerate(ROWS[package]) for room in row}
    for path, own, room, names in rooms_of(package):
        if own != room:
            assert rank[room] < rank[own], f"{path}: {own} may not import {room} ({', '.join(names)})"
            assert not [name for name in names if re.match("_[^_]", name)], path


@pytest.mark.parametrize(("package", "n_files", "n_packages"), [("llmcache", 9, 12), ("experiments", 3, 13)])
def test_every_room_stands_in_the_order_and_says_what_it_is_for(package: str, n_files: int, n_packages: int) -> None:
    packages, files = {path.parent for path in (ROOT / package).glob("*/__init__.py")}, [*(ROOT / package).glob("*.py")]
    assert {path.stem for path in [*packages, *files]} - {"__init__"} == {room for row in ROWS[package] for room in row}
    assert len(files) <= n_files and len(packages) <= n_packages
    for init in (ROOT / package).rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), init


def test_the_library_knows_nothing_of_the_experiments() -> None:
    for path in (ROOT / "llmcache").rglob("*.py"):
        assert not [module for module, _ in imports(path) if module.split(".")[0] in ("experiments", "tests")], path


def test_experiments_know_public_names_and_the_lab_alone() -> None:
    """Of the library's internals, experiments use exactly the names of `llmcache.lab`, and `llmcache.cli`."""
    taken = set()
    for path in (ROOT / "experiments").rglob("*.py"):
        for module, names in imports(path):
            if module == "llmcache.lab":
                taken |= set(names)
            elif module.split(".")[0] == "llmcache" and not module.startswith("llmcache.cli."):
                assert module in PUBLIC, f"{path}: {module}"
                assert module != "llmcache" or set(names) <= {*llmcache.__all__, "__version__"}, f"{path}: {names}"
    assert taken == set(lab.__all__) == set(lab._HOME)
    for name in lab.__all__:
        assert getattr(lab, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = lab.nothing


def test_generation_stands_on_models_alone() -> None:
    assert {room for path, own, room, _ in rooms_of("llmcache") if own == "generation"} <= GENERATION
