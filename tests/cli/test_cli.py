"""The command line: complete help, one-line errors, light imports, generated reference."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import llmcache
from llmcache import CODECS, FINGERPRINTS, STORES, CacheConfig
from llmcache.cli import main as cli
from llmcache.cli.output import write_json
from llmcache.errors import ConfigError
from llmcache.memory.index import INDEXES
from llmcache.memory.policies import POLICIES
from tests import reference
from tests.commands import run_main

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
def test_commands_and_options_have_help_which_names_them(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(*path[1:], "--help") == 0
    shown = capsys.readouterr().out
    assert TREE[path].help
    for parameter in TREE[path].params:
        assert getattr(parameter, "help", None), parameter.name
        assert max(parameter.opts, key=len) in shown or parameter.param_type_name == "argument"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--version") == 0
    assert capsys.readouterr().out == f"llmcache {llmcache.__version__}\n"


@pytest.mark.parametrize("args", [["--nonsense"], ["info", "--nonsense"], ["nonsense"]])
def test_unknown_words_exit_with_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(*args) == 2
    captured = capsys.readouterr()
    assert "nonsense" in captured.err
    assert captured.out == ""


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
def test_user_errors_are_one_line(
    command: Callable[[], None], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", cli.build_app({"fail": command}))
    assert run_main("fail") == 2
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == (f"llmcache: {line}\n", "")


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", cli.build_app({"fail": failing(ZeroDivisionError("ours"))}))
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli.main(["fail"])


def test_help_loads_nothing_heavy() -> None:
    code = f"import sys, llmcache.cli.main; print(*(name for name in {HEAVY} if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_module_is_the_command() -> None:
    result = subprocess.run([sys.executable, "-m", "llmcache", "--help"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("Usage: llmcache ")


def test_info_names_what_runs() -> None:
    result = CliRunner().invoke(cli.app, ["info"], catch_exceptions=False)
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert list(rows) == ["llmcache", "python", "torch", "transformers", "faiss", "threads", "device"]
    assert rows["llmcache"] == llmcache.__version__


@pytest.mark.slow
def test_reference_is_fresh_and_notices_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check", str(ROOT / "docs")]) == 0, capsys.readouterr().err
    assert reference.main(["--check", str(tmp_path)]) == 1
    assert reference.main([str(tmp_path)]) == 0
    for page in reference.PAGES:
        assert reference.main(["--check", str(tmp_path)]) == 0
        path = tmp_path / page
        text = path.read_text(encoding="utf-8")
        path.write_text(text + "edited\n", encoding="utf-8")
        assert reference.main(["--check", str(tmp_path)]) == 1
        assert f"{page} is stale: run `make docs`" in capsys.readouterr().err
        path.write_text(text, encoding="utf-8")


def test_settings_have_a_section_each_with_the_parts_that_they_name() -> None:
    text = reference.render_settings()
    assert re.findall(r"^## `(\w+)`$", text, re.MULTILINE) == list(CacheConfig.model_fields)
    assert "Type `float | dict[int, float] | None`, default `None`." in text
    for registry in (POLICIES, STORES, INDEXES, FINGERPRINTS, CODECS):
        section = text.split(f"## `{registry.kind}`\n")[1].split("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(registry)
    assert "| `ttl` | `ttl_s` |" in text  # no clock: a setting cannot give one
    assert "| `flat` |  |" in text  # no width: the library gives it


def test_reference_does_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    rendered = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        rendered.append(reference.render())
    assert rendered == [(ROOT / "docs" / "cli.md").read_text(encoding="utf-8")] * 2
