"""What it costs to round one matrix of a model alone.

The loss of a matrix in a format is the mean KL(float || rounded) of the next token, in nat, when
the model reads a text as one stream with only that matrix rounded. Layers before it are read once
for all of their successors. The losses of several matrices add up, as long as they are small:
their errors are nearly independent, and KL is a square to leading order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from edgelin.export.quantise.nodes import Matrices, round_parameter
from edgelin.export.quantise.recipe import Format
from edgelin.export.quantise.rollout import Rollout
from edgelin.export.quantise.rounding import Rounded
from edgelin.mapped import Empty, release

if TYPE_CHECKING:
    from edgelin.model import SequenceModel

TOKENS = 1024
_EVERY = 2  # positions whose logits are compared


@dataclass(frozen=True)
class Option:
    """One way to store matrices that share a format.

    Args:
        format: None: float.
        bytes: What they take in a file.
        loss: In nat a token.
    """

    format: Format | None
    bytes: int
    loss: float


def options(
    model: SequenceModel,
    candidates: list[Matrices],
    formats: Callable[[Matrices], list[Format]],
    ids: NDArray[Any],
    *,
    progress: Callable[[int], object] = lambda weights: None,
    empty: Empty = np.empty,
) -> dict[str, list[Option]]:
    """Measure every format of every candidate, by the first parameter's name; float is the last.

    Args:
        model: The model; as it was afterwards.
        candidates: Matrices to measure.
        formats: The formats to try.
        ids: The text; its first ``TOKENS`` tokens are read.
        progress: Called with the number of weights that are done.
        empty: Makes large arrays.
    """
    ids = ids[:TOKENS]
    reading = _started(model, ids, empty)
    truth = _answers(_rest(reading.fork()))
    place = _places(model)
    found: dict[str, list[Option]] = {}
    for layer in (None, *range(len(model.blocks)), len(model.blocks)):
        for own in candidates:
            if _layer(own, place, len(model.blocks)) != layer:
                continue
            found[own.name] = []
            for chosen in formats(own):
                rounded = _rounded(model, own, chosen, empty)
                start = _started(model, ids, empty, rounded) if layer is None else reading.fork()
                loss = _divergence(truth, _answers(_rest(start, rounded), rounded))
                found[own.name].append(Option(chosen, size(own, chosen), loss))
                release()
            found[own.name].append(Option(None, size(own, None), 0.0))
            progress(sum(n * k for n, k in own.shapes))
        if layer is not None and layer < len(model.blocks):
            reading.read()
    return found


def size(own: Matrices, chosen: Format | None) -> int:
    """Bytes of matrices in a file."""
    total = 0.0
    for rows, width in own.shapes:
        if chosen is None:
            total += 4 * rows * width
            continue
        blocks = -(-width // chosen.block_size)
        zero_point = 0.5 if chosen.bits == 4 else 0
        total += rows * blocks * (chosen.block_size * chosen.bits / 8 + 4 + zero_point)
    return int(total)


def _started(
    model: SequenceModel, ids: NDArray[Any], empty: Empty, rounded: dict[str, Rounded] | None = None
) -> Rollout:
    """A reading before the first layer."""
    reading = Rollout(model, ids, empty)
    reading.start(rounded)
    return reading


def _rest(reading: Rollout, rounded: dict[str, Rounded] | None = None) -> Rollout:
    """Go through the layers that are left."""
    while reading.layer < len(reading.model.blocks):
        reading.read(rounded)
    return reading


def _answers(reading: Rollout, rounded: dict[str, Rounded] | None = None) -> Tensor:
    """Log-probabilities at some positions, `[P, vocabulary]`."""
    at = slice(_EVERY - 1, None, _EVERY)
    return reading.logits(at, rounded).log_softmax(-1)


def _divergence(truth: Tensor, found: Tensor) -> float:
    """Mean KL in nat, never below 0."""
    pairs = zip(truth.split(64), found.split(64), strict=True)
    total = sum(float((p.double().exp() * (p.double() - q.double())).sum()) for p, q in pairs)
    return max(total / len(truth), 0.0)


def _places(model: SequenceModel) -> dict[str, int]:
    """The first layer that has a parameter."""
    first: dict[int, int] = {}
    for layer, block in enumerate(model.blocks):
        for parameter in block.parameters():
            first.setdefault(id(parameter), layer)
    return {n: first[id(p)] for n, p in model.named_parameters() if id(p) in first}


def _layer(own: Matrices, place: dict[str, int], layers: int) -> int | None:
    """The layer that matrices belong to; None: what is read before the first one."""
    if own.name.startswith("embedding"):
        return None
    return place.get(own.name, layers)


def _rounded(
    model: SequenceModel, own: Matrices, chosen: Format, empty: Empty
) -> dict[str, Rounded]:
    """The matrices in a format."""
    return {name: round_parameter(model, name, chosen, empty) for name in own.names}
