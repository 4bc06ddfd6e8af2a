"""Softmax attention with grouped heads, over all tokens or over a sliding window.

    o_t = sum_s softmax_s(q_t . k_s / sqrt(D)) v_s,   q and k rotated

With a window W a token sees the last W tokens, itself included, and the first M, the sinks: its
state is a ring of fixed size (:mod:`edgelin.attention_ring`). Without one it sees all tokens, and
its state, the keys and values of them all, grows with every token.

Attention: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; grouped heads: Ainslie et al. 2023,
arXiv:2305.13245; rotation: Su et al. 2021, arXiv:2104.09864, eq. 34; norms of queries and keys:
Henry et al. 2020, arXiv:2010.04245 (a head), Team OLMo 2024, arXiv:2501.00656, section 3.2 (all
heads); gated output: Qiu et al. 2025, arXiv:2505.06708, eq. 5.

Glossary: W window, M sinks, D head width, R rotated dimensions, H query heads, G query heads a key
head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from edgelin.attention_ring import Ring
from edgelin.errors import EdgelinError
from edgelin.layers import RMSNorm, at_least_float32, project_aligned, rotary_angles, rotate
from edgelin.mixers import check_sizes
from edgelin.recurrences import CHUNK
from edgelin.recurrences.exporting import is_exporting
from edgelin.state import GROWING, StateSpec

_ONE_LENGTH = (
    "rows of different lengths need states of fixed size, and that of attention to all tokens "
    "grows; give it a window"
)


@dataclass(frozen=True)
class Config:
    """Sizes of the mixer.

    Args:
        num_heads: Query heads H.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Width D of a head.
        window: Tokens W that a token sees, itself included; 0: all, with a state that grows.
        sinks: First tokens M that every token sees besides its window.
        rope_theta: Base of the rotary frequencies.
        rotary_dim: Leading dimensions R of a head that are rotated, even; None: all, 0: none.
        qk_norm: Whether queries and keys are normalised, a head at a time, before the rotation.
        joint_qk_norm: Whether they are instead over all heads together.
        gate: Whether the output of every head is multiplied by a sigmoid gate of the token, a
            number a channel.
        head_gate: The same with one number a head.
        bias: Whether the projection of queries, keys, values and gates has a bias.
        out_bias: Whether the output projection has one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    sinks: int = 0
    rope_theta: float = 10000.0
    rotary_dim: int | None = None
    qk_norm: bool = False
    joint_qk_norm: bool = False
    gate: bool = False
    head_gate: bool = False
    bias: bool = False
    out_bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "num_kv_heads", "head_dim")
        check_sizes(self, "window", "sinks", least=0)
        if self.num_heads % self.num_kv_heads:
            raise EdgelinError(
                f"num_heads is {self.num_heads}, no multiple of num_kv_heads = "
                f"{self.num_kv_heads}; change one of them"
            )
        if self.rotary_dim is None and self.head_dim % 2:
            raise EdgelinError(
                f"head_dim is {self.head_dim}; rotary position needs an even one, or an even "
                f"rotary_dim below it"
            )
        if self.rotated % 2 or not 0 <= self.rotated <= self.head_dim:
            raise EdgelinError(
                f"rotary_dim is {self.rotated}; give an even number from 0 to head_dim = "
                f"{self.head_dim}"
            )
        if not self.rope_theta > 0:
            raise EdgelinError(f"rope_theta is {self.rope_theta}; it must be above 0")
        if self.qk_norm and self.joint_qk_norm:
            raise EdgelinError("qk_norm and joint_qk_norm are both set; choose one of them")
        if self.sinks and not self.window:
            raise EdgelinError(
                f"sinks is {self.sinks} without a window, where every token is seen anyway; "
                f"set a window, or leave sinks out"
            )

    @property
    def rotated(self) -> int:
        """Dimensions R of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def export_obstacle(self) -> str | None:
        """Why a mixer of these sizes can't be exported; None: it can."""
        if not self.window or self.window >= CHUNK:
            return None
        return (
            f"an attention window of {self.window} can't be exported: calls carry up to "
            f"{CHUNK} tokens, all of which it has to hold; export models with a window of {CHUNK} "
            f"or more"
        )


class Mixer(nn.Module):
    """Softmax attention.

    Args:
        config: Sizes.
        hidden_size: Width of what it reads, the residual stream.
        layer: Index that names the states.
        norm_eps: Of the norms of queries and keys.
        output_size: Width of what it gives; None: as wide as what it reads.
    """

    needs_position = True

    def __init__(
        self,
        config: Config,
        hidden_size: int,
        layer: int,
        norm_eps: float,
        *,
        output_size: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.group = config.num_heads // config.num_kv_heads
        c = config
        heads = c.num_heads * (1 + c.gate) + 2 * c.num_kv_heads
        self.qkv_proj = nn.Linear(hidden_size, heads * c.head_dim, bias=c.bias)
        if c.head_gate:
            self.gate_proj = nn.Linear(hidden_size, c.num_heads, bias=False)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, norm_eps)
            self.k_norm = RMSNorm(c.head_dim, norm_eps)
        if c.joint_qk_norm:
            self.q_norm = RMSNorm(c.num_heads * c.head_dim, norm_eps)
            self.k_norm = RMSNorm(c.num_kv_heads * c.head_dim, norm_eps)
        output = hidden_size if output_size is None else output_size
        self.out_proj = nn.Linear(c.num_heads * c.head_dim, output, bias=c.out_bias)

    def state_specs(self) -> list[StateSpec]:
        """The rings, or the growing rows, of keys and values."""
        c = self.config
        slots = c.sinks + c.window if c.window else GROWING
        layout = f"batch heads {'slot' if c.window else 'token'} channels"
        return [
            StateSpec(kind, self.layer, (c.num_kv_heads, slots, c.head_dim), layout)
            for kind in ("key", "value")
        ]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        c = self.config
        names = (f"key.{self.layer}", f"value.{self.layer}")
        rows = self.qkv_proj(x)
        if c.joint_qk_norm:
            rows = self._jointly_normalised(rows)
        projected = rows.unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        sizes = [c.num_heads + c.num_kv_heads, c.num_kv_heads, c.num_heads]
        qk, v, *gate = projected.split(sizes if c.gate else sizes[:2], dim=1)
        q, k = self._positioned(qk, position).split([c.num_heads, c.num_kv_heads], dim=1)
        cache = (state[names[0]], state[names[1]])
        if c.window:
            ring = Ring(c.window, c.sinks, self.group)
            attend = ring.attend_short if self._is_short(x.shape[1]) else ring.attend_blocks
            o, cache = attend(q, k, v, cache, position, lengths)
        else:
            if lengths is not None:
                raise EdgelinError(_ONE_LENGTH)
            o, cache = self._attend_all(q, k, v, cache)
        if c.gate:
            o = o * torch.sigmoid(gate[0])
        if c.head_gate:
            o = o * torch.sigmoid(project_aligned(self.gate_proj, x)).transpose(1, 2)[..., None]
        y = self.out_proj(o.transpose(1, 2).flatten(-2))
        return y, dict(zip(names, cache, strict=True))

    def _jointly_normalised(self, rows: Tensor) -> Tensor:
        """What ``qkv_proj`` gives with its queries and its keys normalised."""
        queries, keys = self.q_norm.size, self.k_norm.size
        q, k, rest = rows.split([queries, keys, rows.shape[-1] - queries - keys], dim=-1)
        return torch.cat([self.q_norm(q), self.k_norm(k), rest], dim=-1)

    def _positioned(self, qk: Tensor, position: Tensor) -> Tensor:
        """Queries and keys `[B, H + Hkv, T, D]`, normalised and rotated."""
        c = self.config
        if c.qk_norm:
            q, k = qk.split([c.num_heads, c.num_kv_heads], dim=1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        if not c.rotated:
            return qk
        exponents = torch.arange(c.rotated // 2, dtype=torch.float64, device=qk.device)
        frequencies = torch.pow(c.rope_theta, -exponents / (c.rotated // 2))
        angles = rotary_angles(position, qk.shape[2], frequencies)[:, None]
        if c.rotated == c.head_dim:
            return rotate(qk, angles)
        turning, still = qk.split([c.rotated, c.head_dim - c.rotated], dim=-1)
        return torch.cat([rotate(turning, angles), still], dim=-1)

    def _is_short(self, time: int) -> bool:
        """Whether a call takes the form that serves T <= min(CHUNK, W), the exported one."""
        if is_exporting():
            if self.config.export_obstacle:
                raise EdgelinError(self.config.export_obstacle)
            return True
        return time <= min(CHUNK, self.config.window or CHUNK)

    def _attend_all(
        self, q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """All tokens; q `[B, H, T, D]`, k and v `[B, Hkv, T, D]`, cache `[B, Hkv, past, D]`."""
        old_keys, old_values = cache
        past, time = old_keys.shape[2], q.shape[2]
        keys = torch.cat([old_keys, k.to(old_keys.dtype)], dim=2)
        values = torch.cat([old_values, v.to(old_values.dtype)], dim=2)
        if self._is_short(time):
            return self._attend_rows(q, keys, values, past), (keys, values)
        if past:  # else k and v are all there is, and stay in their own dtype
            k, v = keys.to(q.dtype), values.to(q.dtype)
        o = F.scaled_dot_product_attention(
            q,
            k.repeat_interleave(self.group, dim=1),
            v.repeat_interleave(self.group, dim=1),
            attn_mask=causal_lower_right(time, past + time) if past else None,
            is_causal=not past,
        )
        return o, (keys, values)

    def _attend_rows(self, q: Tensor, keys: Tensor, values: Tensor, past: int) -> Tensor:
        """T <= CHUNK tokens, the form that is exported; shapes as in :meth:`_attend_all`."""
        c, dtype, time = self.config, q.dtype, q.shape[2]
        # Gathered from CHUNK rows: an exported graph fails on a longer call, never answers.
        steps = torch.arange(time, device=q.device)
        steps = torch.arange(CHUNK, device=q.device).index_select(0, steps)
        # The G query heads of a key head are G T rows of one product.
        q = at_least_float32(q * c.head_dim**-0.5)
        scores = q.unflatten(1, (c.num_kv_heads, self.group)).flatten(2, 3) @ keys.mT
        last = past + steps.repeat(self.group)[:, None]
        later = torch.arange(past + time, device=q.device) > last
        o: Tensor = scores.masked_fill(later, -torch.inf).softmax(-1) @ values
        o = o.unflatten(2, (self.group, time)).flatten(1, 2).to(dtype)
        return o
