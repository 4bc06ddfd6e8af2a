"""Promises of the command line as a whole; what a command does is tested in tests/cli."""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from edgelin import __version__, cli
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


def _fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Have every command raise this."""

    @click.command()
    def fails() -> None:
        raise error

    monkeypatch.setattr(main, "get_command", lambda ctx, name: fails)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "Interrupted"),
        (
            EOFError("no end-of-stream marker"),
            1,
            "Error: a file ends too early: no end-of-stream marker; copy or make it again",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            "Error: a file or standard output cannot be read or written: No space left on device; "
            "free some space, or write elsewhere",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "a/b"),
            1,
            "Error: a/b cannot be read or written: Permission denied",
        ),
        (
            ModuleNotFoundError("", name="onnxruntime.capi"),
            1,
            "Error: edgelin needs onnxruntime, which is not installed: pip install onnxruntime",
        ),
    ],
)
def test_what_a_user_can_cause_is_one_line(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_with(monkeypatch, error)
    result = CliRunner().invoke(main, ["bench"])
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"{line}\n")


def test_a_missing_module_of_ours_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_with(monkeypatch, ModuleNotFoundError("", name="edgelin.nothing"))
    assert isinstance(CliRunner().invoke(main, ["run"]).exception, ModuleNotFoundError)


def test_every_base_package_is_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}  # type: ignore[index]
    assert names == {"click", *cli._BASE}


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_cleans_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    @click.command()
    def waits() -> None:
        try:
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(10)
        finally:
            os.kill(os.getpid(), getattr(signal, name))  # impatient
            done.append(True)

    monkeypatch.setattr(main, "get_command", lambda ctx, name: waits)
    before = signal.getsignal(getattr(signal, name))
    result = CliRunner().invoke(main, ["export"])
    assert done
    assert result.exit_code == 128 + getattr(signal, name)
    assert result.stderr == "Terminated\n"
    assert signal.getsignal(getattr(signal, name)) == before


_PRINTS = """
import click, sys
from edgelin.cli import main
@click.command()
def prints():
    {body}
main.get_command = lambda ctx, name: prints
main(["run"])
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("body", "streams", "code", "wanted"),
    [
        ("click.echo('x')", ">/dev/full", 1, "No space left on device"),
        ("print('x')", ">/dev/full", 1, "No space left on device"),
        ("print('x')", ">&-", 1, "standard output is closed"),
        ("print(repr(sys.stdin.read()))", "<&-", 0, ""),
        ("print('x', file=sys.stderr)", "2>&-", 0, ""),
        ("raise SystemExit(3)", ">&- 2>&-", 1, ""),
        ("click.echo('x'); click.echo('x')", "| true; exit ${PIPESTATUS[0]}", None, ""),
    ],
)
def test_closed_and_full_streams(body: str, streams: str, code: int | None, wanted: str) -> None:
    line = f'"{sys.executable}" -c "$CODE" {streams}'
    environment = {**os.environ, "CODE": _PRINTS.format(body=body)}
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert code is None or done.returncode == code, done.stderr
    assert wanted in done.stderr
    assert len(done.stderr.splitlines()) == bool(wanted)
