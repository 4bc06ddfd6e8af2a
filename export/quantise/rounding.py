"""Round a matrix to 4 or 8 bits in blocks along its input axis, in onnxruntime's packed layout.

    w = scale * (q - zero_point),  0 <= q < 2^bits,  one scale and zero point a block

Symmetric blocks have zero point 2^(bits-1); asymmetric ones store theirs. The scale is not simply
the largest weight over the largest code: several smaller ones are tried, each is refined to the
least-squares scale of its codes, and the one with the smallest squared error is kept.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgelin.mapped import Empty
from edgelin.runtimes.session import default_threads

Array = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

_SHRINKS = {4: np.linspace(1.0, 0.68, 9), 8: np.linspace(1.0, 0.94, 4)}
_AT_ONCE = 1 << 18  # weights


@dataclass(frozen=True)
class Rounded:
    """A matrix in blocks.

    Args:
        codes: uint8 `[N, blocks, block_size]`, one code a cell.
        scales: float32 `[N, blocks]`.
        zero_points: uint8 `[N, blocks]`, or None for 2^(bits-1) everywhere.
        bits: 4 or 8.
    """

    codes: Codes
    scales: Array
    zero_points: Codes | None
    bits: int

    @property
    def block_size(self) -> int:
        """Weights that share a scale."""
        return int(self.codes.shape[-1])

    def rows(self, index: slice | npt.NDArray[np.integer[Any]]) -> Rounded:
        """Some of the rows."""
        zeros = None if self.zero_points is None else self.zero_points[index]
        return Rounded(self.codes[index], self.scales[index], zeros, self.bits)

    def packed(self) -> Codes:
        """uint8 `[N, blocks, block_size * bits / 8]`; for 4 bits the even cell is the low half."""
        return self.codes if self.bits == 8 else _pack(self.codes)

    def packed_rows(self, width: int) -> Codes:
        """uint8 `[N, width * bits / 8]`, rows without the padding of the last block; width even."""
        rows = self.codes.reshape(len(self.codes), -1)[:, :width]
        return rows if self.bits == 8 else _pack(rows)

    def packed_zero_points(self) -> Codes | None:
        """uint8 `[N, ceil(blocks * bits / 8)]`, or None."""
        if self.zero_points is None or self.bits == 8:
            return self.zero_points
        odd = self.zero_points.shape[1] % 2
        return _pack(np.pad(self.zero_points, ((0, 0), (0, odd)), constant_values=8))

    def values(self, width: int) -> Array:
        """The matrix that a runtime sees, float32 `[N, width]`."""
        zero = 1 << (self.bits - 1) if self.zero_points is None else self.zero_points[:, :, None]
        cells = self.codes.astype(np.float32)
        cells -= zero
        cells *= self.scales[:, :, None]
        return np.ascontiguousarray(cells.reshape(len(cells), -1)[:, :width])


def round_matrix(
    rows: Array,
    bits: int,
    block_size: int,
    *,
    symmetric: bool = True,
    empty: Empty = np.empty,
) -> Rounded:
    """Round every row in blocks.

    Args:
        rows: float32 `[N, K]`: one row an output.
        bits: 4 or 8.
        block_size: Weights that share a scale.
        symmetric: Whether the zero point is fixed in the middle.
        empty: Makes the arrays of the result.
    """
    shape = (len(rows), -(-rows.shape[1] // block_size))
    codes, scales = empty((*shape, block_size), np.uint8), empty(shape, np.float32)
    zeros = empty(shape, np.uint8)

    def fill(part: slice) -> None:
        found = _round(_blocks(rows[part], block_size), bits, symmetric)
        codes[part], scales[part], zeros[part] = found

    with ThreadPoolExecutor(default_threads()) as pool:  # numpy computes without Python's lock
        list(pool.map(fill, row_slices(rows)))
    return Rounded(codes, scales, None if symmetric else zeros, bits)


def row_slices(rows: Array) -> list[slice]:
    """Rows that are worked on at a time: as many as a core's cache holds with their candidates."""
    count = max(1, _AT_ONCE // max(1, rows.shape[1]))
    return [slice(i, i + count) for i in range(0, len(rows), count)]


def relative_error(rounded: Rounded, rows: Array) -> float:
    """||W' - W|| / ||W||."""
    wrong = size = 0.0
    for part in row_slices(rows):
        difference = rounded.rows(part).values(rows.shape[1])
        difference -= rows[part]
        wrong += float(np.linalg.norm(difference)) ** 2
        size += float(np.linalg.norm(rows[part])) ** 2
    return math.sqrt(wrong) / max(math.sqrt(size), 1e-30)


def _blocks(rows: Array, block_size: int) -> Array:
    """`[N, K]` to `[N, blocks, block_size]`, padded with zeros."""
    pad = -rows.shape[1] % block_size
    padded = np.pad(rows, ((0, 0), (0, pad))) if pad else rows
    return padded.reshape(len(rows), -1, block_size)


def _round(blocks: Array, bits: int, symmetric: bool) -> tuple[Codes, Array, Codes]:
    """Codes, scales and zero points with the least squared error among the candidates."""
    levels, middle = (1 << bits) - 1, np.float32(1 << (bits - 1))
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    # The side with 2^(bits-1) codes gets the larger weight: hence the sign of the scale.
    extreme = np.where(high > -low, -high, -low)
    full = extreme / middle if symmetric else (high - low) / np.float32(levels)
    full = np.where(np.abs(full) < np.finfo(np.float32).tiny, np.float32(1), full)
    best = np.full(full.shape, np.inf, np.float32)
    codes: Codes = np.zeros(blocks.shape, np.uint8)
    scales: npt.NDArray[np.floating] = full.copy()
    zeros: npt.NDArray[np.floating] = np.full(full.shape, middle)
    steps, product = np.empty_like(blocks), np.empty_like(blocks)
    for shrink in _SHRINKS[bits].astype(np.float32):
        scale = full * shrink
        zero = middle if symmetric else np.clip(np.rint(-low / scale), 0, levels)
        zero = np.broadcast_to(zero, scale.shape)
        np.divide(blocks, scale[..., None], out=steps)
        steps += zero[..., None]
        np.rint(steps, out=steps)
        np.clip(steps, 0, levels, out=steps)
        steps -= zero[..., None]
        norm = np.multiply(steps, steps, out=product).sum(-1)
        fitted = np.multiply(steps, blocks, out=product).sum(-1) / np.where(norm > 0, norm, 1)
        scale = np.where((norm > 0) & (fitted != 0), fitted, scale)
        np.multiply(steps, scale[..., None], out=product)
        product -= blocks
        error = np.multiply(product, product, out=product).sum(-1)
        better = error < best
        best = np.where(better, error, best)
        scales, zeros = np.where(better, scale, scales), np.where(better, zero, zeros)
        steps += zero[..., None]
        np.copyto(codes, steps, where=better[..., None], casting="unsafe")
    return codes, scales.astype(np.float32), zeros.astype(np.uint8)


def _pack(cells: Codes) -> Codes:
    """Two 4-bit cells of the last axis into one byte."""
    return (cells[..., 0::2] | (cells[..., 1::2] << 4)).astype(np.uint8)
