"""Simple recurrent network in a gated block, elementwise or with a full matrix.

    elementwise:  z_t = f(a * z_{t-1} + gamma * u_t) ;  gamma = sqrt(1 - a^2) ;  a = exp(-exp(nu))
    full:         z_t = f(z_{t-1} W + u_t)
    [u, gate] = W_in x ;  y_t = W_out (z_t * silu(gate_t)) ;  f: identity, tanh, relu or sigmoid

With f = identity the elementwise form is a scan and trains in parallel (the `diagonal` recurrence).
Every other form runs its T steps one after the other, in training too: take short sequences, or
another mixer.

a lies in (0, 1) whatever nu is, and starts uniform in a ring of radii 0.9 to 0.999. W starts
orthogonal (relu: the identity), times 0.95; nothing holds it there, so an identity or relu network
may learn to grow.

Sources: Orvieto et al. 2023, "Resurrecting recurrent neural networks for long sequences" (LRU),
arXiv:2303.06349, lemma 3.2, section 3.4 (a, gamma); Le et al. 2015, "A simple way to initialize
recurrent networks of rectified linear units", arXiv:1504.00941, section 2 (W for relu).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.layers import at_least_float32, project_in_parts
from edgelin.mixers import check_sizes
from edgelin.recurrences.diagonal import diagonal
from edgelin.recurrences.rnn import ACTIVATIONS, rnn
from edgelin.state import StateSpec

_RADII = (0.9, 0.999)
_GAIN = 0.95
_FORMS = ("elementwise", "full")


@dataclass(frozen=True)
class Config:
    """Sizes of the mixer.

    Args:
        inner_size: Channels D.
        recurrence: "elementwise" (a number a channel) or "full" (a matrix `[D, D]`).
        activation: f: "identity", "tanh", "relu" or "sigmoid".
    """

    inner_size: int
    recurrence: str = "elementwise"
    activation: str = "tanh"

    def __post_init__(self) -> None:
        check_sizes(self, "inner_size")
        for name, allowed in (("recurrence", _FORMS), ("activation", ACTIVATIONS)):
            if (value := getattr(self, name)) not in allowed:
                raise EdgelinError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")


class Mixer(nn.Module):
    """Gated simple recurrent network.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Not used; every mixer takes it.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        size = config.inner_size
        self.in_gate_proj = nn.Linear(hidden_size, 2 * size, bias=False)
        if config.recurrence == "elementwise":
            low, high = (radius**2 for radius in _RADII)
            square = low + (high - low) * torch.rand(size)
            self.nu = nn.Parameter((-square.log() / 2).log())
        else:
            weight = torch.eye(size)
            if config.activation != "relu":
                weight = nn.init.orthogonal_(weight)
            self.recurrent_weight = nn.Parameter(_GAIN * weight)
        self.out_proj = nn.Linear(size, hidden_size, bias=False)

    def state_specs(self) -> list[StateSpec]:
        """z."""
        return [StateSpec("rnn", self.layer, (self.config.inner_size,), "batch channels")]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        name = f"rnn.{self.layer}"
        u, gate = project_in_parts(self.in_gate_proj, x, [self.config.inner_size] * 2)
        recur = self._elementwise if self.config.recurrence == "elementwise" else self._full
        z, after = recur(u, state[name], lengths)
        return self.out_proj(z * F.silu(gate)), {name: after}

    def _elementwise(
        self, u: Tensor, state: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs `[B, T, D]` and the last state."""
        g = -at_least_float32(self.nu).exp()
        a = g.exp()
        # 1 - a^2 without cancellation, in functions that ONNX has: expm1 is none.
        gamma = (-g.tanh() * (a.square() + 1)).sqrt()
        u = (gamma * u).to(u.dtype)
        if self.config.activation != "identity":
            return rnn(u, a, state, lengths, activation=self.config.activation)
        ones = torch.ones_like(g)[:, None]
        z, after = diagonal(u, ones, ones, g[:, None], None, state[..., None], lengths)
        return z, after[..., 0]

    def _full(self, u: Tensor, state: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Outputs `[B, T, D]` and the last state."""
        weight = at_least_float32(self.recurrent_weight)
        return rnn(u, weight, state, lengths, activation=self.config.activation)
