"""Round a matrix so that its products with what it really reads change least: GPTQ.

Rounding to the nearest code makes ||W' - W|| small; what counts is the error of the products,

    ||(W' - W) X||^2 = tr((W' - W) H (W' - W)^T),  H = X X^T

with X what the matrix was multiplied with on a text. The columns are rounded one after another,
those with the largest H_jj first, and what each one's rounding adds to the error is taken back by
those that are not rounded yet:

    e_j = (w_j - w'_j) / U_jj,   w_i -= e_j U_ji  for i > j,   U^T U = (H + lambda I)^-1

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2022), arXiv:2210.17323, section 3.3 and algorithm 1. Lambda is 10 % of the mean of
H's diagonal: with the paper's 1 %, other texts gain less than the one that is read (the demo with
4 bits, 4,096 tokens: 0.0240 nat, with 10 % 0.0225).

Scales and zero points are those of :mod:`edgelin.export.quantise.rounding`, and no weight is moved
further than one code from its nearest: so whoever has the checkpoint, but neither the text nor H,
can still tell that a bundle holds its weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgelin.export.quantise.rounding import Array, Rounded

MOST_CODES = 1  # from the nearest
_DAMPING = 0.1
_ROWS = 1024  # at a time
_COLUMNS = 128  # rounded before the columns behind them are corrected


def gptq(rows: Array, hessian: Tensor, nearest: Rounded) -> Rounded:
    """Choose better codes.

    Args:
        rows: The matrix, float32 `[N, K]`.
        hessian: H, float64 `[K, K]`, up to a factor.
        nearest: The matrix rounded to the nearest codes; its array of codes is overwritten.
    """
    order, factor = _factor(hessian)
    for start in range(0, len(rows), _ROWS):
        part = slice(start, start + _ROWS)
        _sweep(rows[part], nearest.rows(part), order, factor)
    return nearest


def _factor(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """The columns in the order of rounding, and U in that order, float32."""
    diagonal = hessian.diagonal()
    order = diagonal.argsort(descending=True, stable=True)
    damped = hessian[order][:, order]
    # Where nothing was read, all are alike, and the nearest codes are the best.
    damped.diagonal().add_(max(_DAMPING * float(diagonal.mean()), 1e-12))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return order, factor.float()


def _sweep(rows: Array, rounded: Rounded, order: Tensor, factor: Tensor) -> None:
    """Round some rows; ``rounded.codes``, a view, takes the result."""
    width, levels = rows.shape[1], (1 << rounded.bits) - 1
    w = torch.from_numpy(rows).T[order].contiguous()  # [K, N]: a column is a row here
    at = order.numpy() // rounded.block_size
    scale = torch.from_numpy(rounded.scales.T[at])
    middle = np.float32(1 << (rounded.bits - 1))
    zeros = rounded.zero_points
    zero = torch.from_numpy(
        np.full(at.shape + rows.shape[:1], middle) if zeros is None else zeros.T[at]
    ).float()
    best = (w / scale + zero).round_().clamp_(0, levels)
    low, high = (best - MOST_CODES).clamp_(min=0), (best + MOST_CODES).clamp_(max=levels)
    for start in range(0, width, _COLUMNS):
        end = min(start + _COLUMNS, width)
        errors = torch.empty(end - start, len(rows))
        for j in range(start, end):
            code = (w[j] / scale[j] + zero[j]).round_().clamp_(low[j], high[j])
            error = (w[j] - scale[j] * (code - zero[j])) / factor[j, j]
            w[j + 1 : end] -= factor[j, j + 1 : end, None] * error
            best[j], errors[j - start] = code, error
        w[end:] -= factor[start:end, end:].T @ errors
    found = np.empty(rows.shape, np.uint8)
    found[:, order.numpy()] = best.T.to(torch.uint8).numpy()
    cells: npt.NDArray[np.uint8] = rounded.codes.reshape(len(rows), -1)
    cells[:, :width] = found
