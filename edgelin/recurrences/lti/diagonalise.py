"""A dense LTI system as a diagonal one: A = V Λ V^-1, h' = V^-1 h, B' = V^-1 B, C' = C V.

The columns of V are scaled so that B' = 1: what is left of B and C are their products, which no
choice of eigenvectors changes. Of a conjugate pair the one with a positive imaginary part is kept;
whoever reads the state takes twice the real part of it. A real eigenvalue is an entry of its own.

Source: Gu et al. 2022, "Efficiently modeling long sequences with structured state spaces" (S4),
arXiv:2111.00396, lemmas 3.1 and 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Modes:
    """Diagonal form of D systems with E entries each, the most that any of them needs.

    Args:
        eigenvalues: ``[D, E]`` complex128, imaginary part >= 0, -1 where an entry is not needed.
        weights: C' of B' = 1, ``[D, E]`` complex128, 0 where an entry is not needed.
        is_pair: ``[D, E]``: whether an entry stands for a conjugate pair.
    """

    eigenvalues: Tensor
    weights: Tensor
    is_pair: Tensor


def condition(a: Tensor) -> float:
    """Largest condition number of V among the matrices ``[..., N, N]``, columns of unit length.

    It is infinite, or near 1e16, where a matrix is defective.
    """
    vectors = torch.linalg.eig(a.detach().double().cpu())[1]
    return float(torch.linalg.cond(vectors).max())


def diagonalise(a: Tensor, b: Tensor, c: Tensor) -> Modes:
    """Diagonalise D systems in float64 on the CPU; check :func:`condition` first.

    Args:
        a: ``[D, N, N]``, continuous or discrete.
        b: ``[D, N]``.
        c: ``[D, N]``.
    """
    a, b, c = (v.double().cpu() for v in (a, b, c))
    values, vectors = torch.linalg.eig(a)
    inputs = torch.linalg.solve(vectors, b[..., None].to(vectors.dtype))[..., 0]
    weights = (c[:, None].to(vectors.dtype) @ vectors)[:, 0] * inputs
    kept = values.imag >= 0
    # Kept ones first, by frequency and rate: an order that another machine finds too.
    order = torch.argsort(values.real, dim=1)
    frequency = torch.where(kept, values.imag, torch.inf).gather(1, order)
    order = order.gather(1, torch.argsort(frequency, dim=1, stable=True))
    order = order[:, : int(kept.sum(1).max())]
    values, weights, kept = (v.gather(1, order) for v in (values, weights, kept))
    return Modes(
        torch.where(kept, values, torch.full_like(values, -1)),
        torch.where(kept, weights, torch.zeros_like(weights)),
        kept & (values.imag > 0),
    )
