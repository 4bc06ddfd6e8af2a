"""Calls whose one row holds sequences of different lengths, one after the other (``cu_seqlens``).

``cu_seqlens`` ``[N + 1]``, int32 or int64, says where the N sequences begin and end, as in
flash-linear-attention: sequence n has the tokens from ``cu_seqlens[n]`` up to, not with,
``cu_seqlens[n + 1]``; the first entry is 0, the last one all tokens. Inputs are ``[1, T, ...]``,
states have N rows. A sequence of no tokens gives its state back as it is.

On a GPU the kernels of ``linear`` (but for the bonus), ``delta`` and ``dplr`` read such a row as it
is, by tables that say where sequences begin (``linear/kernel_places.py``,
``delta/kernel_chunks.py``); from here they only have :func:`ends_of`. All others, and everything on
a CPU, go through :func:`run_all`:

The sequences are put into groups, each padded with zeros to its longest one and run as a batch.
Few groups mean few launches, many mean little padding: a group costs what ``GROUP`` tokens cost,
beside its tokens and padding, and the groups are those of least cost in all (:func:`_cuts`).
Sequences of one length are one group, and need no copy at all where no empty one is between them.

The lengths have to be known to Python. On a GPU, reading ``cu_seqlens`` waits for everything before
it, so give it on the CPU; what follows from it is kept for the next call with the same numbers,
such as the next layer's, and nothing is compiled for it. ``torch.compile`` breaks its graph here
and compiles what is around it, not what is run inside (``fullgraph=True`` is refused).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from edgelin.recurrences import CHUNK

GROUP = {"cuda": 8192, "cpu": 64}  # tokens computed in the time of one more call, about
LENGTHS = 32  # different lengths that the choice of groups looks at

Call = Callable[..., tuple[Tensor, Tensor]]


class Rows(NamedTuple):
    """Which rows to take ``[P]``, and which of these are zeros instead, if any."""

    at: Tensor
    zeros: Tensor | None


@dataclass(frozen=True)
class Plan:
    """Where everything goes.

    Args:
        sizes: Rows and steps of every group.
        lengths: Steps that each row of a group really has ``[rows]``, None where all are full.
        spread: For every position of all groups the token there; None: tokens are in place.
        collect: For every token its position; None with ``spread``.
        order: The sequences by group, empty ones last; None: they are in order.
        inverse: For every sequence its place in ``order``; None with that.
        empty: How many sequences have no tokens.
    """

    sizes: list[tuple[int, int]]
    lengths: list[Tensor | None]
    spread: Rows | None
    collect: Rows | None
    order: Rows | None
    inverse: Rows | None
    empty: int


def run(
    call: Call,
    steps: Sequence[Tensor | None],
    state: Tensor,
    cu_seqlens: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a recurrence of one state over packed sequences; see :func:`run_all`.

    Args:
        call: Maps (*steps, state, lengths) of a batch to (o, state).
        steps: ``[1, T, ...]``, or None.
        state: ``[N, ...]``.
        cu_seqlens: ``[N + 1]``.
        lengths: Must be None.

    Returns:
        Outputs ``[1, T, ...]`` and the states after the last tokens ``[N, ...]``.
    """

    def with_list(*inputs: Any) -> tuple[Tensor, list[Tensor]]:
        *mine, states, ends = inputs
        o, after = call(*mine, states[0], ends)
        return o, [after]

    o, states = run_all(with_list, steps, [state], cu_seqlens, lengths)
    return o, states[0]


def run_all(
    call: Callable[..., tuple[Tensor, list[Tensor]]],
    steps: Sequence[Tensor | None],
    states: list[Tensor],
    cu_seqlens: Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Run anything causal over packed sequences.

    Args:
        call: Maps (*steps, states, lengths) of a batch to (o ``[B, T, ...]``, states). The steps
            are zero behind the end of a row; ``lengths`` ``[B]`` is None where all rows are full.
        steps: What has a time axis ``[1, T, ...]``; None is handed on.
        states: States before the first tokens, each ``[N, ...]``.
        cu_seqlens: ``[N + 1]``, as the module says.
        lengths: Must be None; taken so that every caller refuses it in the same words.

    Returns:
        Outputs ``[1, T, ...]`` and the states after the last tokens, each ``[N, ...]``.

    Raises:
        ValueError: ``cu_seqlens`` is not as the module says, or does not fit the tensors.
    """
    refuse_both(cu_seqlens, lengths)
    given = [x for x in steps if x is not None]
    ends, device = ends_of(cu_seqlens, given, states), given[0].device
    plan = _plan(ends, device, GROUP.get(device.type, GROUP["cuda"]))
    batches = [[None] * len(plan.sizes) if x is None else _batches(x, plan) for x in steps]
    rows = [size[0] for size in plan.sizes] + [plan.empty] * (plan.empty > 0)
    running = [_split(_take(x, plan.order, plan.inverse), rows) for x in states]
    outputs = []
    for i, group in enumerate(zip(*batches, strict=True)):
        o, after = call(*group, [pieces[i] for pieces in running], plan.lengths[i])
        outputs.append(o.flatten(0, 1))
        for pieces, ended in zip(running, after, strict=True):
            pieces[i] = ended  # those of empty sequences stay behind them
    o = _take(_join(outputs), plan.collect, plan.spread)
    return o[None], [_take(_join(pieces), plan.inverse, plan.order) for pieces in running]


def _batches(x: Tensor, plan: Plan) -> list[Tensor]:
    """``[1, T, ...]`` as the batch of every group ``[rows, longest, ...]``."""
    pieces = _split(
        _take(x[0], plan.spread, plan.collect), [rows * longest for rows, longest in plan.sizes]
    )
    return [piece.unflatten(0, size) for piece, size in zip(pieces, plan.sizes, strict=True)]


# How many tokens a sequence has is known only when they are counted.
run_all = torch.compiler.disable(run_all, reason="Python reads the lengths of packed sequences")


def refuse_both(cu_seqlens: Tensor | None, lengths: Tensor | None) -> None:
    """Raise ValueError where a call has both: packed sequences say their lengths."""
    if cu_seqlens is not None and lengths is not None:
        raise ValueError("cu_seqlens and lengths are both given, need one of them or none")


def ends_of(cu_seqlens: Tensor, steps: list[Tensor], states: list[Tensor]) -> tuple[int, ...]:
    """The ends as numbers; ValueError where they can't be."""
    kind, shape = cu_seqlens.dtype, tuple(cu_seqlens.shape)
    if kind not in (torch.int32, torch.int64) or len(shape) != 1 or shape[0] < 2:
        raise ValueError(f"cu_seqlens is {shape}, {kind}, need [N + 1] of int32 or int64, N >= 1")
    ends = tuple(cu_seqlens.tolist())
    time = steps[0].shape[1]
    falls = any(end < begin for begin, end in pairwise(ends))
    if falls or ends[0] != 0 or ends[-1] != time or not time:
        raise ValueError(
            f"cu_seqlens goes from {ends[0]} to {ends[-1]}{' and falls between' * falls}, "
            f"need 0 to T = {time}, at least 1, never falling"
        )
    wrong = [tuple(x.shape) for x in steps if x.shape[:2] != (1, time)]
    if wrong:
        raise ValueError(f"an input is {wrong[0]}, with cu_seqlens all need [1, {time}, ...]")
    wrong = [tuple(x.shape) for x in states if x.shape[0] != len(ends) - 1]
    if wrong:
        raise ValueError(f"a state is {wrong[0]}, need a row for each of {len(ends) - 1} sequences")
    return ends


def fixed(ends: Sequence[int] | None) -> tuple[int, ...] | None:
    """Ends as what is kept for them is looked up by: a custom op hands on a list."""
    return None if ends is None else tuple(ends)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # the next call may train
def _plan(ends: tuple[int, ...], device: torch.device, fixed: int) -> Plan:
    """Groups that cost ``fixed`` each, and what brings tokens and states there and back."""
    starts, counts = torch.tensor(ends[:-1]), torch.tensor(ends).diff()
    cuts = _cuts(counts[counts > 0].tolist(), fixed)
    below = torch.bucketize(counts, torch.tensor(cuts))  # a group's rows keep their order
    groups = [torch.nonzero((counts > 0) & (below == i))[:, 0] for i in range(len(cuts))]
    empty = torch.nonzero(counts == 0)[:, 0]
    order = torch.cat([*groups, empty])
    sizes, lengths, tokens, real = [], [], [], []
    for rows, longest in zip(groups, cuts, strict=True):
        steps = torch.arange(longest)
        there = steps < counts[rows, None]
        sizes.append((len(rows), longest))
        lengths.append(None if there.all() else counts[rows].to(device))
        tokens.append(torch.where(there, starts[rows, None] + steps, 0).flatten())
        real.append(there.flatten())
    source, filled = torch.cat(tokens), torch.cat(real)
    padding = torch.nonzero(~filled)[:, 0]
    places = torch.empty(ends[-1], dtype=torch.int64)
    places[source[filled]] = torch.nonzero(filled)[:, 0]
    in_place = len(source) == ends[-1] and bool((source == torch.arange(ends[-1])).all())
    in_order = bool((order == torch.arange(len(order))).all())
    return Plan(
        sizes,
        lengths,
        None if in_place else Rows(source.to(device), padding.to(device) if len(padding) else None),
        None if in_place else Rows(places.to(device), None),
        None if in_order else Rows(order.to(device), None),
        None if in_order else Rows(order.argsort().to(device), None),
        len(empty),
    )


def _cuts(counts: list[int], fixed: int) -> list[int]:
    """The longest length of every group, rising, at the least cost.

    A group of rows of lengths up to L costs ``fixed`` + rows x L tokens. Sorted by length a best
    choice has no group between the rows of another, so it is found from the shortest rows on: the
    best one of the rows up to a length ends in one group, after a best one of the rows before.
    Lengths within ``1 / LENGTHS`` of the longest, or within a chunk, count as one.
    """
    width = max(CHUNK, -(-max(counts) // LENGTHS))
    longest: dict[int, int] = {}
    rows: dict[int, int] = {}
    for count in sorted(counts):
        bucket = -(-count // width)
        longest[bucket], rows[bucket] = count, rows.get(bucket, 0) + 1
    many = list(rows.values())
    best: list[tuple[int, list[int]]] = [(0, [])]
    for last, length in enumerate(longest.values()):
        taken, choices = 0, []
        for first in range(last, -1, -1):
            taken += many[first]
            cost, cuts = best[first]
            choices.append((cost + fixed + taken * length, [*cuts, length]))
        best.append(min(choices))
    return best[-1][1]


def _take(x: Tensor, rows: Rows | None, back: Rows | None) -> Tensor:
    """Rows of ``x``; ``back`` takes them back. None: ``x`` as it is."""
    if rows is None:
        return x
    taken: Tensor = _Take.apply(x, rows, back)  # type: ignore[no-untyped-call]
    return taken


class _Take(torch.autograd.Function):
    """Rows of a tensor. Both ways only read by an index: adding gradients up would take longer."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Rows, Rows], output: Tensor) -> None:
        _, rows, back = inputs
        ctx.ways = back, rows

    @staticmethod
    def forward(x: Tensor, rows: Rows, back: Rows) -> Tensor:  # type: ignore[override]
        taken = x[rows.at]  # on a GPU faster than index_select
        return taken if rows.zeros is None else taken.index_fill_(0, rows.zeros, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _take(grad, *ctx.ways), None, None


def _split(x: Tensor, sizes: list[int]) -> list[Tensor]:
    """Consecutive rows; one piece is no copy backwards."""
    return [x] if len(sizes) == 1 else list(x.split(sizes))


def _join(pieces: list[Tensor]) -> Tensor:
    """All rows in one tensor; one piece is no copy."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def tables_on(device: torch.device, tables: list[np.ndarray]) -> list[Tensor]:
    """Numbers as int32 on a device, by one copy that nobody waits for; what kernels read of packed
    sequences. Addresses are multiples of 16."""
    flat = [np.pad(table.ravel(), (0, -table.size % 4)).astype(np.int32) for table in tables]
    whole = torch.from_numpy(np.concatenate(flat))
    if device.type == "cuda":
        whole = whole.pin_memory()
    pieces = whole.to(device, non_blocking=True).split([len(x) for x in flat])
    return [x.narrow(0, 0, y.size).view(y.shape) for x, y in zip(pieces, tables, strict=True)]
