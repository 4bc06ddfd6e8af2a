"""Dense linear time-invariant state-space layer (LSSL, S4 without a structure) in a gated block.

    h_t = Ā h_{t-1} + B̄ u_t ;  s_t = C h_t + D u_t ;  y_t = W_out (s_t * silu(z_t))
    A = (W - W^T) / 2 - L L^T - ε ;  [u, z] = W_in x

Every channel has a dense A of its own; Ā and B̄ come from A, B and the step Δ by zero-order hold or
bilinear discretisation, in float64. A, B, C, D and Δ are learned. A + A^T is negative definite, as
in the HiPPO matrices that A starts from, so no training step makes a state that grows (a free A
does: SaShiMi, section 4.1). Training is a convolution by FFT.

Export changes the basis: the layer becomes an ``ssm`` layer with A's eigenvalues, whose step costs
N products a channel instead of N^2. It is refused where eigenvectors are so nearly parallel that
float32 loses the answer; ``export_form = "dense"`` then exports the layer as it is.

Sources: Gu et al. 2021, "Combining recurrent, convolutional, and continuous-time models with
linear state-space layers" (LSSL), arXiv:2110.13985, equations 1 to 5; Gu et al. 2022, "Efficiently
modeling long sequences with structured state spaces" (S4), arXiv:2111.00396, section 3.1 and lemmas
3.1 and 3.2 (diagonalisation); Goel et al. 2022, "It's raw! Audio generation with state-space
models" (SaShiMi), arXiv:2202.09729, section 4.1; initial values as in ``ssm``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from edgelin.errors import EdgelinError
from edgelin.mixers import ssm
from edgelin.recurrences.lti import hippo, lti
from edgelin.recurrences.lti.diagonalise import condition, diagonalise
from edgelin.recurrences.lti.discretise import discretise
from edgelin.state import StateSpec

# Up to here a float32 step stays within 1e-4 of the dense system over 4,096 tokens (measured).
MOST_CONDITION = 300.0
_LEAST_RATE = 1e-4  # ε: keeps the real parts of A's eigenvalues off zero
_INITS: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "s4d-legs": hippo.normal_legs,
    "hippo-legs": hippo.legs,
    "hippo-legt": hippo.legt,
}
_EXPORT_FORMS = ("diagonal", "dense")


@dataclass(frozen=True)
class Config(ssm.Sizes):
    """Sizes of the mixer.

    Args:
        init: Initial A and B: ``"s4d-legs"`` (the normal part of HiPPO-LegS), ``"hippo-legs"``
            or ``"hippo-legt"``.
        export_form: ``"diagonal"`` or ``"dense"``.
    """

    init: str = "s4d-legs"
    export_form: str = "diagonal"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("init", tuple(_INITS)), ("export_form", _EXPORT_FORMS)):
            value = getattr(self, name)
            if value not in allowed:
                raise EdgelinError(f"{name} is {value!r}; give one of {', '.join(allowed)}")

    @property
    def export_obstacle(self) -> str | None:
        """Why the initial A can't be exported, which training seldom changes; None: it can."""
        found = condition(_INITS[self.init](self.state_size)[0])
        if self.export_form == "dense" or found <= MOST_CONDITION:
            return None
        return (
            f"lti from {self.init} with {self.state_size} states can't be exported diagonal (the "
            f"eigenvectors have condition number {found:.2g}, allowed is {MOST_CONDITION:g}); "
            f'take another init, or export_form = "dense"'
        )


class Mixer(ssm.GatedBlock):
    """Gated dense state-space layer.

    Args:
        config: Sizes.
        hidden_size: Width of the residual stream.
        layer: Index that names the states.
        norm_eps: Not used; every mixer takes it.
    """

    def __init__(self, config: Config, hidden_size: int, layer: int, norm_eps: float) -> None:
        super().__init__(config, hidden_size, layer)
        self.config = config
        a, b = _INITS[config.init](config.state_size)
        skew, root = _split(a)
        channels = config.inner_size
        self.A_skew = ssm.undecayed(skew.float().repeat(channels, 1, 1))
        self.A_root = ssm.undecayed(root.float().repeat(channels, 1, 1))
        self.B = nn.Parameter(b.float().repeat(channels, 1))
        self.C = nn.Parameter(torch.randn(channels, config.state_size))

    def state_specs(self) -> list[StateSpec]:
        """h."""
        return [_dense_spec(self.config, self.layer)]

    def recur(
        self, u: Tensor, state: dict[str, Tensor], lengths: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the recurrence over the inputs `[B, T, D]`."""
        a, b = self.discrete()
        y, h = lti(u, a, b, self.C.double(), state[f"ssm.{self.layer}"], lengths)
        return y, {f"ssm.{self.layer}": h}

    def continuous(self) -> Tensor:
        """A `[D, N, N]` in float64."""
        skew, root = self.A_skew.double(), self.A_root.double()
        eye = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
        return (skew - skew.mT) / 2 - root @ root.mT - _LEAST_RATE * eye

    def discrete(self) -> tuple[Tensor, Tensor]:
        """Ā `[D, N, N]` and B̄ `[D, N]` in float64."""
        dt = self.log_dt.double().exp()
        return discretise(self.continuous(), self.B, dt, self.config.discretization)

    @torch.no_grad()
    def step_form(self) -> nn.Module:
        """The layer as it is exported, with constant weights.

        Raises:
            EdgelinError: A has no well-conditioned basis of eigenvectors.
        """
        form = DenseStep(self) if self.config.export_form == "dense" else self._diagonal()
        form.in_gate_proj, form.out_proj = self.in_gate_proj, self.out_proj
        form.log_dt, form.D = self.log_dt, self.D
        return form

    def _diagonal(self) -> ssm.Mixer:
        """The same system as an ``ssm`` layer, whose projections are not yet this layer's."""
        a = self.continuous()
        found = condition(a)
        if not found <= MOST_CONDITION:
            raise EdgelinError(
                f"layer {self.layer} can't be diagonalised: the eigenvectors of its A have "
                f"condition number {found:.2g}, allowed is {MOST_CONDITION:g}; set "
                f'export_form = "dense" in the mixer\'s table of config.json'
            )
        modes = diagonalise(a, self.B, self.C)
        shared = {f.name: getattr(self.config, f.name) for f in fields(ssm.Sizes)}
        shared["state_size"] = modes.weights.shape[1]
        hidden = self.in_gate_proj.in_features
        form = ssm.Mixer(ssm.Config(**shared), hidden, self.layer, norm_eps=0.0)
        # ssm doubles what it reads of a pair
        c = torch.view_as_real(torch.where(modes.is_pair, modes.weights, modes.weights / 2))
        form.A_real_log = nn.Parameter((-modes.eigenvalues.real).log().to(self.C))
        form.A_imag = nn.Parameter(modes.eigenvalues.imag.to(self.C))
        form.C = nn.Parameter(c.to(self.C))
        return form


class DenseStep(ssm.GatedBlock):
    """The layer with its discrete A and B as weights.

    Args:
        mixer: The layer that was trained.
    """

    def __init__(self, mixer: Mixer) -> None:
        super().__init__(mixer.config, mixer.in_gate_proj.in_features, mixer.layer)
        self.config = mixer.config
        a, b = mixer.discrete()
        self.A, self.B = (nn.Parameter(v.to(mixer.C)) for v in (a, b))
        self.C = mixer.C

    def state_specs(self) -> list[StateSpec]:
        """h."""
        return [_dense_spec(self.config, self.layer)]

    def recur(
        self, u: Tensor, state: dict[str, Tensor], lengths: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the recurrence over the inputs `[B, T, D]`."""
        y, h = lti(u, self.A, self.B, self.C, state[f"ssm.{self.layer}"], lengths)
        return y, {f"ssm.{self.layer}": h}


def _dense_spec(config: Config, layer: int) -> StateSpec:
    shape = (config.inner_size, config.state_size)
    return StateSpec("ssm", layer, shape, "batch channels state")


def _split(a: Tensor) -> tuple[Tensor, Tensor]:
    """W and L of an A `[N, N]` whose symmetric part is negative semidefinite."""
    skew, symmetric = (a - a.mT) / 2, (a + a.mT) / 2
    values, vectors = torch.linalg.eigh(-symmetric)
    lengths = (values - _LEAST_RATE).clamp(min=0).sqrt()
    return skew, vectors * lengths @ vectors.mT
