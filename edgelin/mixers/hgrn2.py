"""HGRN2: a forget gate with a lower bound, whose complement is the key.

    S_t = Diag(f_t) S_{t-1} + (1 - f_t) v_t^T ;  o_t = S_t^T q_t / sqrt(K)
    f_t = l + (1 - l) sigmoid(x_t W_f) ;  q_t = silu(x_t W_q) ;  v_t = x_t W_v
    y_t = RMSNorm(o_t) W_o, normalised over all heads at once

Source: Qin et al., "HGRN2: Gated Linear RNNs with State Expansion" (2024), arXiv:2404.07904,
section 3.2; silu and RMSNorm as in the flash-linear-attention code. The paper learns the bounds l,
a channel each, as the running sum over layers of a softmax: 0 in the first layer, rising with
depth. A mixer here knows its own layer only, so its configuration says where its bounds start; they
are learned from there, and nothing keeps them above those of the layer below. A bound that starts
at 0 stays 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.layers import RMSNorm, at_least_float32, project_in_parts
from edgelin.mixers import HeadSizes, check_eps
from edgelin.recurrences.linear import linear
from edgelin.state import StateSpec


@dataclass(frozen=True)
class Config(HeadSizes):
    """Sizes of the mixer.

    Args:
        lower_bound: Initial lower bound of the forget gates, in [0, 1); the paper's is about
            i / L in layer i = 0, 1, ... of L.
        norm_eps: Added to the mean square in the output norm; None: the model's.
    """

    lower_bound: float = 0.0
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self, "norm_eps")
        if not 0 <= self.lower_bound < 1:
            raise EdgelinError(
                f"lower_bound is {self.lower_bound}; give a number from 0 to below 1"
            )


class Mixer(nn.Module):
    """HGRN2.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Added to the mean square in the output norm.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        key_size, value_size = (config.num_heads * n for n in (config.key_dim, config.value_dim))
        self.sizes = [key_size, value_size]
        self.qv_proj = nn.Linear(hidden_size, key_size + value_size, bias=False)
        self.decay_proj = nn.Linear(hidden_size, key_size, bias=False)
        bound = config.lower_bound
        if bound > 0:
            logit = math.log(bound) - math.log1p(-bound)
            self.lower_bound_logit = nn.Parameter(torch.full((key_size,), logit))
        self.norm = RMSNorm(value_size, config.norm_eps or norm_eps)
        self.out_proj = nn.Linear(value_size, hidden_size, bias=False)

    def state_specs(self) -> list[StateSpec]:
        """S."""
        return [self.config.matrix_spec(self.layer)]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        c = self.config
        name = f"recurrent.{self.layer}"
        q, v = project_in_parts(self.qv_proj, x, self.sizes)
        k, g = self._gates(x)
        q, k, v, g = (a.unflatten(-1, (c.num_heads, -1)) for a in (F.silu(q), k.to(v.dtype), v, g))
        o, after = linear(q, k, v, g, state[name], scale=c.key_dim**-0.5, lengths=lengths)
        return self.out_proj(self.norm(o.flatten(-2))), {name: after}

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """1 - f and log f, both `[B, T, H * K]` float32.

        With a = -x W_f and b the logit of l, log f is softplus(a + log l) - softplus(a) and 1 - f
        is sigmoid(a) sigmoid(-b): no exponential overflows, and no 1 - f or log of a rounded f.
        """
        a = -at_least_float32(self.decay_proj(x))
        k, g = a.sigmoid(), -F.softplus(a)
        if self.config.lower_bound > 0:
            b = at_least_float32(self.lower_bound_logit)
            k = k * (-b).sigmoid()
            g = g + F.softplus(a - F.softplus(-b))
        return k, g
