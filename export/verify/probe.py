"""Does every state matter? A graph whose state is unbound or built anew answers fluently, too.

Three rows have read something. In the first row alone one thing is changed at a time, and two calls
are made, of one step and of several:

- another state: its answers must change ("read"), or, of a position, anything that comes out;
- other steps: every state after them must change ("written");
- both times the other rows must stay as they were: rows know nothing of each other.

A graph is deterministic, so that what does not depend on a value does not change at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgelin.export.verify.forms import Array, OnnxForm, State, relative_error
from edgelin.export.verify.report import Sensitivity
from edgelin.runtimes.signature import Input, Tokens

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle

_STEPS = 9  # of the longer call


def sensitivity(
    bundle: Bundle, steps: Array, state: State, other: State, tolerance: float
) -> Sensitivity:
    """Change one thing at a time.

    Args:
        bundle: The opened variant.
        steps: ``[B, T, ...]``, at least two rows.
        state: Before them.
        other: Another one.
        tolerance: Largest relative change of a row that nothing was done to.
    """
    form = OnnxForm(bundle, len(steps))
    integers = {spec.name for spec in bundle.manifest.states if spec.dtype == "int64"}
    read = {name: np.inf for name in state}
    written = {name: np.inf for name in state if name not in integers}
    bleed = 0.0
    for time in sorted({1, min(_STEPS, bundle.manifest.chunk)}):
        piece = steps[:, :time]
        found = _run(form, piece, state)
        changed = _run(form, _other_first_row(piece, bundle.manifest.input), state)
        bleed = max(bleed, *(_rest(x, found[name]) for name, x in changed.items()))
        for name in written:
            written[name] = min(written[name], _first(changed[name], found[name]))
        for name in state:
            given = state[name] + 1 if name in integers else other[name]
            mixed = np.concatenate([given[:1], state[name][1:]])
            changed = _run(form, piece, {**state, name: mixed})
            bleed = max(bleed, *(_rest(x, found[key]) for key, x in changed.items()))
            seen = found if name in integers else [form.output]
            effect = max(_first(changed[key], found[key]) for key in seen)
            read[name] = min(read[name], effect)
    return Sensitivity(bundle.variant, tolerance, read, written, bleed)


def _run(form: OnnxForm, steps: Array, state: State) -> dict[str, Array]:
    """Answers and states of a call, by name."""
    outputs, after = form(steps, state)
    return {**outputs, **after}


def _other_first_row(steps: Array, source: Input) -> Array:
    """The steps, each another one in the first row."""
    first = steps[:1]
    other = (first + 1) % source.vocab_size if isinstance(source, Tokens) else first[:, ::-1] + 1
    return np.concatenate([other.astype(steps.dtype), steps[1:]])


def _first(x: Array, y: Array) -> float:
    """How far the first rows are apart."""
    return relative_error(x[:1], y[:1])


def _rest(x: Array, y: Array) -> float:
    """How far the other rows are apart."""
    return relative_error(x[1:], y[1:])
