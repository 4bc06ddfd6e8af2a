"""RWKV-4: a weighted mean of values a channel, weights exponential in the key and in the age.

    wkv_t = (sum_{s<t} exp(k_s - (t-1-s) e^d) v_s + exp(u + k_t) v_t) / (the same with v = 1)
    y_t = (sigmoid(r_t) * wkv_t) W_o ;  k, v, r = x^k W_k, x^v W_v, x^r W_r

x^i for i = k, v, r are x_t + (x_{t-1} - x_t) mu_i. Exponentials of keys overflow, so the sums are
kept as exp(-m_t) times themselves, with m_t the largest exponent so far
(:mod:`edgelin.recurrences.running_max`), which cancels in the quotient:

    m_t = max(m_{t-1} - e^d, k_t) ;  a_t = exp(m_{t-1} - e^d - m_t) a_{t-1} + exp(k_t - m_t) v_t
    wkv_t = (exp(m_{t-1} - n_t) a_{t-1} + exp(u + k_t - n_t) v_t) / (the same with b and v = 1)

where b_t is a_t with v = 1, and n_t = max(m_{t-1}, u + k_t). Both sums are one `diagonal`
recurrence.

Source: Peng et al., "RWKV: Reinventing RNNs for the Transformer Era" (2023), arXiv:2305.13048,
equations 11 to 16 and appendix D (m). Initial values as in the authors' code (RWKV-LM, class
RWKV_TimeMix), which grades them by r = layer / (layers - 1). A mixer here knows its own layer only
and takes r = layer / (layer + 4): 0 in the first layer, then rising below 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgelin.initial import places
from edgelin.layers import at_least_float32, token_shift
from edgelin.mixers import check_sizes
from edgelin.recurrences.diagonal import diagonal
from edgelin.recurrences.running_max import stabilised
from edgelin.state import StateSpec

_NOTHING = -1e30  # m before the first token, below every exponent


@dataclass(frozen=True)
class Config:
    """Sizes of the mixer.

    Args:
        inner_size: Channels D of keys and values.
    """

    inner_size: int

    def __post_init__(self) -> None:
        check_sizes(self, "inner_size")


class Mixer(nn.Module):
    """RWKV-4 time mixing.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states and grades the initial values.
        norm_eps: Not used; every mixer takes it.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer, self.hidden_size = config, layer, hidden_size
        inner = config.inner_size
        self.mix = nn.Parameter(torch.empty(3, hidden_size))  # mu of k, v and r
        self.decay = nn.Parameter(torch.empty(inner))  # d
        self.bonus = nn.Parameter(torch.empty(inner))  # u
        self.k_proj = nn.Linear(hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(hidden_size, inner, bias=False)
        self.r_proj = nn.Linear(hidden_size, inner, bias=False)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)
        for parameter in (self.mix, self.decay, self.bonus):
            parameter.no_weight_decay = True  # type: ignore[attr-defined]
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The published shares of the token before, decay speeds and bonus."""
        depth = self.layer / (self.layer + 4)
        channel = torch.arange(self.hidden_size, device=self.mix.device) / self.hidden_size
        share = channel ** (1 - depth)
        self.mix.copy_(
            1 - torch.stack([share, share + 0.3 * depth, channel ** (0.5 * (1 - depth))])
        )
        self.decay.copy_(-5 + 8 * places(self.decay) ** (0.7 + 1.3 * depth))
        zigzag = (torch.arange(len(self.bonus), device=self.bonus.device) + 1) % 3 - 1
        self.bonus.copy_(math.log(0.3) + 0.5 * zigzag)

    def state_specs(self) -> list[StateSpec]:
        """The last token; a and b, both as they are kept, and m."""
        inner = self.config.inner_size
        return [
            StateSpec("shift", self.layer, (self.hidden_size,), "batch channels"),
            StateSpec("ssm", self.layer, (inner, 1), "batch channels state"),
            StateSpec("normalizer", self.layer, (inner, 1), "batch channels state"),
            StateSpec("max", self.layer, (inner,), "batch channels", initial=_NOTHING),
        ]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        names = [spec.name for spec in self.state_specs()]
        last, *sums, maximum = (state[name] for name in names)
        previous, last = token_shift(x, last, lengths)
        xk, xv, xr = (x + (previous - x) * self.mix[:, None, None].to(x.dtype)).unbind(0)
        k, v = (at_least_float32(y) for y in (self.k_proj(xk), self.v_proj(xv)))
        wkv, *after = self._averages(k, v, torch.cat(sums, dim=1), maximum, lengths)
        y = self.out_proj(self.r_proj(xr).sigmoid() * wkv.to(x.dtype))
        return y, dict(zip(names, (last, *after), strict=True))

    def _averages(
        self, k: Tensor, v: Tensor, sums: Tensor, maximum: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """wkv `[B, T, D]`, and a, b and m after the last token.

        Args:
            k: `[B, T, D]`, float32 or better.
            v: Likewise.
            sums: a, then b: `[B, 2 D, 1]`.
            maximum: m `[B, D]`.
            lengths: Tokens that each row really has `[B]`, or None: all.
        """
        speed = at_least_float32(self.decay).exp()
        gate, decay, m, m_after = stabilised(k, -speed.expand_as(k), maximum, lengths)
        inputs = torch.cat([v, torch.ones_like(v)], dim=-1)
        gates, g = (torch.cat([part, part], dim=-1)[..., None] for part in (gate, decay))
        one = torch.ones(2 * self.config.inner_size, 1, dtype=v.dtype, device=v.device)
        all_sums, after = diagonal(inputs, gates, one, g, None, sums, lengths)
        # A token reads what the one before it left.
        before = torch.cat([sums[:, None, :, 0], all_sums], dim=1)[:, :-1]
        m_before = torch.cat([maximum[:, None], m], dim=1)[:, :-1]
        own = k + at_least_float32(self.bonus)
        top = torch.maximum(m_before, own)
        past, now = (m_before - top).exp(), (own - top).exp()
        weighted, weights = before.chunk(2, dim=-1)
        wkv = (past * weighted + now * v) / (past * weights + now)
        a, b = after.chunk(2, dim=1)
        return wkv, a, b, m_after
