"""Checks of what a user gives, each refused in one line before any work is done."""

from __future__ import annotations

import contextlib
import math
import numbers
import os
from collections.abc import Iterator
from pathlib import Path

from edgelin.errors import EdgelinError
from edgelin.files import replacing

# onnxruntime's threads spin: many more than cores take minutes for a token.
MAX_THREADS = 8 * (os.cpu_count() or 1)


def require(good: bool, name: str, value: object, allowed: str) -> None:
    """Raise the one-line error of a setting out of range."""
    if not good:
        raise EdgelinError(f"{name} is {value!r}; allowed: {allowed}")


@contextlib.contextmanager
def needing_torch(folder: Path) -> Iterator[None]:
    """Imports of what runs a checkpoint folder.

    Raises:
        EdgelinError: torch, or what else training needs, is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise EdgelinError(
            f'{folder} is a checkpoint, which needs torch ({error}): pip install "edgelin[train]"'
        ) from error


def integer(name: str, value: object, allowed: str) -> int:
    """An int from any integer type, numpy's too; no float, bool or text stands for one."""
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    require(good, name, value, f"an integer, {allowed}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def positive(name: str, value: object) -> int:
    """An integer of at least 1."""
    found = integer(name, value, "1 or more")
    require(found >= 1, name, found, "1 or more")
    return found


def number(name: str, value: object, allowed: str) -> float:
    """A float from any finite real number."""
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    require(good, name, value, f"a number, {allowed}")
    try:
        found = float(value)  # type: ignore[arg-type]
    except OverflowError:
        found = math.inf
    require(math.isfinite(found), name, value, f"a finite number, {allowed}")
    return found


def thread_count(value: object) -> int:
    """A number of threads that onnxruntime can be given."""
    allowed = f"1 .. {MAX_THREADS}"
    found = integer("threads", value, allowed)
    require(1 <= found <= MAX_THREADS, "threads", found, allowed)
    return found


class _Tried(Exception):
    """Leaves ``replacing`` without touching the target."""


def target(path: Path) -> None:
    """Refuse a path where no file can be written; nothing is left behind.

    Raises:
        EdgelinError: It is a folder or a device, or its folder is missing or not writable.
    """
    try:
        if path.is_dir() or not path.name:
            problem = "it is a folder; give the name of a file"
        elif path.exists() and not path.is_file():
            problem = "it is no plain file; give the name of a new file"
        elif not path.parent.is_dir():
            problem = f"there is no folder {path.parent}; make it first"
        else:
            with replacing(path) as part:
                part.touch()
                raise _Tried
    except _Tried:
        return
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    raise EdgelinError(f"{str(path)!r} cannot be written: {problem}")
