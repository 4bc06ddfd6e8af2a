"""Diagonal state-space layer (S4D; ``complex = false``: S4D-Real) in a gated block.

    h_t = Λ h_{t-1} + B̄ u_t ;  s_t = Re(C h_t) + D u_t ;  y_t = W_out (s_t * silu(z_t))
    zoh:       Λ = exp(Δ A) ;  B̄ = (Λ - 1) / A
    bilinear:  Λ = (1 + Δ/2 A) / (1 - Δ/2 A) ;  B̄ = Δ / (1 - Δ/2 A) ;  [u, z] = W_in x

Every channel has N states of its own. A_n starts at

    s4d-lin:   -1/2 + i π n                               s4d-real:  -(n + 1)
    s4d-inv:   -1/2 + i (2 N / π) (2 N / (2 n + 1) - 1)
    s4d-legs:  the eigenvalues of the normal part of the HiPPO-LegS matrix of 2 N states

and the step Δ log-uniform in [dt_min, dt_max]; A, Δ, C and D are learned, B is 1. Complex states
stand for a conjugate pair each, of which one is kept: C carries the factor 2.

Sources: Gu et al. 2022, "On the parameterization and initialization of diagonal state space
models" (S4D), arXiv:2206.11893, equations 2 to 9, section 4.4 (real: table 1); the gate as
in Gu and Dao 2023, "Mamba", arXiv:2312.00752, section 3.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.errors import EdgelinError
from edgelin.layers import at_least_float32, project_in_parts
from edgelin.mixers import check_sizes
from edgelin.recurrences.diagonal import diagonal
from edgelin.recurrences.lti.discretise import check_method
from edgelin.recurrences.lti.hippo import normal_legs
from edgelin.state import StateSpec

_COMPLEX_INITS = ("s4d-lin", "s4d-inv", "s4d-legs")
_REAL_INIT = "s4d-real"


@dataclass(frozen=True)
class Sizes:
    """What all state-space layers in a gated block are told.

    Args:
        inner_size: Channels D.
        state_size: States N of a channel.
        dt_min: Smallest initial step Δ.
        dt_max: Largest initial step Δ.
        discretization: ``"zoh"`` (zero-order hold) or ``"bilinear"``.
    """

    inner_size: int
    state_size: int = 16
    dt_min: float = 1e-3
    dt_max: float = 1e-1
    discretization: str = "zoh"

    def __post_init__(self) -> None:
        check_sizes(self, "inner_size", "state_size")
        check_method(self.discretization)
        if not 0 < self.dt_min <= self.dt_max:
            raise EdgelinError(
                f"dt_min is {self.dt_min} and dt_max {self.dt_max}; give 0 < dt_min <= dt_max"
            )


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the mixer.

    Args:
        complex: Whether states are complex; a complex one counts for a conjugate pair.
        init: Initial A: ``"s4d-lin"``, ``"s4d-inv"`` or ``"s4d-legs"``; real: ``"s4d-real"``. None
            takes the first of them.
    """

    complex: bool = True
    init: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        allowed = _COMPLEX_INITS if self.complex else (_REAL_INIT,)
        if self.init is not None and self.init not in allowed:
            raise EdgelinError(
                f"init is {self.init!r}; with complex = {str(self.complex).lower()} give "
                f"{' or '.join(allowed)}"
            )
        if self.discretization == "bilinear" and not self.complex:
            # Λ = (1 - Δ|A|/2) / (1 + Δ|A|/2) changes its sign at large steps, exp(g) cannot.
            raise EdgelinError(
                'discretization is "bilinear" with complex = false; real states can\'t follow its '
                'negative Λ: give "zoh", or complex = true'
            )


class GatedBlock(nn.Module):
    """What surrounds a state-space recurrence: projections, gate, step Δ and skip connection D.

    Args:
        sizes: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
    """

    def __init__(self, sizes: Sizes, hidden_size: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.in_gate_proj = nn.Linear(hidden_size, 2 * sizes.inner_size, bias=False)
        low, high = math.log(sizes.dt_min), math.log(sizes.dt_max)
        self.log_dt = nn.Parameter(torch.empty(sizes.inner_size).uniform_(low, high))
        self.D = nn.Parameter(torch.ones(sizes.inner_size))
        self.out_proj = nn.Linear(sizes.inner_size, hidden_size, bias=False)

    def forward(
        self, x: Tensor, state: dict[str, Tensor], position: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix `[B, T, hidden_size]`; see :mod:`edgelin.mixers`."""
        u, gate = project_in_parts(self.in_gate_proj, x, [len(self.D)] * 2)
        y, after = self.recur(u, state, lengths)
        y = y + self.D.to(y.dtype) * u
        return self.out_proj(y * F.silu(gate)), after

    def recur(
        self, u: Tensor, state: dict[str, Tensor], lengths: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the recurrence over the inputs `[B, T, D]`."""
        raise NotImplementedError


class Mixer(GatedBlock):
    """Gated diagonal state-space layer.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Not used; every mixer takes it.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__(config, hidden_size, layer)
        self.config = config
        shape = (config.inner_size, config.state_size)
        if config.complex:
            imag = frequencies(config.init or _COMPLEX_INITS[0], config.state_size)
            self.A_real_log = undecayed(torch.full(shape, math.log(0.5)))
            self.A_imag = undecayed(imag.repeat(config.inner_size, 1))
            self.C = nn.Parameter(torch.randn(*shape, 2) * 0.5**0.5)
        else:
            n = torch.arange(config.state_size, dtype=torch.float32)
            self.A_real_log = undecayed((n + 1).log().repeat(config.inner_size, 1))
            self.C = nn.Parameter(torch.randn(shape))

    def state_specs(self) -> list[StateSpec]:
        """h, split into real and imaginary part where it is complex."""
        shape = (self.config.inner_size, self.config.state_size)
        if not self.config.complex:
            return [StateSpec("ssm", self.layer, shape, "batch channels state")]
        layout = "batch channels state (one of each conjugate pair; read with factor 2)"
        return [StateSpec(kind, self.layer, shape, layout) for kind in ("ssm_re", "ssm_im")]

    def recur(
        self, u: Tensor, state: dict[str, Tensor], lengths: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the recurrence over the inputs `[B, T, D]`."""
        b, c, g, theta = self.transition()
        names = [spec.name for spec in self.state_specs()]
        if theta is None:
            y, h = diagonal(u, b, c, g, None, state[names[0]], lengths)
            return y, {names[0]: h}
        pair = torch.stack([state[name] for name in names], dim=-1)
        y, h = diagonal(u, b, c, g, theta, pair, lengths)
        return y, dict(zip(names, h.unbind(-1), strict=True))

    def transition(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """B̄, 2 C (real: C), log|Λ| and the angle of Λ (None: real), `[D, N]` (B̄, C: (re, im))."""
        dt = at_least_float32(self.log_dt).exp()[:, None]
        rate = at_least_float32(self.A_real_log).exp()
        c = at_least_float32(self.C)
        if not self.config.complex:
            g = -dt * rate
            return -_less_one(g) / rate, c, g, None
        imag = at_least_float32(self.A_imag)
        held = _zero_order_hold if self.config.discretization == "zoh" else _bilinear
        b, g, theta = held(dt, rate, imag)
        return b, 2 * c, g, theta


def undecayed(value: Tensor) -> nn.Parameter:
    """A parameter that weight decay leaves alone: zero is no neutral value of A."""
    parameter = nn.Parameter(value)
    parameter.no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def frequencies(init: str, size: int) -> Tensor:
    """Imaginary parts of the initial A, ``[N]`` float32."""
    n = torch.arange(size, dtype=torch.float32)
    if init == "s4d-lin":
        return math.pi * n
    if init == "s4d-inv":
        return 2 * size / math.pi * (2 * size / (2 * n + 1) - 1)
    imag: Tensor = torch.linalg.eigvals(normal_legs(2 * size)[0]).imag
    return imag.sort(descending=True)[0][:size].float()


def _less_one(g: Tensor) -> Tensor:
    """exp(g) - 1 by tanh, which ONNX has: the difference loses four digits at small steps."""
    return torch.tanh(g / 2) * (g.exp() + 1)


def _zero_order_hold(dt: Tensor, rate: Tensor, imag: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """B̄, log|Λ| and the angle of Λ of A = -rate + i imag (S4D eq. 4)."""
    g, theta = -dt * rate, dt * imag
    # Λ - 1 = re + i im, and 1 / A = (-rate - i imag) / |A|^2
    re = _less_one(g) * theta.cos() - 2 * (theta / 2).sin().square()
    im = g.exp() * theta.sin()
    b = torch.stack([im * imag - re * rate, -im * rate - re * imag], dim=-1)
    return b / (rate.square() + imag.square())[..., None], g, theta


def _bilinear(dt: Tensor, rate: Tensor, imag: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`_zero_order_hold`; with Δ/2 A = -p + i q, Λ = (1 - p + i q) / (1 + p - i q).

    |Λ|^2 = (1 - s) / (1 + s) with s = 2 p / (1 + p^2 + q^2), so log|Λ| = -atanh(s): the logarithm
    of the quotient would lose its digits at small steps, atanh near s = 1.
    """
    p, q = dt * rate / 2, dt * imag / 2
    below, above = (1 - p).square() + q.square(), (1 + p).square() + q.square()
    s = 4 * p / (below + above)
    quotient = (below / above).clamp(min=torch.finfo(s.dtype).tiny)  # Λ is 0 at p = 1, q = 0
    g = torch.where(s < 0.5, -torch.atanh(s.clamp(max=0.5)), quotient.log() / 2)
    theta = torch.atan2(q, 1 - p) + torch.atan2(q, 1 + p)
    b = torch.stack([dt * (1 + p), dt * q], dim=-1) / above[..., None]
    return b, g, theta
