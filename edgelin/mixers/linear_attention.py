"""Linear attention with the feature map elu(x) + 1 and a normaliser.

    S_t = S_{t-1} + phi(k_t) v_t^T ;  z_t = z_{t-1} + phi(k_t)
    o_t = S_t^T phi(q_t) / (z_t . phi(q_t) + eps) ;  phi(x) = elu(x) + 1

Source: Katharopoulos et al., "Transformers are RNNs" (2020), arXiv:2006.16236, eq. 7 (phi) and
eq. 16 to 20 (the recurrence).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.mixers import HeadSizes
from edgelin.recurrences.linear import linear
from edgelin.state import StateSpec


@dataclass(frozen=True)
class Config(HeadSizes):
    """Sizes of the mixer."""


class Mixer(nn.Module):
    """Linear attention.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Unused; every mixer takes it.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads = config.num_heads
        self.sizes = [2 * heads * config.key_dim, heads * config.value_dim]
        self.qkv_proj = nn.Linear(hidden_size, sum(self.sizes), bias=False)
        self.out_proj = nn.Linear(self.sizes[1], hidden_size, bias=False)

    def state_specs(self) -> list[StateSpec]:
        """S and z."""
        c = self.config
        shape = (c.num_heads, c.key_dim)
        return [
            c.matrix_spec(self.layer),
            StateSpec("normalizer", self.layer, shape, "batch heads key"),
        ]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        c = self.config
        names = (f"recurrent.{self.layer}", f"normalizer.{self.layer}")
        qk, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        features = F.elu(qk.unflatten(-1, (2 * c.num_heads, c.key_dim))) + 1
        q, k = features.chunk(2, dim=2)
        v = v.unflatten(-1, (c.num_heads, c.value_dim))
        o, matrix, z = linear(q, k, v, None, state[names[0]], normalizer=state[names[1]])
        return self.out_proj(o.flatten(-2)), {names[0]: matrix, names[1]: z}
