"""What :mod:`edgelin.export.verify` feeds to every form: random steps, after a random state."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgelin.export.verify.forms import Array, State
from edgelin.export.verify.golden import golden_magnitudes, golden_steps
from edgelin.runtimes.buffers import initial_state
from edgelin.runtimes.manifest import Manifest
from edgelin.runtimes.signature import Features

BATCH = 3
_PAST = 70  # tokens in a state that grows, more than a call carries
_DEVIATIONS = 3  # of normal numbers, the largest of a few hundred


def random_steps(manifest: Manifest, bundle: Path, time: int, random: np.random.Generator) -> Array:
    """Steps of all rows; features are spread as the golden stream's, which look like data."""
    steps = manifest.input.random(random, BATCH, time)
    if isinstance(manifest.input, Features):
        like = golden_steps(manifest, bundle)[0]
        steps = (like.mean(0) + like.std(0) * steps).astype(np.float32)
    return steps


def random_state(manifest: Manifest, bundle: Path, random: np.random.Generator) -> State:
    """A state such as a long text could leave: nothing zero, rows at different positions.

    It is as large as the golden stream leaves it: what a model erases of a state that is much
    larger than all it writes leaves rounding beside which its own state is small.
    """
    state, largest = {}, golden_magnitudes(manifest, bundle)
    for spec in manifest.states:
        array, size = initial_state(spec, BATCH, past=_PAST), largest[spec.name] or 1.0
        if spec.dtype == "int64":
            # Angles and slots must hold deep into a stream too.
            array[...] = random.integers(1_000_000, 2_000_000, array.shape)
            if any(other.kind == "pool" for other in manifest.states):
                array[0] = 3  # where a step still moves the mean of all steps
        elif spec.kind.startswith("normalizer"):
            # A sum of positive features; near zero it divides badly.
            array[...] = random.uniform(size / 2, size, array.shape)
        else:
            array[...] = random.normal(0, size / _DEVIATIONS, array.shape)
        state[spec.name] = array
    return state
