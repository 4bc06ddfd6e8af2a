"""Rows of different lengths in one call of a graph that takes ``lengths``, beside each row alone.

Four rows that have read something get 0, 1, 9 and all steps of a call. Their outputs and states
must be those of the rows alone; a row without steps must keep every bit of its states, and what
stands behind the end of a row must not change a bit of anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgelin.export.verify.forms import Array, OnnxForm, relative_error
from edgelin.export.verify.report import Comparison, Difference
from edgelin.runtimes.buffers import initial_state

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle

_BEFORE = 5  # steps that every row has read


def ragged_rows(bundle: Bundle, steps: Array, tolerance: float) -> Comparison | None:
    """What the rows of a ragged call differ from the rows alone; None: the graph takes no lengths.

    Args:
        bundle: The opened variant.
        steps: ``[N]`` or ``[N, F]``, such as the golden stream; rows read parts of it.
        tolerance: Largest relative error.
    """
    manifest = bundle.manifest
    if manifest.lengths is None:
        return None
    time = min(manifest.chunk, len(steps) - _BEFORE - 3)
    lengths = np.array([0, 1, min(9, time), time])
    rows = np.stack([steps[i : i + _BEFORE + time] for i in range(len(lengths))])
    form, alone = OnnxForm(bundle, len(lengths)), OnnxForm(bundle, 1)
    states = {spec.name: initial_state(spec, len(lengths)) for spec in manifest.states}
    state = form(rows[:, :_BEFORE], states)[1]
    rows = rows[:, _BEFORE:]
    outputs, after = form(rows, state, lengths)
    differences = []
    for i, length in enumerate(lengths):
        own = {name: array[i : i + 1] for name, array in state.items()}
        got = {name: array[i : i + 1] for name, array in after.items()}
        if length == 0:
            differences += [_unlike(name, time, 0, own[name], got[name]) for name in own]
            continue
        wanted, wanted_after = alone(rows[i : i + 1, :length], own)
        for name, array in wanted.items():
            found = outputs[name][i : i + 1, :length]
            differences.append(_beside(name, time, int(length), found, array))
        for name, array in wanted_after.items():
            differences.append(_beside(name, time, int(length), got[name], array))
    behind = np.arange(time) >= lengths[:, None]
    other = rows.copy()
    other[behind] = rows[-1, 0]
    _, changed = form(other, state, lengths)
    differences += [_unlike(name, time, time, after[name], changed[name]) for name in after]
    return Comparison(bundle.variant, "rows of a ragged call", "each alone", tolerance, differences)


def ragged_error(bundle: Bundle, steps: Array) -> float | None:
    """The largest error that :func:`ragged_rows` finds."""
    found = ragged_rows(bundle, steps, 0.0)
    return None if found is None else found.worst.error


def _beside(name: str, time: int, length: int, x: Array, y: Array) -> Difference:
    """The error of a tensor at one length."""
    return Difference(name, time, {length: relative_error(x, y)})


def _unlike(name: str, time: int, length: int, x: Array, y: Array) -> Difference:
    """An infinite error unless every bit is the same."""
    return Difference(name, time, {length: 0.0 if x.tobytes() == y.tobytes() else float("inf")})
