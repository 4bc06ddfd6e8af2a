"""From a continuous system h' = A h + B x, y = C h to a discrete one with step Δ.

    zoh:       Ā = exp(Δ A) ;  B̄ = A^-1 (Ā - 1) B, the input held constant over a step
    bilinear:  Ā = (1 - Δ/2 A)^-1 (1 + Δ/2 A) ;  B̄ = (1 - Δ/2 A)^-1 Δ B (Tustin)

The zero-order hold is the exponential of the augmented matrix (Van Loan 1978),
exp(Δ [[A, B], [0, 0]]) = [[Ā, B̄], [0, 1]], which asks for no inverse of A.

Sources: LSSL, arXiv:2110.13985, section 2; S4, arXiv:2111.00396, equation 3 (bilinear); S4D,
arXiv:2206.11893, equation 4 (both).
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgelin.errors import EdgelinError

METHODS = ("zoh", "bilinear")


def check_method(name: str) -> None:
    """Raise EdgelinError unless this names a discretisation."""
    if name not in METHODS:
        raise EdgelinError(f"discretization is {name!r}; give one of {', '.join(METHODS)}")


def discretise(a: Tensor, b: Tensor, dt: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """Discretise D systems in float64.

    Args:
        a: Continuous A ``[D, N, N]``.
        b: Continuous B ``[D, N]``.
        dt: Step Δ ``[D]``.
        method: ``"zoh"`` or ``"bilinear"``.

    Returns:
        Ā ``[D, N, N]`` and B̄ ``[D, N]``, float64.
    """
    step = dt.double()[:, None, None]
    a, b = step * a.double(), step * b.double()[..., None]
    if method == "bilinear":
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        both = torch.linalg.solve(eye - a / 2, torch.cat([eye + a / 2, b], dim=2))
    else:
        augmented = torch.nn.functional.pad(torch.cat([a, b], dim=2), (0, 0, 0, 1))
        both = torch.matrix_exp(augmented)[:, :-1]
    return both[..., :-1], both[..., -1]
