"""minGRU: a gated recurrent unit whose gate does not read the state, so that it runs as a scan.

    h_t = (1 - z_t) * h_{t-1} + z_t * u_t ;  z_t = sigmoid(W_z x_t + b_z)
    [u, gate] = W_in x ;  y_t = W_out (h_t * silu(gate_t))

Source: Feng et al. 2024, "Were RNNs All We Needed?", arXiv:2410.01201, section 3.1; the decay in
log space as in its appendix B, log(1 - z) = -softplus(W_z x + b_z), without that version's
positive candidate g(.): u stays linear. The output gate is that of the other diagonal mixers (Gu
and Dao 2023, "Mamba", arXiv:2312.00752, section 3.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.layers import at_least_float32, project_in_parts
from edgelin.mixers import check_sizes
from edgelin.recurrences.diagonal import diagonal
from edgelin.state import StateSpec


@dataclass(frozen=True)
class Config:
    """Sizes of the mixer.

    Args:
        inner_size: Channels D.
    """

    inner_size: int

    def __post_init__(self) -> None:
        check_sizes(self, "inner_size")


class Mixer(nn.Module):
    """minGRU in a gated block.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Not used; every mixer takes it.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.in_gate_proj = nn.Linear(hidden_size, 2 * config.inner_size, bias=False)
        self.decay_proj = nn.Linear(hidden_size, config.inner_size)
        self.out_proj = nn.Linear(config.inner_size, hidden_size, bias=False)

    def state_specs(self) -> list[StateSpec]:
        """h."""
        return [StateSpec("ssm", self.layer, (self.config.inner_size, 1), "batch channels state")]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        name = f"ssm.{self.layer}"
        u, gate = project_in_parts(self.in_gate_proj, x, [self.config.inner_size] * 2)
        z = at_least_float32(self.decay_proj(x))
        one = torch.ones(self.config.inner_size, 1, dtype=z.dtype, device=x.device)
        b, g = (v.unflatten(-1, one.shape) for v in (z.sigmoid(), -F.softplus(z)))
        h, last = diagonal(u, b, one, g, None, state[name], lengths)
        return self.out_proj(h * F.silu(gate)), {name: last}
