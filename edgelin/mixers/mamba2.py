"""Mamba-2 (SSD): linear attention whose decay is one number a head, made of the token's step dt.

    S_t = exp(dt_t A) S_{t-1} + B_t (dt_t u_t)^T ;  o_t = S_t^T C_t + D u_t
    y_t = W_out RMSNorm(o_t * silu(z_t)) ;  dt = softplus(W_dt x + dt_bias)
    [z, u, B, C] = W_in x ;  [u, B, C] <- silu(conv([u, B, C]) + b)

A head has P channels (u_t, the values) and N states (B_t the key, C_t the query); H / G heads share
one B and C, and the norm has a mean square for each of the G groups. A = -exp(A_log) and D are
numbers a head. Published models differ in biases, in limits of dt and in the order of norm and
gate.

Source: Dao and Gu 2024, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
Structured State Space Duality", arXiv:2405.21060, eq. 1, section 7 (parallel projections, groups
of heads, norm behind the gate).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.initial import step_bias
from edgelin.layers import (
    GroupedGatedRMSNorm,
    at_least_float32,
    project_aligned,
    project_in_parts,
)
from edgelin.mixers import check_sizes
from edgelin.recurrences.conv import short_convolution
from edgelin.recurrences.linear import linear
from edgelin.state import StateSpec

NORMS = ("after_gate", "before_gate", "none")


@dataclass(frozen=True)
class Config:
    """Sizes of the mixer.

    Args:
        num_heads: Heads H.
        head_dim: Channels P of a head.
        state_size: States N.
        num_groups: Groups G of heads that share B and C; divides H.
        conv_size: Taps of the short convolution, at least 2.
        norm: Between o_t and ``out_proj``: ``after_gate``, RMSNorm(o * silu(z)); ``before_gate``,
            RMSNorm(o) * silu(z); ``none``, o * silu(z).
        bias: Whether ``in_proj`` has a bias (that of the step is ``dt_bias``).
        out_bias: Whether ``out_proj`` has a bias.
        conv_bias: Whether the convolution has a bias.
        min_dt: Least dt.
        max_dt: Largest dt; None: no limit.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    conv_size: int = 4
    norm: str = "after_gate"
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    min_dt: float = 0.0
    max_dt: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "head_dim", "state_size", "num_groups")
        check_sizes(self, "conv_size", least=2)
        if self.num_heads % self.num_groups:
            raise EdgelinError(
                f"num_heads is {self.num_heads}, no multiple of num_groups = {self.num_groups}; "
                "give a multiple"
            )
        if self.norm not in NORMS:
            raise EdgelinError(f"norm is {self.norm!r}; allowed: {', '.join(NORMS)}")
        if not 0 <= self.min_dt <= (self.max_dt if self.max_dt is not None else math.inf):
            raise EdgelinError(
                f"min_dt is {self.min_dt} and max_dt {self.max_dt}; give 0 or more, and no min_dt "
                f"above max_dt"
            )


class Mixer(nn.Module):
    """Mamba-2.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Added to the mean square in the output norm.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads = config.num_heads
        self.inner_size = heads * config.head_dim
        self.group_size = config.num_groups * config.state_size
        self.conv_channels = self.inner_size + 2 * self.group_size
        self.in_proj = nn.Linear(hidden_size, self.inner_size + self.conv_channels, config.bias)
        bound = config.conv_size**-0.5
        self.conv_weight = nn.Parameter(
            torch.empty(self.conv_channels, config.conv_size).uniform_(-bound, bound)
        )
        self.conv_bias = None
        if config.conv_bias:
            self.conv_bias = nn.Parameter(torch.empty(self.conv_channels).uniform_(-bound, bound))
        self.dt_proj = nn.Linear(hidden_size, heads, bias=False)
        self.dt_bias = nn.Parameter(step_bias(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))
        if config.norm != "none":
            self.norm = GroupedGatedRMSNorm(
                self.inner_size,
                config.num_groups,
                norm_eps,
                gate_first=config.norm == "after_gate",
            )
        self.out_proj = nn.Linear(self.inner_size, hidden_size, bias=config.out_bias)

    def state_specs(self) -> list[StateSpec]:
        """The convolution's tail and S."""
        c = self.config
        conv = (self.conv_channels, c.conv_size - 1)
        matrix = (c.num_heads, c.state_size, c.head_dim)
        return [
            StateSpec("conv", self.layer, conv, "batch channels time"),
            StateSpec("recurrent", self.layer, matrix, "batch heads key value"),
        ]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        c = self.config
        conv_name, recurrent_name = f"conv.{self.layer}", f"recurrent.{self.layer}"
        sizes = [self.inner_size, self.conv_channels]
        gate, u = project_in_parts(self.in_proj, x, sizes)
        u, conv = short_convolution(
            u, self.conv_weight, self.conv_bias, state[conv_name], lengths, activation="silu"
        )
        u, groups = u.split([self.inner_size, 2 * self.group_size], dim=-1)
        u = u.unflatten(-1, (c.num_heads, c.head_dim))
        dt = at_least_float32(project_aligned(self.dt_proj, x)) + at_least_float32(self.dt_bias)
        dt = F.softplus(dt)
        if c.min_dt > 0 or c.max_dt is not None:
            dt = dt.clamp(c.min_dt, c.max_dt)
        g = -at_least_float32(self.A_log).exp() * dt
        v = (dt[..., None] * u).to(u.dtype)
        keys, queries = self._by_head(groups)
        o, after = linear(queries, keys, v, g, state[recurrent_name], lengths=lengths)
        o = o + self.D.to(u.dtype)[:, None] * u
        o = o.flatten(-2)
        y = o * F.silu(gate) if c.norm == "none" else self.norm(o, gate)
        return self.out_proj(y), {conv_name: conv, recurrent_name: after}

    def _by_head(self, groups: Tensor) -> tuple[Tensor, ...]:
        """B and C `[B, T, 2 G N]` for every head, each `[B, T, H, N]`."""
        c = self.config
        each = groups.unflatten(-1, (2 * c.num_groups, 1, c.state_size))
        shared = each.expand(-1, -1, -1, c.num_heads // c.num_groups, -1).flatten(2, 3)
        parts: tuple[Tensor, ...] = shared.chunk(2, dim=2)
        return parts
