"""Which tokens a program of the linear recurrence works on, in rows of a batch or packed ones.

In a batch a program knows it from its number: all rows are cut alike. Packed sequences
(``packed.py``) are each cut from their own first token on, so that no chunk has tokens of two, and
a table says for every segment where it is. The longest segments come first: what begins last
should not take longest. States before segments lie in slots `[H, V, K]`, one for each. Where every
sequence is one segment, there are none, and passes read the initial states.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences.launches import planned
from edgelin.recurrences.packed import tables_on

COLUMNS = tl.constexpr(8)  # of a segment's line in the table
SHARES = (0.5, 0.75, 1.0, 1.5)  # longest segments to choose from, by the tokens for each of those
# that run at once
STATE = 2.0  # chunks that a pass computes while a segment's states are read and written


@triton.jit
def place(pid, places, T, chunks, H: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr):
    """Where the segment of a program is, whose number on the first axis is ``pid``.

    Gives the number of its row's state, its head, where its own state is (row, number in it),
    tokens before the row and in it, the first chunk and how many, and the row's chunks `[.., N]`.
    """
    if PACKED:
        i_h, p = pid % H, places + pid // H * COLUMNS
        before, row = tl.load(p + 1).to(tl.int64), tl.load(p + 5).to(tl.int64) * H + i_h
        T, first, count, slot = tl.load(p + 2), tl.load(p + 3), tl.load(p + 4), tl.load(p + 6)
        return tl.load(p) * H + i_h, i_h, i_h, slot, before, T, first, count, row
    else:
        i_bh, i_s = pid, tl.program_id(1)
        before, row = (i_bh // H).to(tl.int64) * T, i_bh.to(tl.int64) * tl.cdiv(T, BT)
        first = i_s * chunks
        count = tl.minimum(chunks, tl.cdiv(T, BT) - first)
        return i_bh, i_bh % H, i_bh, i_s, before, T, first, count, row


@triton.jit
def place_of_chunk(
    pid, spans, T, per_segment, H: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr
):
    """Of a program that takes a chunk of a head: the head, first token, tokens from there on, mark
    of the segment, number of the chunk. Heads of a chunk begin together: they lie together."""
    i_h, chunk = pid % H, pid // H
    if PACKED:
        p = spans + chunk * 3
        return i_h, tl.load(p).to(tl.int64), tl.load(p + 1), tl.load(p + 2) * H + i_h, pid
    else:
        chunks = tl.cdiv(T, BT)
        b, n = chunk // chunks, chunk % chunks
        i_bh, token = b * H + i_h, b.to(tl.int64) * T + n * BT
        mark = i_bh * tl.cdiv(chunks, per_segment) + n // per_segment
        return i_h, token, T - n * BT, mark, i_bh * chunks + n


@triton.jit
def number_of(i_r, i_s, per_row, H: tl.constexpr, PACKED: tl.constexpr):
    """Of a segment by its row and number in it, where rows have ``per_row``."""
    if PACKED:
        return i_s.to(tl.int64) * H + i_r
    else:
        return i_r.to(tl.int64) * per_row + i_s


@triton.jit
def ends_row(i_s, first, count, T, BT: tl.constexpr, REV: tl.constexpr, PACKED: tl.constexpr):
    """Whether nothing of the row comes after a segment, backwards before it."""
    if PACKED:
        return first == 0 if REV else (first + count) * BT >= T
    else:
        return i_s == (0 if REV else tl.num_programs(1) - 1)


class Table(NamedTuple):
    """What a launch reads and how many programs it then has; without packed rows neither counts."""

    lines: Tensor
    programs: int | None


class Places(NamedTuple):
    """Where a call has its segments, and the first two axes of what belongs to these.

    A segment's line: its sequence, the first token of that and how many it has, first chunk of the
    segment and how many it has, chunks of all sequences before, slot, tokens of the call.
    """

    segments: Table  # [S, 8]
    adding: tuple[Table, Table]  # those with another one behind, and backwards with one before
    sequences: Table  # first slot and segments [N, 2]
    spans: Table  # of every chunk its first token, tokens from there on, and slot [C, 3]
    states: int  # rows of the states before and after the call
    parts: tuple[int, int]  # of states before segments, and of numbers of these
    chunks: tuple[int, int]  # of numbers of chunks


def in_a_batch(like: Tensor, batch: int, heads: int, segments: int, chunks: int) -> Places:
    """Of rows that are all cut alike; ``like`` is any tensor, in the place of tables."""
    rows, none = batch * heads, Table(like, None)
    sizes = (rows, segments), (rows, chunks)
    return Places(none, (none, none), none, none, batch, *sizes)


def in_packed_rows(
    ends: Sequence[int],
    heads: int,
    block_t: int,
    shortest: int,
    programs: int,
    device: torch.device,
) -> tuple[Places, bool]:
    """Of packed sequences; kept for the next call with the same ones.

    Args:
        ends: As ``packed.ends_of`` gives them.
        heads: H.
        block_t: Tokens of a chunk.
        shortest: Tokens of a segment at least, where a sequence has several.
        programs: Segments x heads that run at once.
        device: Where the tables should be.

    Returns:
        Where they are, and whether every sequence is one segment.
    """
    on_gpu = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if on_gpu else 0
    return _cut(tuple(ends), heads, block_t, shortest, programs, device, stream)


@partial(planned, most=64)
@torch.inference_mode(False)  # the next call may train
def _cut(
    ends: tuple[int, ...], heads: int, block_t: int, shortest: int, programs: int,
    device: torch.device, stream: int,
) -> tuple[Places, bool]:  # fmt: skip
    """The same for a stream: another one would not wait for the tables."""
    begins, tokens = np.array(ends[:-1]), np.diff(ends)
    chunks = -(-tokens // block_t)
    pieces = _pieces(tokens, chunks, max(1, programs // heads), shortest)
    length = -(-chunks // pieces)
    single, numbers = bool((pieces == 1).all()), np.arange(len(tokens))
    before, skipped = np.cumsum(chunks) - chunks, np.cumsum(pieces) - pieces
    n = np.repeat(numbers, pieces)
    within = np.arange(len(n)) - skipped[n]
    first = within * length[n]
    count = np.minimum(length[n], chunks[n] - first)
    total = np.full_like(n, ends[-1])
    lines = [n, begins[n], tokens[n], first, count, before[n], skipped[n] + within, total]
    longest_first = np.argsort(-count, kind="stable")
    segments, within, n = np.stack(lines, 1)[longest_first], within[longest_first], n[longest_first]
    m = np.repeat(numbers, chunks)
    c = np.arange(len(m)) - before[m]
    spans = [begins[m] + c * block_t, tokens[m] - c * block_t, skipped[m] + c // length[m]]
    several = segments[within + 1 < pieces[n]], segments[within > 0]
    tables = [segments, *several, np.stack([skipped, pieces], 1), np.stack(spans, 1)]
    made = [Table(x, heads * len(x)) for x in tables_on(device, tables)]
    sizes = len(tokens), (len(segments), heads), (len(m), heads)
    return Places(made[0], (made[1], made[2]), made[3], made[4], *sizes), single


def _pieces(tokens: np.ndarray, chunks: np.ndarray, abreast: int, shortest: int) -> np.ndarray:
    """Segments of every sequence, where so many run ``abreast``: the fastest of some choices.

    Each choice has a longest segment. More of them are more even, and have more states to pass.
    """
    share = tokens.sum() / abreast
    choices: dict[bytes, tuple[float, np.ndarray]] = {}
    for longest in (*(share * part for part in SHARES), tokens.max()):
        pieces = np.minimum(np.ceil(tokens / longest).astype(int), tokens // shortest).clip(1)
        length = -(-chunks // pieces)
        pieces = (-(-chunks // length.clip(1))).clip(1)  # without those that begin behind the end
        choices.setdefault(pieces.tobytes(), (_cost(chunks, pieces, abreast), pieces))
    return min(choices.values(), key=lambda choice: choice[0])[1]


def _cost(chunks: np.ndarray, pieces: np.ndarray, abreast: int) -> float:
    """About how long a call takes, a sixth of it as what passes over so many chunks do.

    There are six passes, and before them, if there are several segments, three over half of the
    rows; then three times the states of all are read and written.
    """
    length = -(-chunks // pieces)
    passes = 6 * _longest(np.repeat(length, pieces) + STATE, abreast)
    if pieces.max() == 1:
        return passes
    adding = _longest(np.repeat(length, pieces - 1) / 2 + STATE, abreast)
    return passes + 3 * (adding + STATE * int(pieces.sum()) / abreast)


def _longest(each: np.ndarray, abreast: int) -> float:
    """When the last one ends, where what is longest begins first and so many run abreast."""
    ends = [0.0] * abreast
    for length in np.sort(each)[::-1].tolist():
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)
