"""Multi-scale retention: every head forgets at its own fixed rate.

    S_t = gamma_h S_{t-1} + k_t v_t^T ;  o_t = S_t^T q_t / sqrt(K) ;  gamma_h = 1 - 2^(-5 - h)
    y_t = (RMSNorm(o_t) * silu(gate_t)) W_o

q and k are rotated by their position with angles theta_i = 10000^(-i / (K/2 - 1)). Source: Sun et
al., "Retentive Network" (2023), arXiv:2307.08621, eq. 5 to 8. The paper's GroupNorm over heads is
an RMSNorm a head, which makes its normalisation of the decayed scores unnecessary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgelin.errors import EdgelinError
from edgelin.layers import GatedRMSNorm, project_in_parts, rotary_angles, rotate
from edgelin.mixers import HeadSizes
from edgelin.recurrences.linear import linear
from edgelin.state import StateSpec

_THETA = 10000.0


@dataclass(frozen=True)
class Config(HeadSizes):
    """Sizes of the mixer; key_dim is even.

    Args:
        rope: Whether the angles are those of RoPE, theta_i = 10000^(-2 i / K), as in the
            flash-linear-attention code, and not the paper's.
    """

    rope: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_dim % 2:
            raise EdgelinError(f"key_dim is {self.key_dim}; rotary position needs an even one")


class Mixer(nn.Module):
    """Multi-scale retention.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Added to the mean square in the output norm.
    """

    needs_position = True

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads = config.num_heads
        value_size = heads * config.value_dim
        self.sizes = [2 * heads * config.key_dim, value_size, value_size]
        self.qkv_gate_proj = nn.Linear(hidden_size, sum(self.sizes), bias=False)
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
        qk, v, gate = project_in_parts(self.qkv_gate_proj, x, self.sizes)
        qk = qk.unflatten(-1, (2 * c.num_heads, c.key_dim))
        angles = rotary_angles(position, x.shape[1], self._frequencies(x.device))
        q, k = rotate(qk, angles[:, :, None]).chunk(2, dim=2)
        v = v.unflatten(-1, (c.num_heads, c.value_dim))
        g = self._log_decay(state[name]).expand(*x.shape[:2], -1)
        o, after = linear(q, k, v, g, state[name], scale=c.key_dim**-0.5, lengths=lengths)
        o = self.norm(o, gate.unflatten(-1, (c.num_heads, c.value_dim)))
        return self.out_proj(o.flatten(-2)), {name: after}

    def _frequencies(self, device: torch.device) -> Tensor:
        """theta, `[K / 2]` float64."""
        half = self.config.key_dim // 2
        last = half if self.config.rope else max(half - 1, 1)
        exponents = torch.arange(half, dtype=torch.float64, device=device) / last
        return torch.pow(_THETA, -exponents)

    def _log_decay(self, like: Tensor) -> Tensor:
        """log gamma, `[H]`; computed, not stored, so that no cast of the weights rounds it."""
        heads = torch.arange(self.config.num_heads, dtype=torch.float64, device=like.device)
        return torch.log1p(-torch.exp2(-5 - heads)).to(like.dtype)
