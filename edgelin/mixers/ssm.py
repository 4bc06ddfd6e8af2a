"""Diagonal state-space layer (S4D-Lin; ``complex = false``: S4D-Real) in a gated block.

    h_t = Λ h_{t-1} + B̄ u_t ;  s_t = Re(C h_t) + D u_t ;  y_t = W_out (s_t * silu(z_t))
    Λ = exp(Δ A) ;  B̄ = (Λ - 1) / A ;  [u, z] = W_in x

Every channel has N states of its own. A_n starts at -1/2 + i π n (real: -(n + 1)) and the step Δ
log-uniform in [dt_min, dt_max]; A, Δ, C and D are learned, B is 1. Complex states stand for a
conjugate pair each, of which one is kept: C carries the factor 2.

Sources: Gu et al. 2022, "On the parameterization and initialization of diagonal state space
models" (S4D), arXiv:2206.11893, equations 2 to 4 and 9, section 4.4 (real: table 1); the gate as
in Gu and Dao 2023, "Mamba", arXiv:2312.00752, section 3.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.layers import at_least_float32
from edgelin.mixers import check_sizes
from edgelin.recurrences.diagonal import diagonal
from edgelin.state import StateSpec


@dataclass(frozen=True)
class Config:
    """Sizes of the mixer.

    Args:
        inner_size: Channels D.
        state_size: States N of a channel; a complex one counts for a conjugate pair.
        complex: Whether states are complex.
        dt_min: Smallest initial step Δ.
        dt_max: Largest initial step Δ.
    """

    inner_size: int
    state_size: int = 16
    complex: bool = True
    dt_min: float = 1e-3
    dt_max: float = 1e-1

    def __post_init__(self) -> None:
        check_sizes(self, "inner_size", "state_size")
        if not 0 < self.dt_min <= self.dt_max:
            raise EdgelinError(
                f"dt_min is {self.dt_min} and dt_max {self.dt_max}; give 0 < dt_min <= dt_max"
            )


class Mixer(nn.Module):
    """Gated diagonal state-space layer.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Not used; every mixer takes it.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        shape = (config.inner_size, config.state_size)
        self.in_gate_proj = nn.Linear(hidden_size, 2 * config.inner_size, bias=False)
        low, high = math.log(config.dt_min), math.log(config.dt_max)
        self.log_dt = nn.Parameter(torch.empty(config.inner_size).uniform_(low, high))
        n = torch.arange(config.state_size, dtype=torch.float32)
        if config.complex:
            self.A_real_log = nn.Parameter(torch.full(shape, math.log(0.5)))
            self.A_imag = nn.Parameter((math.pi * n).repeat(config.inner_size, 1))
            self.C = nn.Parameter(torch.randn(*shape, 2) * 0.5**0.5)
        else:
            self.A_real_log = nn.Parameter((n + 1).log().repeat(config.inner_size, 1))
            self.C = nn.Parameter(torch.randn(shape))
        for name in ("A_real_log", "A_imag"):
            if hasattr(self, name):
                setattr(getattr(self, name), "no_weight_decay", True)  # noqa: B010 - not typed
        self.D = nn.Parameter(torch.ones(config.inner_size))
        self.out_proj = nn.Linear(config.inner_size, hidden_size, bias=False)

    def state_specs(self) -> list[StateSpec]:
        """h, split into real and imaginary part where it is complex."""
        kinds = ("ssm_re", "ssm_im") if self.config.complex else ("ssm",)
        shape = (self.config.inner_size, self.config.state_size)
        return [StateSpec(kind, self.layer, shape, "batch channels state") for kind in kinds]

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        u, gate = self.in_gate_proj(x).chunk(2, dim=-1)
        b, c, g, theta = self.transition()
        names = [spec.name for spec in self.state_specs()]
        if theta is None:
            y, h = diagonal(u, b, c, g, None, state[names[0]])
            after = {names[0]: h}
        else:
            pair = torch.stack([state[name] for name in names], dim=-1)
            y, h = diagonal(u, b, c, g, theta, pair)
            after = dict(zip(names, h.unbind(-1), strict=True))
        y = y + self.D.to(y.dtype) * u
        return self.out_proj(y * F.silu(gate)), after

    def transition(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """B̄, 2 C (real: C), log|Λ| and the angle of Λ (None: real), `[D, N]` (B̄, C: (re, im)).

        The step of the zero-order hold, S4D eq. 4. expm1 is written with tanh, which ONNX has:
        exp(g) - 1 would lose four digits at the smallest steps.
        """
        dt = at_least_float32(self.log_dt).exp()[:, None]
        rate = at_least_float32(self.A_real_log).exp()
        g = -dt * rate
        magnitude = g.exp()
        less_one = torch.tanh(g / 2) * (magnitude + 1)  # exp(g) - 1
        c = at_least_float32(self.C)
        if not self.config.complex:
            return -less_one / rate, c, g, None
        imag = at_least_float32(self.A_imag)
        theta = dt * imag
        # Λ - 1 = re + i im, and 1 / A = (-rate - i imag) / |A|^2
        re = less_one * theta.cos() - 2 * (theta / 2).sin().square()
        im = magnitude * theta.sin()
        b = torch.stack([im * imag - re * rate, -im * rate - re * imag], dim=-1)
        return b / (rate.square() + imag.square())[..., None], 2 * c, g, theta
