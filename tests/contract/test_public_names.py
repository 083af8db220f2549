"""The contract uses public names only, so that it can test a core written from scratch."""

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llmcache
import llmcache.errors

API = Path(__file__).parents[2] / "docs" / "api.md"
FILES = sorted(Path(__file__).parent.glob("*.py"))
#: Modules that docs/ tells users to import from.
DOCUMENTED = {"llmcache", "llmcache.generation", "llmcache.errors"}
#: Names that bind tests to the present code: patches, and reasons, settings and methods that a rewrite may lack.
PRIVATE = ("cache._", "wrapped._")
FORBIDDEN = {
    *("monkeypatch", "MonkeyPatch", "mock", "inside"),
    *("other_layers", "unknown_output", "unknown_layout", "compiled_layers", "compared"),
    *("prefix_block", "store_least_tokens", "fingerprint_per_layer", "leave_out", "looked_up", "start_model_process"),
}


def _violations(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "llmcache":
            if node.module not in DOCUMENTED:
                yield f"{where} imports from {node.module}"
        elif isinstance(node, ast.Import):
            yield from (
                f"{where} imports {one.name}"
                for one in node.names
                if one.name.startswith("llmcache.") and one.name not in DOCUMENTED
            )
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith(PRIVATE):
            yield f"{where} reads {ast.unparse(node)}"
        names = {getattr(node, name, None) for name in ("id", "arg", "attr", "value")}
        names = {name for name in names if isinstance(name, str)}
        yield from (f"{where} names {name}" for name in sorted(names & FORBIDDEN))


@pytest.mark.parametrize("path", [path for path in FILES if path != Path(__file__)], ids=lambda path: path.name)
def test_names_nothing_but_what_is_public(path: Path) -> None:
    """docs/api.md lists the names that tests may rely on."""
    assert list(_violations(path)) == []


def test_what_the_reference_names_is_there() -> None:
    """Every name of docs/api.md exists, and docs/api.md lists every name that `llmcache` exports."""
    missing, named = [], set(vars(llmcache.errors))
    for name, options in re.findall(r"^::: (\S+)\n((?: .*\n)*)", API.read_text(encoding="utf-8"), re.MULTILINE):
        members = re.search(r"members: \[(.*)\]", options)
        wanted = [f"{name}.{one}" for one in (members[1].split(", ") if members else ())]
        missing += [one for one in (name, *wanted) if _found(one) is None]
        named.add(name.rpartition(".")[2])
    assert missing == [] and set(llmcache.__all__) <= named


def _found(name: str) -> Any:
    """Return the object of this dotted name; None if there is none."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None
