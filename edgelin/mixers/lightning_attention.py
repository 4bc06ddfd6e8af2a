"""Lightning attention (TransNormerLLM, MiniMax-01): linear attention with a fixed decay a head.

    S_t = exp(-s_h) S_{t-1} + k_t v_t^T ;  o_t = S_t^T q_t ;  s_h = decay_scale 2^(-8 (h + 1) / H)
    q, k, v = silu(x W_q), silu(x W_k), silu(x W_v) ;  y_t = (RMSNorm(o_t) * sigmoid(x_t W_g)) W_o

The norm is over all heads together, h counts them from 0, and nothing is rotated. Sources: Qin et
al., "TransNormerLLM" (2023), arXiv:2307.14995, section 3.1 (the decay, less in deeper layers: give
each layer its ``decay_scale``); MiniMax, "MiniMax-01" (2025), arXiv:2501.08313, section 2.2 (the
activation of all three, and the gate).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.layers import RMSNorm, project_in_parts
from edgelin.mixers import HeadSizes, check_eps
from edgelin.recurrences.linear import linear
from edgelin.state import StateSpec


@dataclass(frozen=True)
class Config(HeadSizes):
    """Sizes of the mixer.

    Args:
        decay_scale: Factor on every head's rate of decay.
        norm_eps: Added to the mean square in the output norm; None: the model's.
    """

    decay_scale: float = 1.0
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self, "norm_eps")
        if not 0 <= self.decay_scale < math.inf:
            raise EdgelinError(f"decay_scale is {self.decay_scale}; give a number of 0 or more")


class Mixer(nn.Module):
    """Lightning attention.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Added to the mean square in the output norm, unless the config has its own.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        keys, values = (config.num_heads * n for n in (config.key_dim, config.value_dim))
        self.sizes = [keys, keys, values, values]
        self.qkv_gate_proj = nn.Linear(hidden_size, sum(self.sizes), bias=False)
        self.norm = RMSNorm(values, norm_eps if config.norm_eps is None else config.norm_eps)
        self.out_proj = nn.Linear(values, hidden_size, bias=False)

    def state_specs(self) -> list[StateSpec]:
        """S."""
        return [self.config.matrix_spec(self.layer)]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        name = f"recurrent.{self.layer}"
        *qkv, gate = project_in_parts(self.qkv_gate_proj, x, self.sizes)
        q, k, v = (F.silu(part).unflatten(-1, (self.config.num_heads, -1)) for part in qkv)
        g = self._log_decay(state[name]).expand(*x.shape[:2], -1)
        o, after = linear(q, k, v, g, state[name], lengths=lengths)
        return self.out_proj(self.norm(o.flatten(-2)) * gate.sigmoid()), {name: after}

    def _log_decay(self, like: Tensor) -> Tensor:
        """-s, `[H]`; computed, not stored, so that no cast of the weights rounds it."""
        heads = self.config.num_heads
        places = torch.arange(1, heads + 1, dtype=torch.float64, device=like.device)
        return (-self.config.decay_scale * torch.exp2(-8 * places / heads)).to(like.dtype)
