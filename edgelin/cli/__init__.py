"""The command line: one thin file a command, loaded only when the command is called."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import click

from edgelin import __version__
from edgelin.errors import EdgelinError

# What edgelin itself needs, and what only some commands import with the extra that brings it.
_BASE = ("numpy", "onnxruntime", "tokenizers", "safetensors", "tqdm", "psutil", "jinja2")
_EXTRAS = {
    "torch": "export",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "sentencepiece": "export",
    "google": "export",
    "triton": "train",
    "matplotlib": "plot",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
}
_COMMANDS = (
    "train", "export", "verify", "run", "serve", "prompt", "eval", "inspect", "bench", "soak",
    "import", "families",
)  # fmt: skip
# By default these end a process at once, and what it was writing stays half done.
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _Killed(BaseException):
    """A signal asked the process to end; on its way up, everything cleans up behind itself."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _LazyGroup(click.Group):
    """Imports ``edgelin.cli.<command>`` on use, so that a command pays only for what it needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"edgelin.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; here, because click would turn the first two errors into "Aborted!"."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # at exit, a full disk could no longer be told
            return result
        except KeyboardInterrupt:
            _end("Interrupted", 128 + signal.SIGINT)
        except EOFError as error:
            _end(f"Error: a file ends too early: {error}; copy or make it again", 1)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, telling in one line what a user can cause."""
        _open_streams()
        try:
            with _signals_raise():
                return super().main(*args, **kwargs)
        except _Killed as killed:
            _end("Terminated", 128 + killed.number)
        except EdgelinError as error:
            _end(f"Error: {error}", 1)
        except ModuleNotFoundError as error:
            _end(f"Error: {_missing(error)}", 1)
        except OSError as error:
            _end(f"Error: {_reason(error)}", 1)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edgelin")
def main() -> None:
    """Train linear-recurrent models on a GPU, run them in constant memory on a device.

    The road: train CONFIG, export CHECKPOINT, verify BUNDLE, run BUNDLE.
    """


def _open_streams() -> None:
    """Replace closed standard streams, whose numbers the next opened files would get."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    closed = sys.stdout is None
    if closed:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if closed:
        _end("Error: standard output is closed; send it to a file, or to /dev/null", 1)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Have signals that would end the process at once raise :class:`_Killed`.

    Those that are ignored (nohup) or handled stay so; the next one of a kind does not disturb the
    clean-up.
    """

    def kill(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise _Killed(number)

    mine = []
    if threading.current_thread() is threading.main_thread():
        mine = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, kill)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def _end(line: str, code: int) -> None:
    """Print a line to standard error and exit, even where a standard stream cannot be written."""
    with contextlib.suppress(OSError):
        click.echo(line, err=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # what cannot be written would fail again at exit, with a traceback
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def _missing(error: ModuleNotFoundError) -> str:
    """What to install; an error of edgelin's own modules is a bug and goes on."""
    name = (error.name or "").partition(".")[0]
    if name in _EXTRAS:
        return f'this needs {name}, which is not installed: pip install "edgelin[{_EXTRAS[name]}]"'
    if name in _BASE:
        return f"edgelin needs {name}, which is not installed: pip install {name}"
    raise error


def _reason(error: OSError) -> str:
    """A system error in words."""
    where = f"{error.filename} " if error.filename else "a file or standard output "
    what = error.strerror or str(error)
    space = "; free some space, or write elsewhere" if error.errno == errno.ENOSPC else ""
    return f"{where}cannot be read or written: {what}{space}"
