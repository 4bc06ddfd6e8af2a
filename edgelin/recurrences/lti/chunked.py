"""Convolution form of the LTI recurrence, any device, differentiable: the training path.

    y = K * x + C A^{t+1} h ;  K_l = C A^l B  (S4 eq. 5), K * x by FFT

in blocks of at most ``BLOCK`` tokens with the state passed on. Taps of a block: with M near the
square root of its length, K_{iM+j} = (C A^{iM}) (A^j B), two short tables made by doubling with the
squares A^(2^k) and one product. The same tables serve the other two terms: C A^{t+1} h, and
h' = A^T h + sum_i A^{iM} sum_j A^j B x_{T-1-iM-j}, whose outer sum halves with each square.

The tables are made in float64, since the error of A^l grows with l; it costs little, because they
know nothing of the batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgelin.recurrences.chunks import compute_dtype, full_precision

BLOCK = 1024
# Taps [D, L], A^j B [D, N, M], C A^{iM} [D, I, N], and A^(2^k) [K, D, N, N]; M I >= L.
Tables = tuple[Tensor, Tensor, Tensor, Tensor]


@full_precision
def forward(x: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence block by block.

    Args:
        x: Inputs ``[B, T, D]``.
        a: Transition ``[D, N, N]``.
        b: Input weights ``[D, N]``.
        c: Output weights ``[D, N]``.
        state: ``[B, D, N]``.

    Returns:
        ``y`` ``[B, T, D]`` in the dtype of ``x`` and the final state in the dtype of ``state``.
    """
    dtype = compute_dtype(x, state)
    tables = _tables(min(x.shape[1], BLOCK), dtype, a, b, c)
    outputs, h = [], state
    for piece in x.split(BLOCK, dim=1):
        y, h = _block(*tables, piece, h)
        outputs.append(y)
    return torch.cat(outputs, dim=1).contiguous(), h.contiguous()


@full_precision
def backward(
    x: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, dy: Tensor, dstate: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, a, b, c and state, in their dtypes and shapes.

    Only the states between blocks are kept; each block is run again for its gradients.
    """
    make = partial(_tables, min(x.shape[1], BLOCK), compute_dtype(x, state))
    vjp: Any = torch.func.vjp  # since autograd.grad records nothing inside a custom op
    made: tuple[Tables, Any] = vjp(make, a, b, c)
    tables, pull_tables = made
    pieces, starts = x.split(BLOCK, dim=1), [state]
    for piece in pieces[:-1]:
        starts.append(_block(*tables, piece, starts[-1])[1])
    totals, dx = [torch.zeros_like(table) for table in tables], []
    given = zip(pieces, starts, dy.split(BLOCK, dim=1), strict=True)
    for piece, start, dpiece in reversed(list(given)):
        pull = vjp(_block, *tables, piece, start)[1]
        *grads, dinput, dstate = pull((dpiece, dstate))
        totals = [total + grad for total, grad in zip(totals, grads, strict=True)]
        dx.append(dinput)
    da, db, dc = pull_tables(tuple(totals))
    return torch.cat(dx[::-1], dim=1), da, db, dc, dstate.contiguous()


def _tables(size: int, dtype: torch.dtype, a: Tensor, b: Tensor, c: Tensor) -> Tables:
    """What blocks of up to ``size`` tokens need, in ``dtype``."""
    a, b, c = (v.double() for v in (a, b, c))
    levels = (size - 1).bit_length()  # M I = 2^levels
    squares = [a]
    for _ in range(levels):
        squares.append(squares[-1] @ squares[-1])
    inner = -(-levels // 2)
    writes, reads = b[..., None], c[:, None]
    for square in squares[:inner]:
        writes = torch.cat([writes, square @ writes], dim=2)
    for square in squares[inner:levels]:
        reads = torch.cat([reads, reads @ square], dim=1)
    taps = (reads @ writes).flatten(1)[:, :size]
    tables = taps, writes, reads, torch.stack(squares)
    return tuple(table.to(dtype) for table in tables)  # type: ignore[return-value]


def _block(
    taps: Tensor, writes: Tensor, reads: Tensor, squares: Tensor, x: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """y and the state after a block; x ``[B, T, D]`` with T at most the size of the tables."""
    batch, time, channels = x.shape
    inner = (writes.shape[2] - 1).bit_length()
    h, inputs = state.to(taps.dtype).permute(1, 2, 0), x.to(taps.dtype).permute(2, 0, 1)
    y = _convolve(inputs, taps[:, None, :time])  # [D, B, T]
    # C A^{iM} times A^j A h
    carried = (squares[0] @ h)[:, :, None]
    for square in squares[:inner]:
        carried = torch.cat([carried, (square @ carried.flatten(2)).view_as(carried)], dim=2)
    carried = (reads @ carried.flatten(2)).view(channels, -1, batch)[:, :time]
    y = y.permute(1, 2, 0) + carried.permute(2, 1, 0)
    # The latest first; zeros before the first token write nothing.
    padded = torch.nn.functional.pad(inputs.flip(2), (0, writes.shape[2] * reads.shape[1] - time))
    latest = padded.view(channels, -1, writes.shape[2]).mT
    written = (writes @ latest).view(*h.shape, -1)  # [D, N, B, I]
    for square in squares[inner : len(squares) - 1]:
        odd = written[..., 1::2]
        written = written[..., ::2] + (square @ odd.flatten(2)).view_as(odd)
    for level, square in enumerate(squares):
        if time >> level & 1:
            h = square @ h
    return y.to(x.dtype), (h + written[..., 0]).permute(2, 0, 1).to(state.dtype)


def _convolve(x: Tensor, taps: Tensor) -> Tensor:
    """Causal convolution along the last axis, of the length of both."""
    time = x.shape[-1]
    size = 1 << (2 * time - 2).bit_length()  # no wrap-around, and a length that FFTs like
    spectrum = torch.fft.rfft(x, size) * torch.fft.rfft(taps, size)
    y: Tensor = torch.fft.irfft(spectrum, size)[..., :time]
    return y
