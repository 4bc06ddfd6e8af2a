"""Round the matrices of a model with what they read on a text: GPTQ over recurrent roll-outs.

Layer by layer, so that one is in memory at a time. A layer is read twice: with its own weights, for
the Hessians of its matrices, and with the rounded ones, because the next layer has to live with
what those make of the text. Embeddings, of which rows are looked up, and experts, of which many
have read little, are rounded to the nearest codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from edgelin.export.quantise.gptq import gptq
from edgelin.export.quantise.nodes import parameter_rows, round_to_nearest
from edgelin.export.quantise.recipe import Format
from edgelin.export.quantise.rollout import CALL, Rollout
from edgelin.export.quantise.rounding import Rounded
from edgelin.mapped import Empty, release

if TYPE_CHECKING:
    from edgelin.model import SequenceModel

_TOP = ("embedding.weight", "head.weight")


def calibrate(
    model: SequenceModel,
    formats: Mapping[str, Format],
    ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    *,
    progress: Callable[[int], object] = lambda weights: None,
    empty: Empty = np.empty,
) -> dict[str, Rounded]:
    """Round parameters in these formats.

    Args:
        model: The model; as it was afterwards.
        formats: By parameter.
        ids: The text, int64 `[T]`.
        progress: Called with the number of weights of each matrix that is done.
        empty: Makes large arrays.
    """
    done: dict[str, Rounded] = {}

    def round_one(name: str, hessian: Tensor | None) -> None:
        rows = parameter_rows(model, name)
        nearest = round_to_nearest(rows, formats[name], empty)
        done[name] = nearest if hessian is None else gptq(rows, hessian, nearest)
        progress(rows.size)
        release()

    reading = Rollout(model, ids, empty)
    if _TOP[0] in formats:
        round_one(_TOP[0], None)
    reading.start(done)
    for layer in range(len(model.blocks)):
        left = {n for n in formats if n.startswith(f"blocks.{layer}.") and n not in done}
        hessians = reading.watch() if left else {}
        for name in sorted(left):
            round_one(name, hessians.pop(name, None))
        reading.read(done)
    if _TOP[1] in formats:
        round_one(_TOP[1], _head_hessian(reading))
    return done


def _head_hessian(reading: Rollout) -> Tensor:
    """H of an output head of its own."""
    size = reading.model.config.hidden_size
    hessian = torch.zeros(size, size, dtype=torch.float64)
    for start in range(0, len(reading.ids), CALL):
        x = reading.hidden(slice(start, start + CALL)).double()
        hessian.addmm_(x.T, x)
    return hessian
