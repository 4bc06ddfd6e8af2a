"""Which tokens a chunk of the kernels holds, in the rows of a batch and in packed sequences.

In a batch, chunk n of a row has the 64 tokens from 64 n on. Sequences packed into one row
(``packed.py``) each begin with a chunk of their own, so that no chunk has tokens of two; the chunks
of all sequences are counted through. Two tables then say what a program works on, one for the
kernels that take every chunk on its own and one for those that go through a sequence. The latter
has the longest sequence first: what begins last should not take longest.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences import CHUNK
from edgelin.recurrences.packed import tables_on

C = tl.constexpr(CHUNK)


@triton.jit
def own_chunk(spans, T, H, PACKED: tl.constexpr):
    """Of the chunk of this program: row and head, first token and the end of its sequence.

    Packed, there is one row, and ``T`` is 64 x all chunks.
    """
    chunks = tl.cdiv(T, C)
    bh, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    if PACKED:
        return bh, tl.load(spans + 2 * n), tl.load(spans + 2 * n + 1)
    else:
        return bh, n * C, T


@triton.jit
def own_sequence(order, T, H, PACKED: tl.constexpr):
    """Of the sequence of this program: number of its state, row and head, how many chunks there
    are and which number the first one has, first token and end."""
    chunks = tl.cdiv(T, C)
    bh = tl.program_id(0)
    if PACKED:
        p, h = order + bh // H * 4, bh % H
        begin, end = tl.load(p + 2), tl.load(p + 3)
        number = h.to(tl.int64) * chunks + tl.load(p + 1)
        return tl.load(p) * H + h, h, tl.cdiv(end - begin, C), number, begin, end
    else:
        return bh, bh, chunks, bh.to(tl.int64) * chunks, 0, T


@triton.jit
def chunk_rows(bh, first, end, T, H):
    """Rows `[64]` of the chunk from token ``first`` on in a `[B * T * H, ...]` tensor, and which
    of them exist."""
    token = first + tl.arange(0, C)
    row = ((bh // H).to(tl.int64) * T + token) * H + bh % H
    return row, token < end


class Packed(NamedTuple):
    """Chunks of packed sequences, or of a batch."""

    sequences: int  # 0: a batch
    time: int  # 64 x the chunks of all sequences, or tokens of a row
    batch: int  # rows of a batch of as many chunks whose longest sequence is as long
    spans: Tensor  # of every chunk its first token and the end of its sequence [M, 2], int32
    order: Tensor  # of every sequence: which, first chunk, first token, end [N, 4], int32


def chunks_of(ends: tuple[int, ...] | None, rows: Tensor) -> Packed:
    """Of sequences that end at ``ends`` (the first one is 0), kept for the next call; without them
    of a batch of ``rows`` `[B, T, ...]`, which stand for the tables."""
    if ends is None:
        return Packed(0, rows.shape[1], rows.shape[0], rows, rows)
    device = rows.device
    on_gpu = device.type == "cuda"
    return _chunks_of(ends, device, torch.cuda.current_stream(device).cuda_stream if on_gpu else 0)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # the next call may train
def _chunks_of(ends: tuple[int, ...], device: torch.device, stream: int) -> Packed:
    """The same for a stream: another one would not wait for the tables."""
    begins, stops = np.array(ends[:-1]), np.array(ends[1:])
    counts = -(-(stops - begins) // CHUNK)
    offsets = np.cumsum(counts) - counts
    longest_first = np.argsort(-counts, kind="stable")
    order = np.stack([np.arange(len(counts)), offsets, begins, stops], axis=1)[longest_first]
    which = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(which)) - offsets[which]
    spans = np.stack([begins[which] + CHUNK * within, stops[which]], axis=1)
    tables = tables_on(device, [spans, order])
    return Packed(len(counts), CHUNK * len(which), len(which) // int(counts.max()), *tables)
