"""Linear recurrence on a GPU: the passes of ``kernel_passes.py`` over the tensors of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from edgelin.recurrences.launches import cdiv
from edgelin.recurrences.linear.kernel_places import in_a_batch
from edgelin.recurrences.linear.kernel_plan import (
    HEAD,
    KEY,
    NONE,
    OUTPUT,
    Pass,
    Shape,
    block_of,
    cut,
    places_of,
    plan_of,
)


class Split(NamedTuple):
    """Queries and keys without the decays between tokens of a chunk (``kernel_segments.split``)."""

    q: Tensor
    k: Tensor
    exponents: Tensor  # in bits, float32 [B, T, H, K]; forwards nothing
    first: Tensor  # log decays of half chunks, float32 [B * H, N, K]
    second: Tensor
    far: Tensor  # marks of segments, int32 [B * H, segments]


class Column(NamedTuple):
    """One more column of v, all ones, whose state is the normaliser: ``kernel_normalizer.py``."""

    values: Tensor  # q . z of the output, or backwards its gradient [B, T, H], float32
    starts: Tensor  # the states or their gradients, as of ``Walk.starts``
    ends: Tensor  # the states before the segments
    last: Tensor  # the last of these [B, H, K]
    final: Tensor  # where to leave the one after the pass [B, H, K]
    floor: Tensor  # [B, T, H]


class Walk:
    """The passes of one call over its segments.

    Args:
        tensors: q, k ``[B, T, H, K]``, v and backwards do ``[B, T, H, V]``, contiguous, by name;
            q and k of one head serve all.
        g: Log decay ``[B, T, H]``, ``[B, T, H, K]`` or None, contiguous.
        scale: Factor of the output; backwards it multiplies what a pass adds to the state too.
        normal: 1 with the column of ones, 2 if its sums have a floor.
        eps: Added to its sums.
        ends: Of sequences packed into the only row; states have a row for each of them.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        g: Tensor | None,
        scale: float,
        normal: int = 0,
        eps: float = 0.0,
        ends: Sequence[int] | None = None,
    ) -> None:
        self.tensors, self.g = tensors, g
        half = all(x.dtype == torch.bfloat16 for x in tensors.values())
        q, (batch, time, heads, value) = tensors["q"], tensors["v"].shape
        mode = NONE if g is None else HEAD if g.dim() == 3 else KEY
        sizes, packed, rows = (heads, q.shape[3], value, q.shape[2]), 0, (batch, time)
        if ends is not None:
            self.places, single = places_of(ends, heads, half, q.device)
            rows, packed = (1, 1), 1 if single else 2
        shape = Shape(*rows, *sizes, mode, half, q.is_cuda, scale, normal, eps, packed)
        self.plan = plan = plan_of(shape)
        if ends is None:
            chunks = cdiv(time, plan.block_t)
            self.places = in_a_batch(q, batch, heads, plan.segments, chunks)
        self.split = self._split() if self.plan.splits else None
        self.sums = self._sums() if mode == HEAD else None

    def _split(self) -> Split:
        """Take the decays between tokens out of queries and keys."""
        q, k, g, plan = self.tensors["q"], self.tensors["k"], self.g, self.plan
        assert g is not None
        halves = (*self.places.chunks, plan.shape.key)
        first, second = (g.new_empty(halves, dtype=torch.float32) for _ in range(2))
        backwards = "do" in self.tensors
        exponents = torch.empty(q.shape if backwards else 0, dtype=torch.float32, device=q.device)
        far = torch.zeros(self.places.parts, dtype=torch.int32, device=q.device)
        made = Split(torch.empty_like(q), torch.empty_like(k), exponents, first, second, far)
        spans, programs = self.places.spans
        plan.split(backwards)(q, k, g, *made, spans, programs=programs)
        return made

    def _sums(self) -> Tensor:
        """The decays of heads, summed over chunks."""
        assert self.g is not None
        shape = (*self.places.chunks, self.plan.block_t)
        sums = torch.empty(shape, dtype=self.plan.wide, device=self.g.device)
        table, programs = self.places.spans
        chunks = None if programs is None else programs // self.plan.shape.heads
        self.plan.sums()(self.g, sums, table, programs=chunks)
        return sums

    def _near(self, name: str) -> Tensor:
        """A tensor, without the decays between its tokens."""
        if self.split is None or name not in ("q", "k"):
            return self.tensors[name]
        return self.split.q if name == "q" else self.split.k

    def halves(self, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Log decays on the way into a chunk and out of it, and the marks of segments; with a decay
        a head its sums, in the first place."""
        if self.split is None:
            nothing = self.tensors["q"]
            return nothing if self.sums is None else self.sums, nothing, nothing
        first, second, far = self.split[3:]
        return (second, first, far) if reverse else (first, second, far)

    def starts(
        self,
        kind: Pass,
        initial: Tensor,
        normalizer: Tensor | None = None,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the passes in the direction of ``kind`` begin with, of the column of ones too.

        With several segments they begin with the state before each, backwards its gradient after
        it.

        Args:
            kind: Of the output, dq or dk.
            initial: ``[B, H, K, V]`` float32: the state, or backwards the gradient of the last one.
            normalizer: ``[B, H, K]``, the same of the column, where the plan has one.
            values: Backwards the gradient of its sums ``[B, T, H]``.
        """
        plan, places = self.plan, self.places
        initial = initial.contiguous()
        z = initial if normalizer is None else normalizer.contiguous()
        if plan.single:
            return initial, z
        x, y = plan.widths(kind)
        h = initial.new_empty((*places.parts, x, y), dtype=torch.float32)
        total = initial.new_empty((*places.parts, y), dtype=torch.float32)
        h_z = total if normalizer is None else torch.empty_like(total)
        table, programs = places.adding[kind.reverse]
        if not plan.by_key:
            plan.segment(kind, far=False)(
                self._near(kind.x), self._near(kind.y), *self.halves(kind.reverse),
                total if values is None else values, h, h_z, total, table, programs=programs,
            )  # fmt: skip
        if plan.shape.mode == KEY:
            assert self.g is not None
            plan.segment(kind, far=True)(
                self.tensors[kind.x], self.tensors[kind.y], self.g, self.halves(False)[2], h, total,
                table, programs=programs,
            )  # fmt: skip
        table, programs = places.sequences
        plan.scan(kind, x)(h, total, initial, table, programs=programs)
        if normalizer is not None:
            plan.scan(kind, 1)(h_z, total, z, table, programs=programs)
        return h, h_z

    def attend(
        self,
        kind: Pass,
        starts: Tensor,
        weights: Tensor | None = None,
        ends: tuple[Tensor, Tensor] | None = None,
        final: Tensor | None = None,
        column: Column | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one pass over time.

        Args:
            kind: Which pass.
            starts: From :meth:`starts`, in its direction.
            weights: For the decay's gradient, float32: dq leaves q dq there and dk makes the
                gradient of it, ``[B, T, H, K]`` or, with a decay a head, ``[blocks, B, T, H]``.
            ends: For dk with weights, the states before the segments, and the last one.
            final: Where to leave the last state, else in new memory.
            column: Of ones, where the plan has one and the pass needs it.

        Returns:
            The result, with the width of x (outer: y), and the state after the pass
            ``[B, H, K, V]`` float32.
        """
        plan, shape = self.plan, self.plan.shape
        x, y = plan.widths(kind)
        like = self.tensors[kind.x if kind.inner else kind.y]
        rows = (*self.tensors["v"].shape[:3], x if kind.inner else y)
        out = torch.empty(rows, dtype=like.dtype, device=like.device)
        if final is None:
            states = (self.places.states, shape.heads, y, x)
            final = torch.empty(states, dtype=torch.float32, device=like.device)
        ends = (starts, final) if ends is None else ends
        table, programs = self.places.segments
        if not plan.by_key:
            g = like if self.g is None else self.g if self.split is None else self.split.exponents
            plan.near(kind, weights is not None)(
                self._near(kind.a), self._near(kind.x), self._near(kind.y), g,
                *self.halves(kind.reverse), starts, *ends, out, final,
                out if weights is None else self._near(kind.m), out if weights is None else weights,
                *(column or [final] * len(Column._fields)), table, programs=programs,
            )  # fmt: skip
        if shape.mode == KEY:
            assert self.g is not None
            plan.far(kind, weights is not None)(
                self.tensors[kind.a], self.tensors[kind.x], self.tensors[kind.y], self.g,
                self.halves(False)[2], starts, *ends, out, final,
                out if weights is None else self.tensors[kind.m],
                out if weights is None else weights, table, programs=programs,
            )  # fmt: skip
        return out, final


def walk(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    scale: float,
    do: Tensor | None = None,
    normal: int = 0,
    eps: float = 0.0,
    ends: Sequence[int] | None = None,
) -> Walk:
    """Of q, k, v, g and backwards do: queries and keys expanded from one head are taken once."""
    q, k, v, g = inputs
    if q.stride(2) == k.stride(2) == 0 and (g is None or g.dim() == 3):
        q, k = q[:, :, :1], k[:, :, :1]
    tensors = {"q": q.contiguous(), "k": k.contiguous(), "v": v.contiguous()}
    if do is not None:
        tensors["do"] = do.contiguous()
    return Walk(tensors, None if g is None else g.contiguous(), scale, normal, eps, ends)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    scale: float,
    ends: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The recurrence on a GPU: shapes as in ``chunked.forward``, K and V up to 256, scale > 0.

    With ``ends``, from ``packed.ends_of``, the only row holds sequences that have states each.

    Returns:
        o, the last state, and what the backward pass can go on from, as :func:`allocate` has it.
    """
    passes = walk((q, k, v, g), scale, ends=ends)
    starts, _ = passes.starts(OUTPUT, state)
    o, final = passes.attend(OUTPUT, starts)
    return o, final, [] if passes.plan.single else [starts]


def allocate(q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int] | None = None) -> list[Tensor]:
    """Memory for the states before the segments ``[B * H, segments, V, K]``, packed
    ``[segments, H, V, K]``; none where every sequence is one segment."""
    (batch, time, heads, value), key = v.shape, q.shape[3]
    half = all(x.dtype == torch.bfloat16 for x in (q, k, v))
    if ends is None:
        parts = batch * heads, cut(batch * heads, time, block_of(half))[1]
        single = parts[1] == 1
    else:
        places, single = places_of(ends, heads, half, v.device)
        parts = places.parts
    if single:
        return []
    return [torch.empty((*parts, value, key), dtype=torch.float32, device=v.device)]
