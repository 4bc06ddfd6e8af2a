"""What a model reads and answers: token ids and logits, or features and outputs.

The kinds differ in name, type and shape of a step and in what is refused before a call; all that
feeds, compares or measures a model asks these classes and treats both alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edgelin.errors import EdgelinError

Array = NDArray[Any]


@dataclass(frozen=True)
class Tokens:
    """Token ids, int64 `[batch, time]`.

    Args:
        vocab_size: Ids are 0 .. vocab_size - 1.
        name: Graph input.
    """

    vocab_size: int
    name: str = "input_ids"
    kind: ClassVar[str] = "tokens"
    unit: ClassVar[str] = "token"
    dtype: ClassVar[type[np.generic]] = np.int64
    step: ClassVar[tuple[int, ...]] = ()  # shape of one step

    def as_dict(self) -> dict[str, Any]:
        """The entry in the manifest."""
        return {
            "name": self.name,
            "kind": self.kind,
            "dtype": "int64",
            "shape": ["batch", "time"],
            "vocab_size": self.vocab_size,
        }

    def check(self, values: ArrayLike, batch: int) -> tuple[Array, bool]:
        """Ids as int64 `[B, T]`, and whether they came as a list for the one row.

        Raises:
            EdgelinError: They are of another shape or type, or out of range.
        """
        array = _array(values, "token ids are no array of integers")
        flat = array.ndim == 1 and batch == 1
        tokens = array[None] if flat else array
        if tokens.ndim != 2 or tokens.shape[0] != batch or tokens.shape[1] == 0:
            allowed = "[time] or [1, time]" if batch == 1 else f"[{batch}, time]"
            raise EdgelinError(
                f"token ids have shape {list(array.shape)}; {allowed} with time >= 1 is needed"
            )
        if not np.issubdtype(tokens.dtype, np.integer):
            raise EdgelinError(f"token ids are {tokens.dtype}; integers are needed")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self.vocab_size)][0]
            raise EdgelinError(
                f"token id {bad} is out of range; the model knows 0 .. {self.vocab_size - 1}"
            )
        return tokens.astype(np.int64, copy=False), flat

    def random(self, random: np.random.Generator, batch: int, time: int) -> Array:
        """Ids `[B, T]`, each as likely as any other."""
        return random.integers(0, self.vocab_size, (batch, time))


@dataclass(frozen=True)
class Features:
    """Measurements, float32 `[batch, time, size]`.

    Args:
        size: Numbers of a step.
        name: Graph input.
    """

    size: int
    name: str = "features"
    kind: ClassVar[str] = "features"
    unit: ClassVar[str] = "step"
    dtype: ClassVar[type[np.generic]] = np.float32

    @property
    def step(self) -> tuple[int, ...]:
        """Shape of one step."""
        return (self.size,)

    def as_dict(self) -> dict[str, Any]:
        """The entry in the manifest."""
        return {
            "name": self.name,
            "kind": self.kind,
            "dtype": "float32",
            "shape": ["batch", "time", self.size],
            "feature_size": self.size,
        }

    def check(self, values: ArrayLike, batch: int) -> tuple[Array, bool]:
        """Features as float32 `[B, T, F]`, and whether they came as `[T, F]` for the one row.

        Raises:
            EdgelinError: They are of another shape or type, or not finite: the states would keep a
                NaN for ever.
        """
        array = _array(values, "features are no array of numbers")
        flat = array.ndim == 2 and batch == 1
        rows = array[None] if flat else array
        right = rows.ndim == 3 and rows.shape[0] == batch and rows.shape[2] == self.size
        if not right or rows.shape[1] == 0:
            rest = f"time, {self.size}]"
            allowed = f"[{rest} or [1, {rest}" if batch == 1 else f"[{batch}, {rest}"
            raise EdgelinError(
                f"features have shape {list(array.shape)}; {allowed} with time >= 1 is needed"
            )
        if rows.dtype.kind not in "fiu":
            raise EdgelinError(f"features are {rows.dtype}; real numbers are needed")
        if rows.dtype != np.float32:
            with np.errstate(over="ignore"):  # infinity is refused below
                rows = rows.astype(np.float32)
        if not np.isfinite(rows).all():
            row, time, index = np.argwhere(~np.isfinite(rows))[0]
            where = f"step {time}" if batch == 1 else f"step {time} of row {row}"
            raise EdgelinError(
                f"feature {index} at {where} is {rows[row, time, index]}; finite float32 numbers "
                "are needed: leave the step out, or put a value in its place"
            )
        return rows, flat

    def random(self, random: np.random.Generator, batch: int, time: int) -> Array:
        """Normal numbers `[B, T, F]`."""
        return random.standard_normal((batch, time, self.size), np.float32)


Input = Tokens | Features


@dataclass(frozen=True)
class Output:
    """What a model answers, float32 `[batch, kept, size]`.

    Args:
        size: Logits of the next token, or what the head for features gives.
        name: Graph output.
        head: None for tokens; ``"step"``, or ``"sequence"``: an answer for all read so far.
        task: None for tokens; ``"classification"`` (logits of classes) or ``"regression"``.
        labels: Names of the classes, or none.
    """

    size: int
    name: str = "logits"
    head: str | None = None
    task: str | None = None
    labels: tuple[str, ...] = ()

    @property
    def is_distribution(self) -> bool:
        """Whether softmax makes probabilities of it."""
        return self.task != "regression"

    def as_dict(self) -> dict[str, Any]:
        """The entry in the manifest."""
        entry = {"name": self.name, "dtype": "float32"}
        if self.task is None:
            return {**entry, "shape": ["batch", "kept", "vocab"]}
        return {
            **entry,
            "shape": ["batch", "kept", self.size],
            "size": self.size,
            "head": self.head,
            "task": self.task,
            "labels": list(self.labels),
        }

    def label(self, index: int) -> str:
        """Name of a class, its number where it has none."""
        return self.labels[index] if self.labels else str(index)


def read_signature(content: Mapping[str, Any]) -> tuple[Input, Output]:
    """Input and output of a manifest whose types are checked."""
    source, answer = content["input"], content["output"]
    if source["kind"] == Tokens.kind:
        size = source["vocab_size"]
        return Tokens(size, source["name"]), Output(size, answer["name"])
    labels = tuple(answer["labels"])
    return Features(source["feature_size"], source["name"]), Output(
        answer["size"], answer["name"], answer["head"], answer["task"], labels
    )


def _array(values: ArrayLike, problem: str) -> Array:
    """Values as an array of any shape and type."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise EdgelinError(
            f"{problem} ({' '.join(str(error).split())}); give [time] or [batch, time]"
        ) from None
