"""Kimi Delta Attention: a delta rule whose memory decays key by key.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T
    o_t = S_t^T q_t / sqrt(K) ;  beta_t = sigmoid(x_t W_beta)
    g_t = -exp(A_log) softplus(x_t W_1 W_2 + dt_bias)             A_log a head, dt_bias a key
    y_t = (RMSNorm(o_t) * sigmoid(x_t W_3 W_4 + b)) W_o

q, k, v pass a short convolution and silu; q and k are L2-normalised; both low ranks are V.
Source: Kimi Team, "Kimi Linear" (2025), arXiv:2510.26692, eq. 1 and section 4; everything
else is shared with Gated DeltaNet. With ``lower_bound`` the decay is instead the "safe gate" of
the flash-linear-attention code (fla.ops.kda.gate):

    g_t = lower_bound sigmoid(exp(A_log) (x_t W_1 W_2 + dt_bias))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.initial import step_bias
from edgelin.layers import RMSNorm, at_least_float32, project_in_parts
from edgelin.mixers import gated_deltanet
from edgelin.mixers.gated_deltanet import DeltaSizes
from edgelin.recurrences import MIN_LOG_DECAY


@dataclass(frozen=True)
class Config(DeltaSizes):
    """Sizes of the mixer.

    Args:
        lower_bound: Log decay, below 0, that no step goes beyond; None: there is no such bound.
    """

    lower_bound: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lower_bound is not None and not MIN_LOG_DECAY <= self.lower_bound < 0:
            raise EdgelinError(
                f"lower_bound is {self.lower_bound}; give a log decay from {MIN_LOG_DECAY} to "
                f"below 0, such as -5, or leave it out"
            )


class Mixer(gated_deltanet.Mixer):
    """:class:`edgelin.mixers.gated_deltanet.Mixer` with a decay a key and low-rank gates."""

    def _gate_size(self) -> int:
        """The inner width of the output gate."""
        width: int = self.config.value_dim
        return width

    def _add_gates(self, hidden_size: int, norm_eps: float) -> None:
        """Parameters of :meth:`_gates` and :meth:`_gated_norm`."""
        heads, rank = self.config.num_heads, self.config.value_dim
        self.beta_decay_proj = nn.Linear(hidden_size, heads + rank, bias=False)
        self.decay_out_proj = nn.Linear(rank, heads * self.config.key_dim, bias=False)
        bounded = self.config.lower_bound is not None
        rate = torch.ones(heads) if bounded else torch.empty(heads).uniform_(1, 16)
        self.A_log = nn.Parameter(rate.log())
        self.dt_bias = nn.Parameter(step_bias(heads * self.config.key_dim))
        self.norm = RMSNorm(self.config.value_dim, norm_eps)
        self.gate_out_proj = nn.Linear(rank, self.value_size)

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Beta `[B, T, H]` and log decay `[B, T, H, K]`, float32."""
        c = self.config
        beta, low = project_in_parts(self.beta_decay_proj, x, [c.num_heads, c.value_dim])
        step = at_least_float32(self.decay_out_proj(low)) + at_least_float32(self.dt_bias)
        step = step.unflatten(-1, (c.num_heads, c.key_dim))
        rate = at_least_float32(self.A_log).exp()[:, None]
        if c.lower_bound is None:
            g = -rate * F.softplus(step)
        else:
            g = c.lower_bound * (rate * step).sigmoid()
        return self._beta(at_least_float32(beta)), g

    def _gated_norm(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """The outputs `[B, T, H, V]`, normalised and gated."""
        assert gate is not None  # there always is one
        opened = self.gate_out_proj(gate).unflatten(-1, o.shape[-2:]).sigmoid()
        y: Tensor = self.norm(o) * opened
        return y


__all__ = ["Config", "Mixer"]
