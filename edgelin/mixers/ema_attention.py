"""Linear attention over an exponential moving average of the tokens, a rate a head.

    mu_t = a mu_{t-1} + (1 - a) phi(k_t) v_t^T ;  nu_t = a nu_{t-1} + (1 - a) phi(k_t)
    o_t = mu_t^T phi(q_t) / (nu_t . phi(q_t) + eps)

mu and nu are the numerator and denominator of linear attention (Katharopoulos et al. 2020,
arXiv:2006.16236, eq. 16 to 20) as averages instead of sums: they stay as large as one token's
features however long the stream. The average is that of Ma et al. 2022, "Mega", arXiv:2209.10655,
eq. 1. It is the `linear` recurrence with g = log a and keys times 1 - a.

``decay`` fixes a; else every head learns its own, a = sigmoid(decay_logit). These start with
averages over 1 / (1 - a) = 2 to 256 tokens, in equal ratios from head to head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.layers import at_least_float32
from edgelin.mixers import linear_attention

_SHORTEST, _LONGEST = 2.0, 256.0  # tokens


@dataclass(frozen=True)
class Config(linear_attention.FeatureSizes):
    """Sizes of the mixer.

    Args:
        decay: a of all heads, above 0 and below 1; None: each head learns its own.
    """

    decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay is not None and not 0 < self.decay < 1:
            raise EdgelinError(
                f"decay is {self.decay}; give a number above 0 and below 1, or none to learn it"
            )


class Mixer(linear_attention.Mixer):
    """Linear attention over a moving average.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Added to the mean square in the output norm.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__(config, hidden_size, layer, norm_eps)
        self.decay = config.decay
        if config.decay is None:
            low, high = math.log(_SHORTEST), math.log(_LONGEST)
            tokens = torch.linspace(low, high, config.num_heads).exp()
            self.decay_logit = nn.Parameter((tokens - 1).log())  # a = 1 - 1 / tokens

    def decayed(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Keys times 1 - a, and log a."""
        g, rest = self._rates(k)
        return (k * rest[:, None]).to(k.dtype), g.expand(*k.shape[:3])

    def _rates(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """log a and 1 - a, `[H]`."""
        if self.decay is None:
            logit = at_least_float32(self.decay_logit)
            return -F.softplus(-logit), torch.sigmoid(-logit)
        full = torch.promote_types(like.dtype, torch.float32)
        ones = torch.ones(self.config.num_heads, dtype=full, device=like.device)
        return math.log(self.decay) * ones, (1 - self.decay) * ones
