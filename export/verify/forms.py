"""One form of a model as a function of steps and states, and its replay in calls of any size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgelin.errors import EdgelinError
from edgelin.export.verify.report import Difference
from edgelin.runtimes.buffers import Buffers

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle

Array = NDArray[Any]
State = dict[str, Array]
# One call: steps [B, T, ...] and the state before -> tensors [B, T, ...] and the state after them.
Form = Callable[[Array, State], tuple[dict[str, Array], State]]
# Tensor name -> position -> its rows [B, ...].
Record = dict[str, dict[int, Array]]


class OnnxForm:
    """A variant of a bundle as a form, on the runtime's own buffers.

    Args:
        bundle: The opened variant.
        batch: Rows of a call.
    """

    def __init__(self, bundle: Bundle, batch: int) -> None:
        self.label = f"{bundle.path} {bundle.variant}"
        self.output = bundle.manifest.output.name
        self.names = [spec.name for spec in bundle.manifest.states]
        self.buffers = Buffers(bundle.session, bundle.manifest, batch, in_place=bundle.in_place)

    def __call__(
        self, steps: Array, state: State, lengths: Array | None = None
    ) -> tuple[dict[str, Array], State]:
        """Run ``steps`` [B, T, ...] in one call, T <= chunk, each row as far as ``lengths`` [B].

        Raises:
            EdgelinError: A result is not finite.
        """
        self.buffers.load([state[name] for name in self.names])
        outputs = self.buffers.run(steps, all_outputs=True, lengths=lengths).copy()
        copies = (array.copy() for array in self.buffers.states)
        states: State = dict(zip(self.names, copies, strict=True))
        for name, values in [(self.output, outputs), *states.items()]:
            if not np.isfinite(values).all():
                raise EdgelinError(
                    f"{self.label}: {name} is not finite; "
                    "its weights are damaged, or the model was: export a sound checkpoint"
                )
        return {self.output: outputs}, states


def relative_error(x: Array, y: Array) -> float:
    """max|x - y| / max|y| in float64; infinite where x is not finite."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    error = float(np.abs(x - y).max() / max(np.abs(y).max(), np.finfo(np.float64).tiny))
    return error if np.isfinite(error) else float("inf")


def compare(record: Record, truth: Record, length: int) -> list[Difference]:
    """Errors of a record at every tensor and position that both hold."""
    return [
        Difference(name, length, {t: relative_error(x, truth[name][t]) for t, x in rows.items()})
        for name, rows in record.items()
        if name in truth
    ]


def replay(form: Form, steps: Array, state: State, *, size: int) -> Record:
    """Feed ``steps`` [B, T, ...] in calls of at most ``size`` and keep all that comes out."""
    time = steps.shape[1]
    return replay_calls(form, steps, state, [min(size, time - t) for t in range(0, time, size)])


def replay_calls(form: Form, steps: Array, state: State, calls: Sequence[int]) -> Record:
    """Feed ``steps`` [B, T, ...] in calls of these lengths, T together; keep all that comes out."""
    record: Record = defaultdict(dict)
    start = 0
    for length in calls:
        piece = steps[:, start : start + length]
        sequences, state = form(piece, state)
        for name, values in sequences.items():
            record[name].update({start + t: values[:, t] for t in range(length)})
        start += length
        for name, value in state.items():
            record[name][start - 1] = value
    return record


def first_row(record: Record) -> Record:
    """The same of batch row 0 alone."""
    return {name: {t: x[:1] for t, x in rows.items()} for name, rows in record.items()}
