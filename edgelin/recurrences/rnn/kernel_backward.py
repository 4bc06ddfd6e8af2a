"""Gradients of the elementwise non-linear recurrence on a GPU.

The forward kernel writes all states again, in float32. With d_t the gradient before f, backwards in
time from the final state's gradient e_T:

    d_t = (dz_t + e_t) f'(z_t) ;  e_{t-1} = a d_t ;  du_t = d_t ;  da = sum_t d_t z_{t-1}

f' is a function of z: 1 - z^2 (tanh), z > 0 (relu), z (1 - z) (sigmoid).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences.launches import Launch, planned
from edgelin.recurrences.rnn.kernel import launch_of, pick, run


@triton.jit
def _slope(z, F: tl.constexpr):
    """f' where f is z."""
    if F == 1:
        slope = 1.0 - z * z
    elif F == 2:
        slope = tl.where(z > 0, 1.0, 0.0)
    elif F == 3:
        slope = z * (1.0 - z)
    else:
        slope = tl.zeros_like(z) + 1.0
    return slope


@triton.jit
def _backward(
    weight, initial, z, dz, dstate, du, dweight, dinitial, T, D,
    F: tl.constexpr, BD: tl.constexpr, BU: tl.constexpr,
):  # fmt: skip
    """du of a block of channels of one row, its part of da, and the initial state's gradient."""
    i_b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    r = tl.arange(0, BU)[:, None]
    a = tl.load(weight + d, mask=d < D, other=0.0)
    first = tl.load(initial + i_b * D + d, mask=d < D, other=0.0)
    e = tl.load(dstate + i_b * D + d, mask=d < D, other=0.0)
    da = tl.zeros([BD], dtype=tl.float32)
    for i in range(0, tl.cdiv(T, BU)):
        t = T - 1 - i * BU - r
        live = (t >= 0) & (d < D)[None, :]
        at = (i_b * T + t) * D + d[None, :]
        grad = tl.load(dz + at, mask=live, other=0.0).to(tl.float32)
        slope = tl.where(live, _slope(tl.load(z + at, mask=live, other=0.0), F), 0.0)
        before = tl.load(z + at - D, mask=live & (t > 0), other=0.0)
        before = tl.where(t == 0, first[None, :], before)
        out = tl.zeros([BU, BD], dtype=tl.float32)
        for row in tl.static_range(BU):
            new = (pick(grad, r == row) + e) * pick(slope, r == row)
            out = tl.where(r == row, new[None, :], out)
            e = tl.where(i * BU + row < T, a * new, e)
        da += tl.sum(out * before, axis=0)
        tl.store(du + at, out.to(du.dtype.element_ty), mask=live)
    tl.store(dinitial + i_b * D + d, e, mask=d < D)
    tl.store(dweight + i_b * D + d, da, mask=d < D)


def backward(
    u: Tensor, weight: Tensor, state: Tensor, activation: str, dz: Tensor, dstate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of u, weight and state.

    Args:
        u: As all inputs of ``kernel.forward``.
        weight: See u.
        state: See u.
        activation: See u.
        dz: Gradient of the outputs ``[B, T, D]``.
        dstate: Gradient of the final state ``[B, D]``, float32.

    Returns:
        du in the dtype of ``u``, da ``[D]`` and the gradient of the initial state.
    """
    z, _ = run(u, weight, state, activation, torch.float32)
    du = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    initial = state.float().contiguous()
    dweight, dinitial = torch.empty_like(initial), torch.empty_like(initial)
    _launch(tuple(u.shape), activation)(
        weight.float().contiguous(), initial, z, dz.contiguous(), dstate.float().contiguous(),
        du, dweight, dinitial,
    )  # fmt: skip
    return du, dweight.sum(0).to(weight.dtype), dinitial.to(state.dtype)


@planned
def _launch(shape: tuple[int, ...], activation: str) -> Launch:
    return launch_of(_backward, shape, activation)
