"""Standard output that may fail without the work being lost."""

from __future__ import annotations

import os
import sys

import click

from edgelin.errors import EdgelinError


class Output:
    """Standard output that notes its failure, so that the state can still be saved.

    Attributes:
        terminal: Whether a person reads along.
        failure: What went wrong; later text is dropped.
    """

    def __init__(self) -> None:
        self.terminal = sys.stdout is not None and sys.stdout.isatty()
        self.failure: OSError | None = None

    def emit(self, piece: str) -> None:
        """Print a piece of text at once; into a pipe or file as UTF-8, whatever the locale is."""
        if not piece or self.failure is not None:
            return
        try:
            click.echo(piece if self.terminal else piece.encode(), nl=False)
        except OSError as error:
            self.failure = error
            # Python flushes what is left in the buffer when it ends, and would fail again.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)

    def has_failed(self) -> bool:
        """Whether nobody gets what is printed from here on."""
        return self.failure is not None

    def check(self) -> None:
        """End as a shell expects of a program whose output failed."""
        if isinstance(self.failure, BrokenPipeError):
            sys.exit(128 + 13)  # as if by SIGPIPE
        if self.failure is not None:
            reason = self.failure.strerror or self.failure
            raise EdgelinError(f"standard output cannot be written: {reason}")
