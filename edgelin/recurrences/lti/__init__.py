"""Linear time-invariant recurrence with a dense transition: the discrete state-space model.

Equation, per channel d with N states:

    h_t = A h_{t-1} + B x_t
    y_t = C h_t

Glossary: x input, one number a channel; h state ``[D, N]``; A transition ``[N, N]``, B input and C
output weights ``[N]``, all constant and a channel each. :mod:`.discretise` makes A and B of a
continuous system. A skip connection from x to y is the caller's.

The parallel form is a convolution with the taps C A^l B, by torch.fft on any device: cuFFT is a
well kept library, so there is no kernel of our own for GPUs.

Sources: Gu et al. 2021, "Combining recurrent, convolutional, and continuous-time models with
linear state-space layers" (LSSL), arXiv:2110.13985, equations 3 to 5; Gu et al. 2022, "Efficiently
modeling long sequences with structured state spaces" (S4), arXiv:2111.00396, equations 3 to 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelin.recurrences import CHUNK
from edgelin.recurrences.exporting import is_exporting
from edgelin.recurrences.lengths import masked
from edgelin.recurrences.lti import chunked
from edgelin.recurrences.operator import Operator


def lti(
    x: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over a stretch of tokens, of any length from 1.

    Args:
        x: Inputs ``[B, T, D]``, float32 or bfloat16 (or float64).
        a: Discrete transition A ``[D, N, N]``. Float64 pays: its error grows with every token.
        b: Discrete input weights B ``[D, N]``.
        c: Output weights C ``[D, N]``.
        state: State before the first token ``[B, D, N]``, float32.
        lengths: Steps that each row really has ``[B]``, or None: all; see
            :mod:`edgelin.recurrences.lengths`.

    Returns:
        ``(y, state)``: outputs ``[B, T, D]`` in the dtype of ``x``, the state after the last token.
    """
    size = state.shape[-1]
    if a.shape != (*b.shape, size) or c.shape != b.shape or state.shape[1:] != b.shape:
        shapes = ", ".join(str(tuple(v.shape)) for v in (a, b, c, state))
        raise ValueError(f"a, b, c, state are {shapes}; need [D, N, N], [D, N], [D, N], [B, D, N]")
    if not is_exporting() and (x.dim() != 3 or x.shape[::2] != state.shape[:2]):
        raise ValueError(f"x is {tuple(x.shape)}, need [B, T, D], state is {tuple(state.shape)}")
    x = masked(x, lengths)  # a convolution by FFT rounds all outputs by all inputs
    y, after = _lti(x, a, b, c, state)
    return y, after if lengths is None else _ended(x, (a, b, c), state, lengths)


def _ended(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor], state: Tensor, lengths: Tensor
) -> Tensor:
    """The state at the end of every row, L: A^L h, and what its inputs write.

    No input stops a constant A; so the inputs move to the end of the call, behind zeros.
    """
    time = x.shape[1]
    at = torch.arange(time, device=x.device) - (time - lengths[:, None])
    moved = x.gather(1, at.clamp(min=0)[..., None].expand_as(x))
    moved = moved.masked_fill((at < 0)[..., None], 0.0)
    written = _lti(moved, *weights, torch.zeros_like(state))[1]
    h, power = state[..., None].to(weights[0].dtype), weights[0]
    for digit in range(CHUNK.bit_length() if is_exporting() else time.bit_length()):
        is_set = (lengths // 2**digit % 2 == 1)[:, None, None, None]
        h = torch.where(is_set, power @ h, h)
        power = power @ power
    decayed: Tensor = h[..., 0].to(state.dtype)
    return decayed + written


def _forward(x: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution form, on any device."""
    return chunked.forward(x, a, b, c, state)


def _backward(
    x: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, dy: Tensor, dstate: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the five inputs; recomputes all but the inputs."""
    return chunked.backward(x, a, b, c, state, dy, dstate)


_lti = Operator("lti", _forward, _backward, outputs=("x", "state"))
