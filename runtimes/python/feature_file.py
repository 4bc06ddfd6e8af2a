"""Features as ``edgelin run`` reads them: one sequence as .npy, or lines of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edgelin.config import FeatureConfig
from edgelin.errors import EdgelinError
from edgelin.runtimes.signature import Features, Input, Output
from edgelin.sequences import load_arrays

Array = NDArray[Any]


def check_features(source: Input, where: object) -> Features:
    """The input of a model, which must be of features.

    Raises:
        EdgelinError: It reads text.
    """
    if not isinstance(source, Features):
        raise EdgelinError(f"{where} reads text, not features; leave out --features")
    return source


def config_of(source: Features, output: Output) -> FeatureConfig:
    """Input and output of a bundle as the model's config has them."""
    assert output.head is not None and output.task is not None
    return FeatureConfig(source.size, output.size, output.head, output.task, output.labels)


def read_steps(path: Path) -> Array:
    """Read one sequence `[T, F]` or `[1, T, F]` from an ``.npy``; the shape is not checked.

    Raises:
        EdgelinError: The file is missing or damaged.
    """
    return load_arrays(path, ".npy")[""]


def parse_steps(lines: Iterable[str], source: Features) -> Iterator[Array]:
    """Read steps `[1, F]` from lines of numbers between commas or spaces; empty ones are skipped.

    Raises:
        EdgelinError: A line has other than F finite numbers.
    """
    for number, line in enumerate(lines, start=1):
        line = line.removeprefix("\ufeff") if number == 1 else line  # Windows programs write one
        words = [w for part in line.split(",") for w in (part.split() or [""])]
        if words == [""]:
            continue
        try:
            if "" in words:
                raise EdgelinError(f"field {words.index('') + 1} is empty; give every number")
            if len(words) != source.size:
                raise EdgelinError(f"{len(words)} numbers, {source.size} are needed")
            yield source.check([[_number(word) for word in words]], 1)[0][0]
        except EdgelinError as error:
            raise EdgelinError(f"line {number} of standard input: {error}") from None


def _number(word: str) -> float:
    """A word as a number."""
    try:
        return float(word)
    except ValueError:
        raise EdgelinError(
            f"{word!r} is no number; send lines of numbers alone, without a header"
        ) from None
