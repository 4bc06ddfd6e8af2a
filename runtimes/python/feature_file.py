"""Reading features: one sequence as ``.npy``, lines of numbers, and labelled sequences as ``.npz``.

A data set is an ``.npz`` of ``x`` float32 `[sum of lengths, F]`, ``lengths`` int64 `[n]` and, where
answers are known, ``y``: for a head ``"sequence"`` `[n]` classes or `[n, C]` values, for a head
``"step"`` `[sum of lengths]` classes, -1 where none is known, or `[sum of lengths, C]` values.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgelin.errors import EdgelinError
from edgelin.runtimes.signature import Features, Input, Output

Array = NDArray[Any]


@dataclass(frozen=True)
class Sequences:
    """Sequences of features, one after the other, and what is known of them.

    Args:
        x: float32 `[sum of lengths, F]`.
        lengths: int64 `[n]`, each 1 or more.
        y: Classes or values, see the module's docstring; None: not known.
    """

    x: Array
    lengths: Array
    y: Array | None = None

    def __iter__(self) -> Iterator[Array]:
        """Every sequence `[T, F]`."""
        return iter(np.split(self.x, np.cumsum(self.lengths)[:-1]))


def check_features(source: Input, where: object) -> Features:
    """The input of a model, which must be of features.

    Raises:
        EdgelinError: It reads text.
    """
    if not isinstance(source, Features):
        raise EdgelinError(f"{where} reads text, not features; leave out --features")
    return source


def read_sequences(path: Path, source: Features, output: Output) -> Sequences:
    """Read an ``.npz`` for a model.

    Args:
        path: The file.
        source: What the model reads.
        output: What it answers.

    Raises:
        EdgelinError: The file is missing or damaged, or does not fit the model.
    """
    arrays = _load(path, ".npz")
    for name in ("x", "lengths"):
        if name not in arrays:
            raise EdgelinError(f"{path} lacks {name}; it has: {', '.join(arrays) or 'nothing'}")
    lengths, y = arrays["lengths"], arrays.get("y")
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not lengths.size:
        raise EdgelinError(f"{path}: lengths are {_words(lengths)}; integers [n] are needed")
    try:
        x, _ = source.check(arrays["x"], 1)
    except EdgelinError as error:
        raise EdgelinError(f"{path}: x: {error}") from None
    if arrays["x"].ndim != 2 or lengths.min() < 1 or lengths.sum() != x.shape[1]:
        raise EdgelinError(
            f"{path}: x has {x.shape[1]} steps and lengths, from {lengths.min()} on, add up to "
            f"{lengths.sum()}; x is [sum of lengths, {source.size}], every length 1 or more"
        )
    if y is not None:
        _check_answers(path, y, x.shape[1] if output.head == "step" else lengths.size, output)
    return Sequences(x[0], lengths, y)


def read_steps(path: Path) -> Array:
    """Read one sequence `[T, F]` or `[1, T, F]` from an ``.npy``; the shape is not checked.

    Raises:
        EdgelinError: The file is missing or damaged.
    """
    return _load(path, ".npy")[""]


def parse_steps(lines: Iterable[str], source: Features) -> Iterator[Array]:
    """Read steps `[1, F]` from lines of numbers between commas or spaces; empty ones are skipped.

    Raises:
        EdgelinError: A line has other than F finite numbers.
    """
    for number, line in enumerate(lines, start=1):
        words = line.replace(",", " ").split()
        if not words:
            continue
        try:
            if len(words) != source.size:
                raise EdgelinError(f"{len(words)} numbers, {source.size} are needed")
            yield source.check([[float(word) for word in words]], 1)[0][0]
        except (ValueError, EdgelinError) as error:
            raise EdgelinError(f"line {number} of standard input: {error}") from None


def _load(path: Path, suffix: str) -> dict[str, Array]:
    """The arrays of an ``.npz`` by name, or the one of an ``.npy`` under the empty name."""
    problem = f"give numbers in an {suffix} file that numpy wrote"
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            arrays = {"": found}
        else:
            with found:
                arrays = {name: found[name] for name in found.files}
    except FileNotFoundError:
        raise EdgelinError(f"there is no file {path}") from None
    except OSError as error:
        raise EdgelinError(f"{path} cannot be read: {error.strerror or error}; {problem}") from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, MemoryError):
        raise EdgelinError(f"{path} is no {suffix} file, or a damaged one; {problem}") from None
    if ("" in arrays) != (suffix == ".npy"):
        raise EdgelinError(f"{path} is no {suffix} file; {problem}")
    return arrays


def _check_answers(path: Path, y: Array, count: int, output: Output) -> None:
    """Refuse answers that the model cannot be scored with."""
    if not output.is_distribution:
        right = y.shape == (count, output.size) and y.dtype.kind in "fiu"
        if not right or not np.isfinite(y).all():
            raise EdgelinError(
                f"{path}: y is {_words(y)}; finite numbers [{count}, {output.size}] are needed"
            )
        return
    least = -1 if output.head == "step" else 0
    if y.shape != (count,) or y.dtype.kind not in "iu":
        raise EdgelinError(f"{path}: y is {_words(y)}; classes, integers [{count}], are needed")
    if y.size and not (least <= y.min() and y.max() < output.size):
        bad = y[(y < least) | (y >= output.size)][0]
        raise EdgelinError(f"{path}: y has class {bad}; allowed: {least} .. {output.size - 1}")


def _words(array: Array) -> str:
    """Type and shape."""
    return f"{array.dtype} {list(array.shape)}"
