"""mLSTM, the matrix memory of xLSTM: an exponential input gate and a forget gate, a number a head.

    C_t = sigmoid(f_t) C_{t-1} + exp(i_t) k_t v_t^T ;  n_t = sigmoid(f_t) n_{t-1} + exp(i_t) k_t
    h_t = (C_t^T q_t / sqrt(K)) / max(|n_t . q_t| / sqrt(K), 1)
    y_t = (LayerNorm_head(h_t) * sigmoid(o_t)) W_out ;  i_t, f_t = cap tanh((W x_t + b) / cap)

Kept are exp(-m_t) C_t and exp(-m_t) n_t, with m_t = max(m_{t-1} + log sigmoid(f_t), i_t), which
never overflow; the 1 becomes exp(-m_t), to which the published code adds epsilon.

Sources: Beck et al., "xLSTM: Extended Long Short-Term Memory" (2024), arXiv:2405.04517, eq. 15 to
27; Beck et al., "xLSTM 7B" (2025), arXiv:2503.13427, section 3 (caps, no convolution, initial
values).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.layers import HeadLayerNorm, at_least_float32, project_aligned, project_in_parts
from edgelin.mixers import HeadSizes, check_eps
from edgelin.recurrences.linear import linear
from edgelin.recurrences.running_max import stabilised
from edgelin.state import StateSpec

_MOST_CAP = 60.0  # exp(-m) and exp(m) stay finite in float32, with room for products


@dataclass(frozen=True)
class Config(HeadSizes):
    """Sizes of the mixer.

    Args:
        gate_softcap: Bound of the input and the forget gate before their exponentials.
        bias: Whether the projections have biases (those of the two gates have one in any case).
        eps: Added to the denominator.
        norm_eps: Added to the variance in the output norm; None: the model's.
    """

    gate_softcap: float = 15.0
    bias: bool = False
    eps: float = 1e-6
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("eps", "norm_eps"):
            check_eps(self, name)
        if not 0 < self.gate_softcap <= _MOST_CAP:
            raise EdgelinError(
                f"gate_softcap is {self.gate_softcap}; it must be above 0 and at most {_MOST_CAP}"
            )


class Mixer(nn.Module):
    """mLSTM.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Added to the variance in the output norm, unless the config has its own.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads = config.num_heads
        key_size, value_size = (heads * n for n in (config.key_dim, config.value_dim))
        self.sizes = [key_size, key_size, value_size, value_size]
        self.qkv_gate_proj = nn.Linear(hidden_size, sum(self.sizes), bias=config.bias)
        self.beta_decay_proj = nn.Linear(hidden_size, 2 * heads)
        self.norm = HeadLayerNorm(heads, config.value_dim, config.norm_eps or norm_eps)
        self.out_proj = nn.Linear(value_size, hidden_size, bias=config.bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The published initial values: at first heads write little and forget slowly."""
        nn.init.zeros_(self.beta_decay_proj.weight)
        heads, bias = self.config.num_heads, self.beta_decay_proj.bias
        bias[:heads] = -10.0
        bias[heads:] = torch.linspace(3.0, 6.0, heads, device=bias.device)

    def state_specs(self) -> list[StateSpec]:
        """C and n, both times exp(-m), and m."""
        c = self.config
        return [
            c.matrix_spec(self.layer),
            StateSpec("normalizer", self.layer, (c.num_heads, c.key_dim), "batch heads key"),
            StateSpec("max", self.layer, (c.num_heads,), "batch heads"),
        ]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        c = self.config
        names = [spec.name for spec in self.state_specs()]
        matrix, sums, maximum = (state[name] for name in names)
        *qkv, out_gate = project_in_parts(self.qkv_gate_proj, x, self.sizes)
        q, k, v = (part.unflatten(-1, (c.num_heads, -1)) for part in qkv)
        gates = at_least_float32(project_aligned(self.beta_decay_proj, x)) / c.gate_softcap
        i, f = (c.gate_softcap * torch.tanh(gates)).chunk(2, dim=-1)
        gate, decay, m, maximum = stabilised(i, -F.softplus(-f), maximum, lengths)
        k = (k * gate[..., None]).to(v.dtype)
        h, matrix, sums = linear(
            q,
            k,
            v,
            decay,
            matrix,
            scale=c.key_dim**-0.5,
            normalizer=sums,
            floor=(-m).exp(),
            eps=c.eps,
            lengths=lengths,
        )
        y = self.norm(h) * out_gate.sigmoid()
        return self.out_proj(y), dict(zip(names, (matrix, sums, maximum), strict=True))
