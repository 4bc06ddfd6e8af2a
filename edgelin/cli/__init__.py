"""The command line: one thin file a command, loaded only when the command is called."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from edgelin import __version__
from edgelin.errors import EdgelinError

# What only some commands import, and the extra that brings it.
_EXTRAS = {
    "torch": "export",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "triton": "train",
    "matplotlib": "plot",
}
_COMMANDS = ("train", "export", "verify", "run", "eval", "inspect", "bench")


class _LazyGroup(click.Group):
    """Imports ``edgelin.cli.<command>`` on use, so that a command pays only for what it needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"edgelin.cli.{cmd_name}").command
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, telling an :class:`EdgelinError` or a missing extra in one line."""
        try:
            return super().main(*args, **kwargs)
        except EdgelinError as error:
            click.echo(f"Error: {error}", err=True)
        except ModuleNotFoundError as error:
            if error.name not in _EXTRAS:
                raise
            extra = f'pip install "edgelin[{_EXTRAS[error.name]}]"'
            click.echo(f"Error: this needs {error.name}, which is not installed: {extra}", err=True)
        sys.exit(1)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="edgelin")
def main() -> None:
    """Train linear-recurrent models on a GPU, run them in constant memory on a device.

    The road: train CONFIG, export CHECKPOINT, verify BUNDLE, run BUNDLE.
    """
