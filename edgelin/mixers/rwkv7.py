"""RWKV-7 ("Goose") time mixing: the state forgets along a learned direction at a rate a channel.

    S_t = Diag(exp(g_t)) S_{t-1} - (kk_t * a_t) (kk_t^T S_{t-1}) + k_t v_t^T ;  o_t = S_t^T r_t
    g_t = -exp(-1/2) sigmoid(d_0 + tanh(x^w W_1) W_2) ;  a_t = sigmoid(a_0 + x^a A_1 A_2)
    kk_t = normalised (k'_t * k_k) ;  k_t = k'_t (1 + (a_t - 1) k_a) ;  r, k', v' = x^r W_r, ...
    v_t = v'_t + (v_first_t - v'_t) sigmoid(v_0 + x^v V_1 V_2)
    y_t = ((LayerNorm_head(o_t) + (r_t . (r_k * k_t)) v_t) * (sigmoid(x^g G_1) G_2)) W_o

x^i for i = r, w, k, v, a, g are x_t + (x_{t-1} - x_t) mu_i. v_first is v' of the first RWKV-7 layer
of the model, which has no V_1 and V_2; a later layer takes part of its values.

Source: Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (2025),
arXiv:2503.14456, section 4. Initial values and the norm's epsilon (1e-5 a channel of a head) as in
the authors' code (RWKV-LM, class RWKV_Tmix_x070), which grades them by r = layer / (layers - 1).
A mixer here knows its own layer only and takes r = layer / (layer + 4), as in ``rwkv6``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgelin.initial import places
from edgelin.layers import HeadLayerNorm, at_least_float32, l2_norm, token_shift
from edgelin.mixers import HeadSizes, check_eps
from edgelin.recurrences.dplr import dplr
from edgelin.state import StateSpec

_FASTEST = -math.exp(-0.5)  # log decay, a token


@dataclass(frozen=True)
class Config(HeadSizes):
    """Sizes of the mixer.

    Args:
        decay_rank: Inner width of the two projections that make the decay.
        beta_rank: The same of a, the rate at which a token overwrites.
        value_rank: The same of the share of the first layer's values.
        gate_rank: The same of the output gate.
        norm_eps: Added to the variance in the output norm; None: 1e-5 V, the published code's.
        key_norm_eps: Added to the sum of squares where kk is normalised.
    """

    decay_rank: int = 64
    beta_rank: int = 64
    value_rank: int = 32
    gate_rank: int = 128
    norm_eps: float | None = None
    key_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("norm_eps", "key_norm_eps"):
            check_eps(self, name)


class Mixer(nn.Module):
    """RWKV-7 time mixing.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states and grades the initial values.
        norm_eps: Not used; every mixer takes it.
    """

    shares = True

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer, self.hidden_size = config, layer, hidden_size
        key_size, value_size = (config.num_heads * n for n in (config.key_dim, config.value_dim))
        self.value_size, self.follows = value_size, False
        self.mix = nn.Parameter(torch.empty(6, hidden_size))
        self.r_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, value_size, bias=False)
        self.decay_in_proj = nn.Linear(hidden_size, config.decay_rank, bias=False)
        self.decay_out_proj = nn.Linear(config.decay_rank, key_size)
        self.beta_in_proj = nn.Linear(hidden_size, config.beta_rank, bias=False)
        self.beta_out_proj = nn.Linear(config.beta_rank, key_size)
        self.gate_in_proj = nn.Linear(hidden_size, config.gate_rank, bias=False)
        self.gate_out_proj = nn.Linear(config.gate_rank, value_size, bias=False)
        self.k_k = nn.Parameter(torch.empty(key_size))
        self.k_a = nn.Parameter(torch.empty(key_size))
        self.r_k = nn.Parameter(torch.empty(config.num_heads, config.key_dim))
        eps = config.value_dim * 1e-5 if config.norm_eps is None else config.norm_eps
        self.norm = HeadLayerNorm(config.num_heads, config.value_dim, eps)
        self.out_proj = nn.Linear(value_size, hidden_size, bias=False)
        for parameter in (self.mix, self.r_k):
            parameter.no_weight_decay = True  # type: ignore[attr-defined]
        self._reset_vectors()

    def follow(self, earlier: Sequence[nn.Module]) -> None:
        """Take part of the first layer's values, if one of ``earlier`` has as many."""
        first = any(isinstance(m, Mixer) and m.value_size == self.value_size for m in earlier)
        if first:
            self.follows = True
            rank = self.config.value_rank
            self.value_beta_in_proj = nn.Linear(self.hidden_size, rank, bias=False)
            self.value_beta_out_proj = nn.Linear(rank, self.value_size)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The published initial values: at first no gate looks at the data."""
        self._reset_vectors()
        for proj, bound in ((self.r_proj, 0.5), (self.k_proj, 0.05), (self.v_proj, 0.5)):
            bound *= self.hidden_size**-0.5
            nn.init.uniform_(proj.weight, -bound, bound)
        low_ranks = [
            (self.decay_in_proj, self.decay_out_proj),
            (self.beta_in_proj, self.beta_out_proj),
            (self.gate_in_proj, self.gate_out_proj),
        ]
        if self.follows:
            low_ranks.append((self.value_beta_in_proj, self.value_beta_out_proj))
        for inner, outer in low_ranks:
            nn.init.zeros_(inner.weight)
            gain = 0.1 * max(1.0, outer.in_features / outer.out_features) ** 0.5
            nn.init.orthogonal_(outer.weight, gain=gain)
        place = places(self.k_k)
        n = torch.arange(self.k_k.numel(), device=self.k_k.device) % self.config.key_dim
        zigzag = 2 * n / max(1, self.config.key_dim - 1) - 1
        zigzag = zigzag * zigzag.abs()
        depth = self.layer / (self.layer + 4)
        speeds = -5.5 + 6 * place ** (1 + depth**0.3) + 2.5 * zigzag
        self.decay_out_proj.bias.copy_(speeds)
        self.beta_out_proj.bias.copy_(-0.39 + 0.3 * zigzag + 0.4 * place)
        if self.follows:
            bias = self.value_beta_out_proj.bias
            bias.copy_(0.93 - 0.4 * places(bias))

    @torch.no_grad()
    def _reset_vectors(self) -> None:
        """What is no projection: shares of the token before, and the factors of the keys."""
        depth = self.layer / (self.layer + 4)
        channel = torch.arange(self.hidden_size, device=self.mix.device) / self.hidden_size
        powers = 0.2, 0.9, 0.7, 0.7, 0.9, 0.2  # r, w, k, v, a, g
        for share, power in zip(self.mix, powers, strict=True):
            share.copy_(1 - channel ** (power * (1 - depth)))
        self.k_k.copy_(0.76 - 0.1 * places(self.k_k))
        nn.init.constant_(self.k_a, 1.02)
        nn.init.constant_(self.r_k, -0.04)

    def state_specs(self) -> list[StateSpec]:
        """The last token and S."""
        shift = StateSpec("shift", self.layer, (self.hidden_size,), "batch channels")
        return [shift, self.config.matrix_spec(self.layer)]

    def forward(
        self,
        x: Tensor,
        state: dict[str, Tensor],
        position: Tensor,
        shared: dict[str, Tensor],
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        c = self.config
        shift_name, recurrent_name = f"shift.{self.layer}", f"recurrent.{self.layer}"
        previous, shift = token_shift(x, state[shift_name], lengths)
        xr, xw, xk, xv, xa, xg = self._mixtures(x, previous - x).unbind(0)
        r, k, v = self.r_proj(xr), self.k_proj(xk), self._values(xv, shared)
        decay = self.decay_out_proj(torch.tanh(self.decay_in_proj(xw)))
        g = _FASTEST * at_least_float32(decay).sigmoid()
        rate = at_least_float32(self.beta_out_proj(self.beta_in_proj(xa))).sigmoid()
        k = at_least_float32(k)
        parts = r, k * self.k_k, k * (1 + (rate - 1) * self.k_a), v, rate, g
        r, kk, k, v, rate, g = (part.unflatten(-1, (c.num_heads, -1)) for part in parts)
        kk = l2_norm(kk, eps=c.key_norm_eps)
        write, read, add = (part.to(v.dtype) for part in (k, -kk, kk * rate))
        o, recurrent = dplr(r, write, v, read, add, g, state[recurrent_name], lengths=lengths)
        bonus = (at_least_float32(r) * k * self.r_k).sum(-1, keepdim=True) * v
        y = self.norm(o) + bonus.flatten(-2).to(o.dtype)
        y = y * self.gate_out_proj(self.gate_in_proj(xg).sigmoid())
        return self.out_proj(y), {shift_name: shift, recurrent_name: recurrent}

    def _mixtures(self, x: Tensor, change: Tensor) -> Tensor:
        """``[6, B, T, hidden_size]``: x with six shares of the change to the token before."""
        mixed: Tensor = x + change * self.mix[:, None, None].to(x.dtype)
        return mixed

    def _values(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
        """Values `[B, T, H V]`, those of the first layer mixed in or left for later layers."""
        v: Tensor = self.v_proj(x)
        name = f"v_first.{self.value_size}"
        if not self.follows:
            shared[name] = v
            return v
        share = self.value_beta_out_proj(self.value_beta_in_proj(x))
        share = at_least_float32(share).sigmoid().to(v.dtype)
        return v + (shared[name] - v) * share
