"""A multilayer perceptron of one token: what follows a mixer, or a layer of its own.

    y_t = W_down (act(W_gate x_t) * W_up x_t)        gated
    y_t = W_down act(W_up x_t)                       else

Sources: Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202, eq. 5 and 6 (gated with
GELU or SiLU); So et al. 2021, "Primer", arXiv:2109.08668, section 4 (the square of ReLU). Gate and
up are one projection, so that a step reads x once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.layers import project_in_parts
from edgelin.model_config import MOST_WIDTH, check_range
from edgelin.state import StateSpec

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")


@dataclass(frozen=True)
class Config:
    """Sizes of the branch.

    Args:
        intermediate_size: Width inside.
        activation: ``silu``, ``gelu``, ``gelu_tanh`` (its approximation) or ``relu2``.
        gated: Whether what is activated is a gate.
        bias: Whether all projections have a bias.
    """

    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        check_range("intermediate_size", self.intermediate_size, 1, MOST_WIDTH)
        if self.activation not in ACTIVATIONS:
            raise EdgelinError(
                f"activation is {self.activation!r}; allowed: {', '.join(ACTIVATIONS)}"
            )


class Mixer(nn.Module):
    """MLP.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Not used; every mixer takes it.
        norm_eps: Not used; every mixer takes it.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config = config
        width, bias = config.intermediate_size, config.bias
        if config.gated:
            self.gate_up_proj = nn.Linear(hidden_size, 2 * width, bias=bias)
        else:
            self.up_proj = nn.Linear(hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden_size, bias=bias)

    def state_specs(self) -> list[StateSpec]:
        """None."""
        return []

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Map `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        if self.config.gated:
            gate, up = project_in_parts(self.gate_up_proj, x, [self.config.intermediate_size] * 2)
            return self.down_proj(self._activated(gate) * up), {}
        return self.down_proj(self._activated(self.up_proj(x))), {}

    def _activated(self, x: Tensor) -> Tensor:
        """The activation, element by element."""
        name = self.config.activation
        if name == "silu":
            return F.silu(x)
        if name == "relu2":
            return F.relu(x).square()
        return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
