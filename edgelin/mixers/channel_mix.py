"""RWKV's channel mix, the branch that follows its time mixing in a layer.

    y_t = W_v relu(W_k x^k_t)^2                                              RWKV-7
    y_t = sigmoid(W_r x^r_t) * (W_v relu(W_k x^k_t)^2)                RWKV-4 to -6, ``receptance``

x^i for i = k, r are x_t + (x_{t-1} - x_t) mu_i. Sources: Peng et al., "RWKV-7 Goose" (2025),
arXiv:2503.14456, section 4 (the MLP); Peng et al., "Eagle and Finch" (2024), arXiv:2404.05892,
section 4.3, equations 23 to 26. Initial values as in the authors' code (RWKV-LM, classes
RWKV_CMix_x060 and RWKV_CMix_x070), which grades mu by 1 - layer / layers; a layer here knows its
own index only and takes 4 / (layer + 4), as the time mixings do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.layers import token_shift
from edgelin.mixers import check_sizes
from edgelin.state import StateSpec


@dataclass(frozen=True)
class Config:
    """Sizes of the branch.

    Args:
        intermediate_size: Width inside.
        receptance: Whether the gate of RWKV-4 to -6 follows.
    """

    intermediate_size: int
    receptance: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "intermediate_size")


class Mixer(nn.Module):
    """RWKV channel mixing.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the state and grades the initial values.
        norm_eps: Not used; every mixer takes it.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer, self.hidden_size = config, layer, hidden_size
        self.mix = nn.Parameter(torch.empty(1 + config.receptance, hidden_size))
        self.mix.no_weight_decay = True  # type: ignore[attr-defined]
        self.up_proj = nn.Linear(hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden_size, bias=False)
        if config.receptance:
            self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The published shares of the token before."""
        channel = torch.arange(self.hidden_size, device=self.mix.device) / self.hidden_size
        shallow = 4 / (self.layer + 4)
        self.mix.copy_(1 - channel ** (shallow if self.config.receptance else shallow**4))

    def state_specs(self) -> list[StateSpec]:
        """The last token."""
        return [StateSpec("mlp_shift", self.layer, (self.hidden_size,), "batch channels")]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        name = f"mlp_shift.{self.layer}"
        previous, shift = token_shift(x, state[name], lengths)
        mixed = x + (previous - x) * self.mix[:, None, None].to(x.dtype)
        y = self.down_proj(F.relu(self.up_proj(mixed[0])).square())
        if self.config.receptance:
            y = y * self.gate_proj(mixed[1]).sigmoid()
        return y, {name: shift}


__all__ = ["Config", "Mixer"]
