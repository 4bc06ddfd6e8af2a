"""Promises of the command line as a whole; what a command does is tested in tests/cli."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from edgelin import __version__
from edgelin.cli import main
from edgelin.errors import EdgelinError

ROOT = Path(__file__).parents[1]
COMMANDS = main.list_commands(click.Context(main))


def _command(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


def test_every_file_is_a_command() -> None:
    files = {path.stem for path in (ROOT / "edgelin" / "cli").glob("[!_]*.py")}
    assert files == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_and_shows_an_example(name: str) -> None:
    command = _command(name)
    assert command.get_short_help_str()
    assert "Example" in (command.help or "")
    assert f"edgelin {name} " in (command.help or "")
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts[0]} has no help"


@pytest.mark.parametrize("name", COMMANDS)
def test_files_are_thin(name: str) -> None:
    text = Path(importlib.import_module(f"edgelin.cli.{name}").__file__ or "").read_text()
    assert len(text.splitlines()) <= 200


def test_help_needs_no_torch() -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys(["torch", "onnx", "onnx_ir", "onnxscript", "triton"]))
from click.testing import CliRunner
from edgelin.cli import main
for arguments in [["--help"], ["-h"], *([name, "-h"] for name in {COMMANDS!r})]:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    assert "Usage" in result.output, arguments
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_user_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def fails() -> None:
        raise EdgelinError("T=100 is no multiple of chunk=64; pad, or use chunk=50")

    monkeypatch.setattr(main, "get_command", lambda ctx, name: fails)
    result = CliRunner().invoke(main, ["run"])
    assert result.exit_code == 1
    assert result.stderr == "Error: T=100 is no multiple of chunk=64; pad, or use chunk=50\n"
    assert result.stdout == ""


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def fails() -> None:
        importlib.import_module("torch")

    monkeypatch.setattr(main, "get_command", lambda ctx, name: fails)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(main, ["export"])
    assert result.exit_code == 1
    assert result.stderr == (
        'Error: this needs torch, which is not installed: pip install "edgelin[export]"\n'
    )


def test_wrong_usage_exits_with_two() -> None:
    result = CliRunner().invoke(main, ["no-such-command"])
    assert result.exit_code == 2
    assert "no-such-command" in result.stderr


def test_version() -> None:
    assert __version__ in CliRunner().invoke(main, ["--version"]).output
