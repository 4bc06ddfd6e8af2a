"""Mamba: a diagonal state-space layer whose step, input and output weights depend on the token.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t ;  y_t = W_out ((C_t h_t + D u_t) * silu(z_t))
    [u, z] = W_in x ;  u <- silu(conv(u) + b) ;  [d, B, C] = W_x u ;  dt = softplus(W_dt d + bias)

Every channel has N states and a step dt of its own; B and C are shared by all channels. A is
-exp(A_log), real; B is discretised by Euler's rule, dt B, as in the paper's code (its eq. 4 has
the zero-order hold, which is the same to first order in dt). Large models have an RMSNorm on each
of d, B and C, without which the loss spikes.

Sources: Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
arXiv:2312.00752, algorithm 2, sections 3.4 to 3.6 (A_n = -n, "S4D-Real"; dt of low rank). Norms:
Lieber et al. 2024, "Jamba", arXiv:2403.19887, section 6.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.initial import step_bias
from edgelin.layers import RMSNorm, at_least_float32, project_in_parts
from edgelin.mixers import check_sizes
from edgelin.recurrences.conv import short_convolution
from edgelin.recurrences.diagonal import diagonal
from edgelin.state import StateSpec


@dataclass(frozen=True)
class Config:
    """Sizes of the mixer.

    Args:
        inner_size: Channels D; the paper has twice the hidden size.
        state_size: States N of a channel.
        dt_rank: Inner width of the two projections that make dt (None: hidden size / 16, rounded
            up).
        conv_size: Taps of the short convolution, at least 2.
        bias: Whether the projections from and to the stream have a bias.
        conv_bias: Whether the convolution has one.
        inner_norm_eps: Of the norms of d, B and C; 0: there are none.
    """

    inner_size: int
    state_size: int = 16
    dt_rank: int | None = None
    conv_size: int = 4
    bias: bool = False
    conv_bias: bool = True
    inner_norm_eps: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "inner_size", "state_size")
        check_sizes(self, "conv_size", least=2)
        if self.dt_rank is not None:
            check_sizes(self, "dt_rank")
        if not 0 <= self.inner_norm_eps < 1:
            raise EdgelinError(
                f"inner_norm_eps is {self.inner_norm_eps}; give 0 for no norms, or a number below 1"
            )


class Mixer(nn.Module):
    """Mamba.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Not used; every mixer takes it.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        inner, size = config.inner_size, config.state_size
        rank = config.dt_rank or math.ceil(hidden_size / 16)
        self.sizes = [rank, size, size]
        self.in_proj = nn.Linear(hidden_size, 2 * inner, bias=config.bias)
        bound = config.conv_size**-0.5
        self.conv_weight = nn.Parameter(
            torch.empty(inner, config.conv_size).uniform_(-bound, bound)
        )
        conv_bias = nn.Parameter(torch.empty(inner).uniform_(-bound, bound))
        self.conv_bias = conv_bias if config.conv_bias else None
        self.x_proj = nn.Linear(inner, sum(self.sizes), bias=False)
        if config.inner_norm_eps:
            self.dt_norm, self.b_norm, self.c_norm = (
                RMSNorm(width, config.inner_norm_eps) for width in self.sizes
            )
        self.dt_proj = nn.Linear(rank, inner)
        n = torch.arange(1, size + 1, dtype=torch.float32)
        self.A_log = nn.Parameter(n.log().repeat(inner, 1))
        self.A_log.no_weight_decay = True  # type: ignore[attr-defined]
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, hidden_size, bias=config.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of dt that keep the variance, and steps log-uniform in [0.001, 0.1]."""
        bound = self.sizes[0] ** -0.5
        nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        with torch.no_grad():
            self.dt_proj.bias.copy_(step_bias(self.config.inner_size))

    def state_specs(self) -> list[StateSpec]:
        """The convolution's tail and h."""
        c = self.config
        conv = (c.inner_size, c.conv_size - 1)
        return [
            StateSpec("conv", self.layer, conv, "batch channels time"),
            StateSpec("ssm", self.layer, (c.inner_size, c.state_size), "batch channels state"),
        ]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        conv_name, ssm_name = f"conv.{self.layer}", f"ssm.{self.layer}"
        u, gate = project_in_parts(self.in_proj, x, [self.config.inner_size] * 2)
        u, conv = short_convolution(
            u, self.conv_weight, self.conv_bias, state[conv_name], lengths, activation="silu"
        )
        low, b, c = self.x_proj(u).split(self.sizes, dim=-1)
        if self.config.inner_norm_eps:
            low, b, c = self.dt_norm(low), self.b_norm(b), self.c_norm(c)
        # The bias comes after the cast: beside it, bfloat16 would round small steps away.
        dt = at_least_float32(F.linear(low, self.dt_proj.weight))
        dt = F.softplus(dt + at_least_float32(self.dt_proj.bias))
        g = dt[..., None] * -at_least_float32(self.A_log).exp()
        b, c = b[:, :, None], c[:, :, None]
        y, h = diagonal(dt * u, b, c, g, None, state[ssm_name], lengths)
        y = y + at_least_float32(self.D) * u
        y = (y * F.silu(gate)).to(gate.dtype)
        return self.out_proj(y), {conv_name: conv, ssm_name: h}
