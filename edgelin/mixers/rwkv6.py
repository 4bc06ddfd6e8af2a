"""RWKV-6 ("Finch"): data-dependent token shift and decay, and a bonus for the own token.

    o_t = (S_{t-1} + Diag(u) k_t v_t^T)^T r_t ;  S_t = Diag(exp(-exp(d_t))) S_{t-1} + k_t v_t^T
    m_t = tanh((x_t + (x_{t-1} - x_t) mu) A) ;  x^i_t = x_t + (x_{t-1} - x_t) (lambda_i + m_t B_i)
    d_t = d_0 + tanh(x^w_t D_1) D_2 ;  r, k, v, gate = x^r W_r, x^k W_k, x^v W_v, x^g W_g
    y_t = (LayerNorm_head(o_t / sqrt(K)) * silu(gate_t)) W_o

x^i for i = w, k, v, r, g are five mixtures of a token with the one before it. Dividing by sqrt(K)
makes norm_eps count as in the published code, whose epsilon is K times larger.

Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence"
(2024), arXiv:2404.05892, section 4.2, equations 14 to 22. Initial values as in the authors' code
(RWKV-LM, class RWKV_Tmix_x060), which grades them by r = layer / (layers - 1). A mixer here knows
its own layer only and takes r = layer / (layer + 4): 0 in the first layer, then rising below 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.initial import places
from edgelin.layers import HeadLayerNorm, at_least_float32, token_shift
from edgelin.mixers import HeadSizes, check_eps
from edgelin.recurrences import MIN_LOG_DECAY
from edgelin.recurrences.linear import linear
from edgelin.state import StateSpec

_MIXTURES = 5  # w, k, v, r, g
_LARGEST = math.log(-MIN_LOG_DECAY)  # d of the fastest decay that the recurrence tells apart


@dataclass(frozen=True)
class Config(HeadSizes):
    """Sizes of the mixer.

    Args:
        mix_rank: Inner width of the projections that make each mixture.
        decay_rank: Inner width of the projections that make the decay.
        norm_eps: Added to the variance of o / sqrt(K) in the output norm; None: the model's.
    """

    mix_rank: int = 32
    decay_rank: int = 64
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self, "norm_eps")


class Mixer(nn.Module):
    """RWKV-6 time mixing.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states and grades the initial values.
        norm_eps: Added to the variance in the output norm, unless the config has its own.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer, self.hidden_size = config, layer, hidden_size
        key_size, value_size = (config.num_heads * n for n in (config.key_dim, config.value_dim))
        self.mix_base = nn.Parameter(torch.zeros(hidden_size))
        self.mix_in_proj = nn.Linear(hidden_size, _MIXTURES * config.mix_rank, bias=False)
        self.mix_out = nn.Parameter(torch.zeros(_MIXTURES, config.mix_rank, hidden_size))
        self.mix_bias = nn.Parameter(torch.zeros(_MIXTURES, hidden_size))
        self.decay_in_proj = nn.Linear(hidden_size, config.decay_rank, bias=False)
        self.decay_out_proj = nn.Linear(config.decay_rank, key_size)
        self.bonus = nn.Parameter(torch.zeros(config.num_heads, config.key_dim))
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.r_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size, value_size, bias=False)
        eps = norm_eps if config.norm_eps is None else config.norm_eps
        self.norm = HeadLayerNorm(config.num_heads, config.value_dim, eps)
        self.out_proj = nn.Linear(value_size, hidden_size, bias=False)
        for parameter in (self.mix_out, self.mix_bias, self.bonus):
            parameter.no_weight_decay = True  # type: ignore[attr-defined]
        self._reset_vectors()

    def reset_parameters(self) -> None:
        """The published initial values: at first the mixtures and the decay ignore the data."""
        self._reset_vectors()
        nn.init.zeros_(self.mix_in_proj.weight)
        nn.init.zeros_(self.decay_in_proj.weight)
        nn.init.uniform_(self.decay_out_proj.weight, -0.01, 0.01)

    @torch.no_grad()
    def _reset_vectors(self) -> None:
        """What is no projection: shares of the token before, decay speeds, bonus."""
        depth = self.layer / (self.layer + 4)
        channel = torch.arange(self.hidden_size) / self.hidden_size
        shares = channel ** (1 - depth), channel ** (0.5 * (1 - depth))
        self.mix_base.copy_(1 - shares[0])
        self.mix_bias.copy_(1 - torch.stack([shares[i] for i in (0, 0, 0, 1, 1)]))
        self.mix_bias[2] -= 0.3 * depth
        self.mix_out.uniform_(-0.01, 0.01)
        speed, bonus = self.decay_out_proj.bias, self.bonus
        speed.copy_(-6 + 5 * places(speed) ** (0.7 + 1.3 * depth))
        zigzag = 0.1 * ((torch.arange(bonus.numel(), device=bonus.device) + 1) % 3 - 1)
        bonus.copy_((depth * (1 - places(bonus)) + zigzag).view_as(bonus))

    def state_specs(self) -> list[StateSpec]:
        """The last token and S."""
        shift = StateSpec("shift", self.layer, (self.hidden_size,), "batch channels")
        return [shift, self.config.matrix_spec(self.layer)]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        c = self.config
        shift_name, recurrent_name = f"shift.{self.layer}", f"recurrent.{self.layer}"
        previous, shift = token_shift(x, state[shift_name], lengths)
        xw, xk, xv, xr, xg = self._mixtures(x, previous - x).unbind(0)
        decay = self.decay_out_proj(torch.tanh(self.decay_in_proj(xw)))
        # Without the limit, the gradient of a decay below the floor would be 0 * inf.
        g = -at_least_float32(decay).clamp(max=_LARGEST).exp()
        parts = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv), g
        r, k, v, g = (part.unflatten(-1, (c.num_heads, -1)) for part in parts)
        scale, s = c.key_dim**-0.5, state[recurrent_name]
        o, recurrent = linear(r, k, v, g, s, scale=scale, bonus=self.bonus, lengths=lengths)
        y = self.norm(o) * F.silu(self.gate_proj(xg))
        return self.out_proj(y), {shift_name: shift, recurrent_name: recurrent}

    def _mixtures(self, x: Tensor, change: Tensor) -> Tensor:
        """``[5, B, T, hidden_size]``: x with five shares of the change to the token before."""
        low = torch.tanh(self.mix_in_proj(x + change * self.mix_base))
        low = low.unflatten(-1, (_MIXTURES, -1)).movedim(-2, 0)
        # One product for all rows of the batch: a broadcast one would copy mix_out for each.
        shares = (low.flatten(1, 2) @ self.mix_out).unflatten(1, x.shape[:2])
        mixed: Tensor = x + change * (self.mix_bias[:, None, None] + shares)
        return mixed
