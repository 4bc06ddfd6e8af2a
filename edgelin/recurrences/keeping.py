"""What an operator keeps from its forward pass for the backward pass.

The operators ``..._keeping`` return, beside their outputs, what their kernels go on from backwards,
since computing that again costs up to a third of a training step's time. Nobody else reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep the inputs, whose last is the scale, and the third output where there is one."""
    *tensors, ctx.scale = inputs
    kept = output[2] if len(output) > 2 else []
    ctx.save_for_backward(*tensors, *kept)
    ctx.set_materialize_grads(False)  # what is kept has no gradient, and zeros would be large


def or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A gradient, or zeros where an output is not used."""
    return torch.zeros_like(like) if gradient is None else gradient
