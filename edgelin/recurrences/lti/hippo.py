"""Continuous systems h' = A h + B x that remember their input's past as Legendre coefficients.

    LegS:    A_nk = -r_n r_k (n > k), -(n + 1) (n = k), 0 (n < k) ;  B_n = r_n
    LegT:    A_nk = -r_n r_k (n >= k), -(-1)^{n-k} r_n r_k (n < k) ;  B_n = r_n
    S4D-LegS (the normal part of LegS):
             A_nk = -r_n r_k / 2 (n > k), -1/2 (n = k), r_n r_k / 2 (n < k) ;  B_n = r_n / 2

with r_n = sqrt(2 n + 1). In all of them A + A^T is negative semidefinite: none can grow. LegS is
the dense example that no basis of eigenvectors serves (their condition number grows like 2^{4N/3});
its normal part has orthogonal ones, and tends to the same kernel (S4D, theorem 3).

Sources: Gu et al. 2020, "HiPPO", arXiv:2008.07669, equations 1 (LegT) and 3 (LegS), scaled to an
orthonormal basis as in Gu et al. 2022, arXiv:2206.12037; S4D, arXiv:2206.11893, equations 5 and 6;
S4, arXiv:2111.00396, lemma 3.2 (the condition number).
"""

from __future__ import annotations

import torch
from torch import Tensor


def legs(size: int) -> tuple[Tensor, Tensor]:
    """A ``[N, N]`` and B ``[N]`` of LegS, float64."""
    root, product = _roots(size)
    n = torch.arange(size, dtype=torch.float64)
    return -product.tril(-1) - torch.diag(n + 1), root


def legt(size: int) -> tuple[Tensor, Tensor]:
    """A ``[N, N]`` and B ``[N]`` of LegT over a window of length 1, float64."""
    root, product = _roots(size)
    sign = (-1.0) ** torch.arange(size, dtype=torch.float64)
    alternating = torch.outer(sign, sign)
    return -(product.tril() + (alternating * product).triu(1)), root


def normal_legs(size: int) -> tuple[Tensor, Tensor]:
    """A ``[N, N]`` and B ``[N]`` of the normal part of LegS, float64."""
    root, product = _roots(size)
    eye = torch.eye(size, dtype=torch.float64)
    return (product.triu(1) - product.tril(-1) - eye) / 2, root / 2


def _roots(size: int) -> tuple[Tensor, Tensor]:
    """r and its outer product with itself."""
    root = (2 * torch.arange(size, dtype=torch.float64) + 1).sqrt()
    return root, torch.outer(root, root)
