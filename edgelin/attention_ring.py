"""Attention over a sliding window, with keys and values in a ring buffer of fixed size.

A token sees the last W tokens, itself included, and the first M tokens of the stream, the sinks.
The rotated key of position p lies in slot p while p < M, later in slot M + (p - M) mod W, so that
a state `[B, Hkv, M + W, D]` has the same size for ever. Window: Beltagy et al. 2020,
arXiv:2004.05150, section 3.1; sinks: Xiao et al. 2024, arXiv:2309.17453, section 3.2, here with the
positions that the tokens have in the stream.

Glossary: W window, M sinks, D head width, H query heads, Hkv key heads, G = H / Hkv, n blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from edgelin.layers import at_least_float32
from edgelin.recurrences import CHUNK


@dataclass(frozen=True)
class Ring:
    """Both forms of windowed attention.

    Args:
        window: W.
        sinks: M.
        group: G.
    """

    window: int
    sinks: int
    group: int

    def attend_short(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rings: tuple[Tensor, Tensor],
        position: Tensor,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """T <= W tokens: score the ring and the new keys apart, join before the softmax.

        Args:
            q: `[B, H, T, D]`, rotated.
            k: `[B, Hkv, T, D]`, rotated.
            v: As ``k``.
            rings: Keys and values `[B, Hkv, M + W, D]`.
            position: Of the first token, `[B]` int64.
            lengths: Tokens that each row really has, `[B]` int64; None: all.

        Returns:
            o `[B, H, T, D]`, and the rings after the last token.
        """
        dtype, time = q.dtype, k.shape[2]
        k, v = k.to(rings[0].dtype), v.to(rings[1].dtype)
        # Gathered from CHUNK rows: an exported graph fails on a longer call, never answers.
        steps = torch.arange(time, device=q.device)
        steps = torch.arange(CHUNK, device=q.device).index_select(0, steps)
        # The G query heads of a key head are G T rows of one product.
        q = at_least_float32(q * q.shape[-1] ** -0.5)
        q = q.unflatten(1, (k.shape[1], self.group)).flatten(2, 3)
        scores = torch.cat([q @ rings[0].transpose(-1, -2), q @ k.transpose(-1, -2)], dim=-1)
        hidden = ~self._visible(position, steps)
        old, new = (
            scores.masked_fill(hidden, -torch.inf)
            .softmax(-1)
            .split([self.sinks + self.window, time], dim=-1)
        )
        o = (old @ rings[1] + new @ v).to(dtype)
        slots = self._slots(position[:, None] + steps)[:, None, :, None].expand_as(k)
        if lengths is not None:  # behind the end a slot keeps what it has
            behind = (steps >= lengths[:, None])[:, None, :, None]
            k, v = (
                torch.where(behind, ring.gather(2, slots), new)
                for ring, new in zip(rings, (k, v), strict=True)
            )
        written = (rings[0].scatter(2, slots, k), rings[1].scatter(2, slots, v))
        return o.unflatten(2, (self.group, time)).flatten(1, 2), written

    def attend_blocks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rings: tuple[Tensor, Tensor],
        position: Tensor,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Any T: blocks of W queries, each against its own and the previous block, and the sinks.

        Arguments and results as of :meth:`attend_short`. The ring in order of position is the block
        before the first. Memory is O(T (W + M)).
        """
        window, time = self.window, q.shape[2]
        blocks = -(-time // window)
        ends = torch.full_like(position, time) if lengths is None else lengths
        keys, key_ring = self._extend(rings[0], k, position, ends)
        values, value_ring = self._extend(rings[1], v, position, ends)
        q = F.pad(q, (0, 0, 0, blocks * window - time)).unflatten(2, (blocks, window))
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2).flatten(0, 1),
            self._seen(keys, key_ring, blocks),
            self._seen(values, value_ring, blocks),
            attn_mask=self._visible_keys(position, blocks),
        )
        o = o.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :time]
        return o, (key_ring, value_ring)

    def _slots(self, tokens: Tensor) -> Tensor:
        """The slot of every position."""
        slots = torch.remainder(tokens - self.sinks, self.window) + self.sinks
        return torch.where(tokens < self.sinks, tokens, slots) if self.sinks else slots

    def _visible(self, position: Tensor, steps: Tensor) -> Tensor:
        """Which slots of the ring and which new keys a row sees, `[B, 1, G T, M + W + T]` bool."""
        window = self.window
        rows = steps.repeat(self.group)[:, None]
        slots = torch.arange(window, device=position.device, dtype=torch.int64)
        since = position[:, None] - self.sinks
        # Tokens between a slot's and the next one; a slot not yet written gets age >= since.
        age = torch.remainder(since - 1 - slots, window)
        written = (age < since)[:, None]
        old = (age[:, None] + rows < window - 1) & written
        new = (steps <= rows).expand(old.shape[0], -1, -1)
        if self.sinks:
            first = torch.arange(self.sinks, device=position.device) < position[:, None]
            old = torch.cat([first[:, None].expand(-1, rows.shape[0], -1), old], dim=-1)
        return torch.cat([old, new], dim=-1)[:, None]

    def _extend(
        self, ring: Tensor, fresh: Tensor, position: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The ring in order of position, then ``fresh`` `[B, Hkv, T, D]`; and the ring after it.

        ``ends`` `[B]` says how many of the fresh ones each row has.
        """
        window, count = self.window, ends[:, None]
        sinks, ring = ring.split([self.sinks, window], dim=2)
        slots = torch.arange(window, device=ring.device)
        since = position[:, None] - self.sinks
        oldest_first = torch.remainder(since + slots, window)
        old = ring.gather(2, oldest_first[:, None, :, None].expand_as(ring))
        line = torch.cat([old.to(fresh.dtype), fresh], dim=2)
        # Slot s of the ring takes the one of the last W entries whose position belongs there.
        entry = count + torch.remainder(slots - since - count, window)
        exact = torch.cat([old, fresh.to(ring.dtype)], dim=2)
        after = exact.gather(2, entry[:, None, :, None].expand_as(ring))
        if self.sinks:
            # A sink among the last W tokens has a slot of its own.
            belongs = since - window + entry >= 0
            after = torch.where(belongs[:, None, :, None], after, ring)
            after = torch.cat([self._sinks(sinks, fresh, position, count), after], dim=2)
        return line, after

    def _sinks(self, old: Tensor, fresh: Tensor, position: Tensor, count: Tensor) -> Tensor:
        """The sinks `[B, Hkv, M, D]` after the fresh ones, which may hold some of them."""
        step = torch.arange(self.sinks, device=old.device) - position[:, None]
        new = (step >= 0) & (step < count)
        at = step.clamp(0, fresh.shape[2] - 1)[:, None, :, None].expand_as(old)
        return torch.where(new[:, None, :, None], fresh.gather(2, at).to(old.dtype), old)

    def _seen(self, line: Tensor, ring: Tensor, blocks: int) -> Tensor:
        """Blocks i and i + 1 of a line `[B, Hkv, W + T, D]`, for all i, and after them the sinks.

        The result is `[B n, H, 2 W + M, D]`.
        """
        window = self.window
        line = F.pad(line, (0, 0, 0, (blocks + 1) * window - line.shape[2]))
        seen = line.unfold(2, 2 * window, window).permute(0, 2, 1, 4, 3)
        if self.sinks:
            sinks = ring[:, None, :, : self.sinks].to(line.dtype).expand(-1, blocks, -1, -1, -1)
            seen = torch.cat([seen, sinks], dim=3)
        return seen.flatten(0, 1).repeat_interleave(self.group, dim=1)

    def _visible_keys(self, position: Tensor, blocks: int) -> Tensor:
        """Which of its 2 W + M keys each query of a block sees, `[B n, 1, W, 2 W + M]` bool."""
        window = self.window
        at = torch.arange(2 * window, device=position.device)
        row = at[:window, None]
        band = (at > row) & (at <= row + window)
        # Entry c of the line has position p - W + c; a negative one was never written, and a sink
        # is seen where the sinks are.
        index = at + window * torch.arange(blocks, device=position.device)[:, None]
        written = index >= window + self.sinks - position[:, None, None]
        visible = band & written[:, :, None]
        if self.sinks:
            first = torch.arange(self.sinks, device=position.device)
            token = position[:, None, None] + index[:, :window]
            visible = torch.cat([visible, first <= token[..., None]], dim=-1)
        return visible.flatten(0, 1)[:, None]
