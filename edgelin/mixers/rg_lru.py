"""RG-LRU (Griffin, Hawk): a gated linear recurrence, one number a channel.

    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t * u_t) ;  y_t = W_out (h_t * gelu(z_t))
    [u, z] = W_in x ;  u <- conv(u) + b ;  log a_t = -8 r_t softplus(Lambda)
    r_t = sigmoid(W_r u_t + b_r) ;  i_t = sigmoid(W_i u_t + b_i)

W_r and W_i are block-diagonal. A stream begins with h = 0, and in the paper nothing depends on the
position; the published models give the token at position 0 the factor 1 in the place of
sqrt(1 - a^2) (``unit_first``), and have biases in W_in and W_out.

Source: De et al. 2024, "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
Language Models", arXiv:2402.19427, eq. 1 to 4 and 6, sections 2.3 and 2.4 (Lambda such that a^8 is
uniform in [0.9, 0.999] where r = 1), appendix A (log space).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.initial import softplus_inverse
from edgelin.layers import at_least_float32, project_in_parts
from edgelin.mixers import check_sizes
from edgelin.recurrences.conv import short_convolution
from edgelin.recurrences.diagonal import diagonal
from edgelin.state import StateSpec

_POWER = 8.0  # the paper's c
_LEAST = 1e-30  # keeps the gradient of the root finite; a^2 differs from 1 by more, or not at all


@dataclass(frozen=True)
class Config:
    """Sizes of the mixer.

    Args:
        inner_size: Channels D; the paper has 4/3 of the hidden size.
        num_blocks: Blocks of the gates' matrices; divides D. The published models have one a head
            of their attention.
        conv_size: Taps of the short convolution, at least 2.
        bias: Whether the projections from and to the stream have a bias.
        unit_first: Whether the token at position 0 is written unscaled.
    """

    inner_size: int
    num_blocks: int = 1
    conv_size: int = 4
    bias: bool = False
    unit_first: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "inner_size", "num_blocks")
        check_sizes(self, "conv_size", least=2)
        if self.inner_size % self.num_blocks:
            raise EdgelinError(
                f"inner_size is {self.inner_size}, no multiple of num_blocks = {self.num_blocks}; "
                "give a multiple"
            )


class Mixer(nn.Module):
    """Griffin's recurrent block.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Not used; every mixer takes it.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.needs_position = config.unit_first
        inner, blocks = config.inner_size, config.num_blocks
        width = inner // blocks
        self.in_gate_proj = nn.Linear(hidden_size, 2 * inner, bias=config.bias)
        bound = config.conv_size**-0.5
        self.conv_weight = nn.Parameter(
            torch.empty(inner, config.conv_size).uniform_(-bound, bound)
        )
        self.conv_bias = nn.Parameter(torch.zeros(inner))
        # the blocks of W_r, then those of W_i, transposed
        self.decay_weight = nn.Parameter(torch.randn(2, blocks, width, width) * width**-0.5)
        self.decay_bias = nn.Parameter(torch.zeros(2 * inner))
        radius = torch.empty(inner).uniform_(0.9, 0.999)
        self.Lambda = nn.Parameter(softplus_inverse(-radius.log() / _POWER))
        self.out_proj = nn.Linear(inner, hidden_size, bias=config.bias)

    def state_specs(self) -> list[StateSpec]:
        """The convolution's tail and h."""
        c = self.config
        conv = (c.inner_size, c.conv_size - 1)
        return [
            StateSpec("conv", self.layer, conv, "batch channels time"),
            StateSpec("ssm", self.layer, (c.inner_size, 1), "batch channels state"),
        ]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        conv_name, ssm_name = f"conv.{self.layer}", f"ssm.{self.layer}"
        u, gate = project_in_parts(self.in_gate_proj, x, [self.config.inner_size] * 2)
        u, conv = short_convolution(u, self.conv_weight, self.conv_bias, state[conv_name], lengths)
        r, i = self._gates(u).chunk(2, dim=-1)
        loss = r * (_POWER * F.softplus(at_least_float32(self.Lambda)))  # -log a
        # 1 - a^2 by t = tanh(-log a): 1 - exp() loses its digits near 0, and ONNX has no expm1.
        t = torch.tanh(loss)
        factor = (2 * t / (1 + t)).clamp(min=_LEAST).sqrt()
        if self.config.unit_first:
            tokens = position[:, None] + torch.arange(x.shape[1], device=x.device)
            factor = factor.masked_fill((tokens == 0)[..., None], 1.0)
        one = torch.ones(self.config.inner_size, 1, dtype=loss.dtype, device=x.device)
        b, g = (v.unflatten(-1, one.shape) for v in (factor, -loss))
        h, last = diagonal(i * u, b, one, g, None, state[ssm_name], lengths)
        y = (h * F.gelu(gate, approximate="tanh")).to(gate.dtype)
        return self.out_proj(y), {conv_name: conv, ssm_name: last}

    def _gates(self, u: Tensor) -> Tensor:
        """r, then i: `[B, T, 2 D]` float32."""
        batch, time, size = u.shape
        blocks = u.reshape(batch * time, self.config.num_blocks, -1).transpose(0, 1)
        gates = (blocks @ self.decay_weight).permute(2, 0, 1, 3).reshape(batch, time, 2 * size)
        return (at_least_float32(gates) + at_least_float32(self.decay_bias)).sigmoid()
