"""Gated linear attention: a data-dependent decay for every key channel.

    S_t = Diag(alpha_t) S_{t-1} + k_t v_t^T ;  o_t = S_t^T q_t / sqrt(K)
    log alpha_t = log sigmoid(x_t W1 W2 + b) / 16 ;  y_t = (RMSNorm(o_t) * silu(gate_t)) W_o

Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2024),
arXiv:2312.06635, eq. 3 and section 4.4 (gate of low rank, temperature 16, output gate).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.layers import GatedRMSNorm, at_least_float32, project_in_parts
from edgelin.mixers import HeadSizes
from edgelin.recurrences.linear import linear
from edgelin.state import StateSpec

_TEMPERATURE = 16.0


@dataclass(frozen=True)
class Config(HeadSizes):
    """Sizes of the mixer.

    Args:
        decay_rank: Inner width of the two projections that make the decay.
    """

    decay_rank: int = 16


class Mixer(nn.Module):
    """Gated linear attention.

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
        self.sizes = [key_size, key_size, value_size, value_size]
        self.qkv_gate_proj = nn.Linear(hidden_size, sum(self.sizes), bias=False)
        self.decay_in_proj = nn.Linear(hidden_size, config.decay_rank, bias=False)
        self.decay_out_proj = nn.Linear(config.decay_rank, key_size)
        self.norm = GatedRMSNorm(config.value_dim, norm_eps)
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
        parts = project_in_parts(self.qkv_gate_proj, x, self.sizes)
        q, k, v, gate = (part.unflatten(-1, (c.num_heads, -1)) for part in parts)
        decay = at_least_float32(self.decay_out_proj(self.decay_in_proj(x)))
        # -softplus(-x) is log sigmoid(x), and stays finite in the exported graph.
        g = F.softplus(-decay) / -_TEMPERATURE
        g = g.unflatten(-1, (c.num_heads, c.key_dim))
        o, after = linear(q, k, v, g, state[name], scale=c.key_dim**-0.5, lengths=lengths)
        return self.out_proj(self.norm(o, gate).flatten(-2)), {name: after}
