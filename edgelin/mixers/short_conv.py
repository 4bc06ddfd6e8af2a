"""Gated short convolution (LFM2): a state of a few inputs, no recurrence.

    y_t = W_out (C_t * conv(B * u)_t) ;  [B, C, u] = W_in x

Both gates are linear; there is no activation. The convolution is causal and depthwise, over the
last K tokens, so that the state is the last K - 1 products B * u.

Source: Liquid AI 2025, "LFM2 Technical Report", arXiv:2511.23404, section 2 (the gated short
convolution block).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgelin.layers import project_in_parts
from edgelin.mixers import check_sizes
from edgelin.recurrences.conv import short_convolution
from edgelin.state import StateSpec


@dataclass(frozen=True)
class Config:
    """Sizes of the mixer, which has as many channels as the stream.

    Args:
        conv_size: Taps K of the convolution, at least 2.
        bias: Whether both projections and the convolution add a bias.
    """

    conv_size: int = 3
    bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "conv_size", least=2)


class Mixer(nn.Module):
    """Gated short convolution.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the state.
        norm_eps: Not used; every mixer takes it.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer, self.hidden_size = config, layer, hidden_size
        self.in_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=config.bias)
        bound = config.conv_size**-0.5
        self.conv_weight = nn.Parameter(
            torch.empty(hidden_size, config.conv_size).uniform_(-bound, bound)
        )
        self.conv_bias = nn.Parameter(torch.zeros(hidden_size)) if config.bias else None
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=config.bias)

    def state_specs(self) -> list[StateSpec]:
        """The convolution's tail."""
        shape = (self.hidden_size, self.config.conv_size - 1)
        return [StateSpec("conv", self.layer, shape, "batch channels time")]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        name = f"conv.{self.layer}"
        b, c, u = project_in_parts(self.in_proj, x, [self.hidden_size] * 3)
        y, tail = short_convolution(b * u, self.conv_weight, self.conv_bias, state[name], lengths)
        return self.out_proj(c * y), {name: tail}
