"""Sliding-window softmax attention with grouped heads and a fixed ring buffer of keys and values.

    o_t = sum_{s = t-W+1}^{t} softmax_s(q_t . k_s / sqrt(D)) v_s,   q and k rotated

A token sees the last W tokens, itself included. The ring keeps the rotated key of position p in
slot p mod W, so that a state has the same size for ever. Window: Beltagy et al. 2020,
arXiv:2004.05150, section 3.1; grouped heads: Ainslie et al. 2023, arXiv:2305.13245; rotation: Su
et al. 2021, arXiv:2104.09864, eq. 34.

Glossary: W window, D head width, H query heads, G query heads a key head, n blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.layers import at_least_float32, rotary_angles, rotate
from edgelin.mixers import check_sizes
from edgelin.recurrences import CHUNK
from edgelin.recurrences.exporting import is_exporting
from edgelin.state import StateSpec


@dataclass(frozen=True)
class Config:
    """Sizes of the mixer.

    Args:
        num_heads: Query heads H.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Width D of a head, even.
        window: Tokens W that a token sees, itself included.
        rope_theta: Base of the rotary frequencies.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "num_kv_heads", "head_dim", "window")
        if self.num_heads % self.num_kv_heads:
            raise EdgelinError(
                f"num_heads is {self.num_heads}, no multiple of num_kv_heads = "
                f"{self.num_kv_heads}; change one of them"
            )
        if self.head_dim % 2:
            raise EdgelinError(f"head_dim is {self.head_dim}; rotary position needs an even one")
        if not self.rope_theta > 0:
            raise EdgelinError(f"rope_theta is {self.rope_theta}; it must be above 0")

    @property
    def export_obstacle(self) -> str | None:
        """Why a mixer of these sizes can't be exported; None: it can."""
        if self.window >= CHUNK:
            return None
        return (
            f"an attention window of {self.window} can't be exported: calls carry up to "
            f"{CHUNK} tokens; set window to {CHUNK} or more"
        )


class Mixer(nn.Module):
    """Sliding-window attention.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Unused; every mixer takes it.
    """

    needs_position = True

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.group = config.num_heads // config.num_kv_heads
        c = config
        self.qkv_proj = nn.Linear(
            hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, bias=False
        )
        self.out_proj = nn.Linear(c.num_heads * c.head_dim, hidden_size, bias=False)

    def state_specs(self) -> list[StateSpec]:
        """The rings of keys and values."""
        shape = (self.config.num_kv_heads, self.config.window, self.config.head_dim)
        layout = "batch heads slot channels"
        return [
            StateSpec("key", self.layer, shape, layout),
            StateSpec("value", self.layer, shape, layout),
        ]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        c = self.config
        names = (f"key.{self.layer}", f"value.{self.layer}")
        qkv = self.qkv_proj(x).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        qk, v = qkv.split([c.num_heads + c.num_kv_heads, c.num_kv_heads], dim=1)
        angles = rotary_angles(position, x.shape[1], self._frequencies(x.device))
        q, k = rotate(qk, angles[:, None]).split([c.num_heads, c.num_kv_heads], dim=1)
        rings = (state[names[0]], state[names[1]])
        attend = self._attend_ring if self._is_short(x) else self._attend_blocks
        o, rings = attend(q, k, v, rings, position)
        y = self.out_proj(o.transpose(1, 2).flatten(-2))
        return y, dict(zip(names, rings, strict=True))

    def _is_short(self, x: Tensor) -> bool:
        """Whether a call takes the form that serves T <= min(CHUNK, W), the exported one."""
        if is_exporting():
            if self.config.export_obstacle:
                raise EdgelinError(self.config.export_obstacle)
            return True
        return x.shape[1] <= min(CHUNK, self.config.window)

    def _frequencies(self, device: torch.device) -> Tensor:
        """theta^(-i / (D/2)), `[D / 2]` float64."""
        half = self.config.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float64, device=device) / half
        return torch.pow(self.config.rope_theta, -exponents)

    def _attend_ring(
        self, q: Tensor, k: Tensor, v: Tensor, rings: tuple[Tensor, Tensor], position: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """T <= W tokens: score the ring and the new keys apart, join before the softmax.

        q and o `[B, H, T, D]`, k and v `[B, Hkv, T, D]`, rings `[B, Hkv, W, D]`.
        """
        c, dtype, time = self.config, q.dtype, k.shape[2]
        k, v = k.to(rings[0].dtype), v.to(rings[1].dtype)
        # Gathered from CHUNK rows: an exported graph fails on a longer call, never answers.
        steps = torch.arange(time, device=q.device)
        steps = torch.arange(CHUNK, device=q.device).index_select(0, steps)
        # The G query heads of a key head are G T rows of one product.
        q = at_least_float32(q * c.head_dim**-0.5)
        q = q.unflatten(1, (c.num_kv_heads, self.group)).flatten(2, 3)
        scores = torch.cat([q @ rings[0].transpose(-1, -2), q @ k.transpose(-1, -2)], dim=-1)
        hidden = ~self._visible(position, steps)
        old, new = (
            scores.masked_fill(hidden, -torch.inf).softmax(-1).split([c.window, time], dim=-1)
        )
        o = (old @ rings[1] + new @ v).to(dtype)
        slots = torch.remainder(position[:, None] + steps, c.window)[:, None, :, None].expand_as(k)
        written = (rings[0].scatter(2, slots, k), rings[1].scatter(2, slots, v))
        return o.unflatten(2, (self.group, time)).flatten(1, 2), written

    def _visible(self, position: Tensor, steps: Tensor) -> Tensor:
        """Which slots of the ring and which new keys a row sees, `[B, 1, G T, W + T]` bool."""
        window = self.config.window
        rows = steps.repeat(self.group)[:, None]
        slots = torch.arange(window, device=position.device, dtype=torch.int64)
        # Tokens between a slot's and the next one; a slot not yet written gets age >= position.
        age = torch.remainder(position[:, None] - 1 - slots, window)
        written = (age < position[:, None])[:, None]
        old = (age[:, None] + rows < window - 1) & written
        new = (steps <= rows).expand(old.shape[0], -1, -1)
        return torch.cat([old, new], dim=-1)[:, None]

    def _attend_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, rings: tuple[Tensor, Tensor], position: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Any T: blocks of W queries, each against its own and the previous block of keys.

        Shapes as in :meth:`_attend_ring`. The ring in order of position is the block before the
        first. Memory is O(T W).
        """
        window, time = self.config.window, q.shape[2]
        blocks = -(-time // window)
        keys, key_ring = _extend(rings[0], k, position)
        values, value_ring = _extend(rings[1], v, position)
        q = F.pad(q, (0, 0, 0, blocks * window - time)).unflatten(2, (blocks, window))
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2).flatten(0, 1),
            self._block_pairs(keys, blocks),
            self._block_pairs(values, blocks),
            attn_mask=self._visible_keys(position, blocks),
        )
        o = o.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :time]
        return o, (key_ring, value_ring)

    def _block_pairs(self, line: Tensor, blocks: int) -> Tensor:
        """Blocks i and i + 1 of a line `[B, Hkv, W + T, D]`, for all i: `[B n, H, 2 W, D]`."""
        window = self.config.window
        line = F.pad(line, (0, 0, 0, (blocks + 1) * window - line.shape[2]))
        pairs = line.unfold(2, 2 * window, window).permute(0, 2, 1, 4, 3)
        return pairs.flatten(0, 1).repeat_interleave(self.group, dim=1)

    def _visible_keys(self, position: Tensor, blocks: int) -> Tensor:
        """Which of its 2 W keys each query of a block sees, `[B n, 1, W, 2 W]` bool."""
        window = self.config.window
        at = torch.arange(2 * window, device=position.device)
        row = at[:window, None]
        band = (at > row) & (at <= row + window)
        # Entry c of the line has position p - W + c; a negative one was never written.
        index = at + window * torch.arange(blocks, device=position.device)[:, None]
        written = index >= window - position[:, None, None]
        return (band & written[:, :, None]).flatten(0, 1)[:, None]


def _extend(ring: Tensor, fresh: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """The ring in order of position, then ``fresh`` `[B, Hkv, T, D]`; and the ring after it."""
    window, time = ring.shape[2], fresh.shape[2]
    slots = torch.arange(window, device=ring.device)
    oldest_first = torch.remainder(position[:, None] + slots, window)
    old = ring.gather(2, oldest_first[:, None, :, None].expand_as(ring))
    line = torch.cat([old.to(fresh.dtype), fresh], dim=2)
    # Position p goes to slot p mod W, so slot s takes entry (s - position - T) mod W of the tail.
    entry = torch.remainder(slots - position[:, None] - time, window)
    tail = line[:, :, time:].to(ring.dtype)
    return line, tail.gather(2, entry[:, None, :, None].expand_as(ring))
