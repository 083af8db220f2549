"""The command line: complete help, one-line errors, light imports, generated reference."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import llmcache
from llmcache.cli import main as cli
from llmcache.cli.output import write_json
from llmcache.errors import ConfigError
from tests import reference
from tests.commands import run_main
from tests.fixtures import Patch, Shown

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "faiss", "sklearn", "numpy", "datasketch", "matplotlib")


def walk(command: Any, path: tuple[str, ...] = ("llmcache",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command of the click tree with its path, groups included."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


TREE = dict(walk(typer.main.get_command(cli.app)))


def test_the_tree_holds_the_table() -> None:
    leaves = {" ".join(path[1:]) for path, command in TREE.items() if not hasattr(command, "commands")}
    assert leaves == set(cli.COMMANDS)


@pytest.mark.parametrize("path", TREE, ids=" ".join)
def test_commands_and_options_have_help_which_names_them(path: tuple[str, ...], capsys: Shown) -> None:
    assert run_main(*path[1:], "--help") == 0
    shown = capsys.readouterr().out
    assert TREE[path].help
    for parameter in TREE[path].params:
        assert getattr(parameter, "help", None), parameter.name
        assert max(parameter.opts, key=len) in shown or parameter.param_type_name == "argument"


@pytest.mark.parametrize("args", [["--nonsense"], ["info", "--nonsense"], ["nonsense"]])
def test_unknown_words_exit_with_2(args: list[str], capsys: Shown) -> None:
    assert run_main(*args) == 2
    captured = capsys.readouterr()
    assert "nonsense" in captured.err and captured.out == ""


def failing(error: Exception) -> Callable[[], None]:
    def command() -> None:
        """Fail."""
        raise error

    return command


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (failing(ConfigError("tau: 2.0 is too high;\n  give at most 1")), "tau: 2.0 is too high; give at most 1"),
        (failing(FileNotFoundError(2, "No such file or directory", "a.yaml")), "a.yaml: No such file or directory"),
        (failing(PermissionError("read-only")), "read-only"),
        (failing(ConfigError()), "ConfigError"),
        (lambda: write_json(Path("/dev/full"), {"figure": 1}), "/dev/full: No space left on device"),
    ],
)
def test_user_errors_are_one_line(command: Callable[[], None], line: str, monkeypatch: Patch, capsys: Shown) -> None:
    monkeypatch.setattr(cli, "app", cli.build_app({"fail": command}))
    assert run_main("fail") == 2
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == (f"llmcache: {line}\n", "")


def test_other_errors_are_not_hidden(monkeypatch: Patch) -> None:
    monkeypatch.setattr(cli, "app", cli.build_app({"fail": failing(ZeroDivisionError("ours"))}))
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli.main(["fail"])


def test_help_loads_nothing_heavy() -> None:
    code = f"import sys, llmcache.cli.main; print(*(name for name in {HEAVY} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_info_names_what_runs(capsys: Shown) -> None:
    assert run_main("--version") == 0
    assert capsys.readouterr().out == f"llmcache {llmcache.__version__}\n"
    assert run_main("info") == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(rows) == ["llmcache", "python", "torch", "transformers", "faiss", "threads", "device"]
    assert rows["llmcache"] == llmcache.__version__


@pytest.mark.slow
def test_the_reference_is_fresh_whatever_the_terminal_and_a_change_is_noticed(
    tmp_path: Path, monkeypatch: Patch, capsys: Shown
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    assert reference.main(["--check", str(ROOT / "docs")]) == 0, capsys.readouterr().err
    monkeypatch.setenv("COLUMNS", "200")
    assert reference.main([str(tmp_path)]) == 0
    for page in reference.PAGES:
        assert (tmp_path / page).read_text() == (ROOT / "docs" / page).read_text()
    monkeypatch.setattr(reference, "PAGES", {page: reference.PAGES[page]})
    (tmp_path / page).write_text("edited")
    assert reference.main(["--check", str(tmp_path)]) == 1
    assert f"{page} is stale: run `make docs`" in capsys.readouterr().err
