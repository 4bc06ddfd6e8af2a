"""Chunk-parallel torch form of the diagonal recurrence, any device, differentiable by autograd.

Constant Λ, b and c (S4D's convolution view, eq. 3): within a chunk of L tokens y is x times a
Toeplitz matrix of the taps Re(sum_n c Λ^l b), made of one table of powers Λ^0 .. Λ^L; states pass
from chunk to chunk. Otherwise a log-step scan (Hillis and Steele 1986) over shifts 1, 2, ..., 32:
after shift s, u_t holds the last 2s tokens' share of h_t and a_t the product of their transitions.
Products of transitions only, so no exponent is ever positive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgelin.recurrences import CHUNK, MIN_LOG_DECAY
from edgelin.recurrences.chunks import compute_dtype, full_precision

Step = Callable[..., tuple[Tensor, Tensor]]


@full_precision
def forward(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, theta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence chunk by chunk.

    Args:
        x: Inputs ``[B, T, D]``.
        b: Input weights ``[D, N]`` or ``[B, T, D or 1, N]``; complex: one more axis of 2.
        c: Output weights, likewise.
        g: Log magnitude of Λ ``[D, N]`` or ``[B, T, D or 1, N]``.
        theta: Angle of Λ in the shape of ``g``, or None.
        state: ``[B, D, N]``, complex ``[B, D, N, 2]``.

    Returns:
        ``y`` ``[B, T, D]`` in the dtype of ``x`` and the final state in the dtype of ``state``.
    """
    step: Step = _time_invariant if _is_constant(b, c, g, theta) else _scan
    outputs, h = [], state
    for span in _spans(x.shape[1], step is _time_invariant):
        y, h = step(*_cut(span, x, b, c, g, theta), h)
        outputs.append(y)
    return torch.cat(outputs, dim=1).contiguous(), h.contiguous()


@full_precision
def backward(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    theta: Tensor | None,
    state: Tensor,
    dy: Tensor,
    dstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, b, c, g, theta (empty for None) and state, in their dtypes and shapes.

    Only the states between spans are kept; each span is run again for its gradients, so that
    memory is that of one chunk however long the sequence is.
    """
    step: Step = _time_invariant if _is_constant(b, c, g, theta) else _scan
    spans = _spans(x.shape[1], step is _time_invariant)
    starts = [state]
    for span in spans[:-1]:
        starts.append(step(*_cut(span, x, b, c, g, theta), starts[-1])[1])
    parts = []
    for span, start in zip(reversed(spans), reversed(starts), strict=True):
        leaves = [v for v in _cut(span, x, b, c, g, theta) if v is not None]
        # vjp, since autograd.grad records nothing inside a custom op
        pull: Any = torch.func.vjp(partial(_pair, step), start, *leaves)[1]
        dstate, *grads = pull((dy[:, span], dstate))
        parts.append(grads)
    dx, *rest = (
        torch.cat(grads, dim=1) if i == 0 or grads[0].dim() > 3 else torch.stack(grads).sum(0)
        for i, grads in enumerate(zip(*reversed(parts), strict=True))
    )
    db, dc, dg = rest[:3]
    return dx, db, dc, dg, rest[3] if theta is not None else g.new_empty(0), dstate.contiguous()


def _pair(step: Step, h: Tensor, *leaves: Tensor) -> tuple[Tensor, Tensor]:
    """``step`` with the state first and theta left out where it is None."""
    x, b, c, g, *theta = leaves
    return step(x, b, c, g, theta[0] if theta else None, h)


def _is_constant(b: Tensor, c: Tensor, g: Tensor, theta: Tensor | None) -> bool:
    """Whether no weight depends on the token."""
    return g.dim() == 2 and b.dim() == c.dim() == (2 if theta is None else 3)


def _spans(time: int, constant: bool) -> list[slice]:
    """Stretches of tokens that one call of the chunk form takes."""
    if not constant:
        return [slice(t, min(t + CHUNK, time)) for t in range(0, time, CHUNK)]
    full = time - time % CHUNK  # the whole chunks are parallel, the rest has its own length
    return [slice(a, z) for a, z in ((0, full), (full, time)) if a < z]


def _cut(span: slice, x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
    """The tokens of a span; constant weights stay whole."""
    return [x[:, span], *(v[:, span] if v is not None and v.dim() > 3 else v for v in weights)]


def _time_invariant(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, theta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Constant weights; T is at most CHUNK or a multiple of it. Channels first: one bmm each."""
    dtype = compute_dtype(x, state)
    batch, time, channels = x.shape
    size = min(time, CHUNK)
    b, c, h = _complex(dtype, theta, b[:, None], c[:, None], state)
    powers = _powers(size, g, theta, h.dtype)
    columns = x.to(dtype).reshape(batch * time // size, size, channels).permute(2, 1, 0)
    columns = columns.contiguous()  # [D, L, B M]; bmm of other strides falls back to a loop
    within = _toeplitz(_real((c * powers[:, :-1] * b).sum(-1))) @ columns
    ends = _parts(b * powers[:, :-1].flip(1), 1).mT @ columns
    before, h = _between(h.permute(1, 2, 0), ends.unflatten(2, (batch, -1)), powers[:, -1])
    read = c * powers[:, 1:]
    carried = _parts(read, -1) @ before.flatten(2)
    y: Tensor = _ContiguousGradient.apply(within + carried)  # type: ignore[no-untyped-call]
    y = y.permute(2, 1, 0).reshape(batch, time, channels)
    return y.to(x.dtype), _pairs(h.permute(2, 0, 1)).to(state.dtype)


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous: the permuted one would send bmm into its loop."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.contiguous()


def _between(h: Tensor, ends: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """States before every chunk, parts ``[D, N or 2 N, B, M]``, and the last ``[D, N, B]``."""
    before = []
    for end in ends.unbind(-1):
        before.append(torch.cat([h.real, h.imag], dim=1) if h.is_complex() else h)
        if h.is_complex():
            end = torch.complex(*end.chunk(2, dim=1))
        h = step[..., None] * h + end
    return torch.stack(before, dim=-1), h


def _toeplitz(taps: Tensor) -> Tensor:
    """``[D, L, L]`` with taps ``[D, L]`` of lag i - j at row i, column j <= i."""
    size = taps.shape[1]
    line = torch.nn.functional.pad(taps.flip(1), (0, size - 1))
    return line.unfold(1, size, 1).flip(1)


def _parts(weights: Tensor, sign: int) -> Tensor:
    """Real parts, then imaginary parts times ``sign``, on the last axis."""
    if not weights.is_complex():
        return weights
    return torch.cat([weights.real, sign * weights.imag], dim=-1)


def _scan(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, theta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Selective weights; T is at most CHUNK."""
    dtype = compute_dtype(x, state)
    time = x.shape[1]
    b, c, h = _complex(dtype, theta, b, c, state)
    a = _transition(g.to(dtype), None if theta is None else theta.to(dtype))
    a = a.expand(1, time, *a.shape) if a.dim() == 2 else a
    u = b * x.to(dtype)[..., None]
    u = torch.cat([u[:, :1] + a[:, :1] * h[:, None], u[:, 1:]], dim=1)
    shift = 1
    while shift < time:
        u = torch.cat([u[:, :shift], u[:, shift:] + a[:, shift:] * u[:, :-shift]], dim=1)
        a = torch.cat([a[:, :shift], a[:, shift:] * a[:, :-shift]], dim=1)
        shift *= 2
    y = _real((c * u).sum(-1))
    return y.to(x.dtype), _pairs(u[:, -1]).to(state.dtype)


def _transition(g: Tensor, theta: Tensor | None) -> Tensor:
    """Λ, complex where there is an angle."""
    magnitude = g.clamp(min=MIN_LOG_DECAY).exp()
    if theta is None:
        return magnitude
    return torch.complex(magnitude * theta.cos(), magnitude * theta.sin())


def _powers(size: int, g: Tensor, theta: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Λ^0 .. Λ^size ``[D, size + 1, N]``: in float64, since l theta reaches hundreds of turns."""
    exponents = torch.arange(size + 1, dtype=torch.float64, device=g.device)[:, None]
    magnitude = (exponents * g.double()[:, None].clamp(min=MIN_LOG_DECAY)).exp()
    if theta is None:
        return magnitude.to(dtype)
    angle = exponents * theta.double()[:, None]
    return torch.complex(magnitude * angle.cos(), magnitude * angle.sin()).to(dtype)


def _complex(dtype: torch.dtype, theta: Tensor | None, *pairs: Tensor) -> list[Tensor]:
    """The tensors in ``dtype``; as complex numbers where there is an angle."""
    given = [v.to(dtype) for v in pairs]
    return given if theta is None else [torch.view_as_complex(v.contiguous()) for v in given]


def _pairs(h: Tensor) -> Tensor:
    """Complex numbers as (re, im) on a last axis; real ones as they are."""
    return torch.view_as_real(h) if h.is_complex() else h


def _real(v: Tensor) -> Tensor:
    """Real part."""
    return v.real if v.is_complex() else v
