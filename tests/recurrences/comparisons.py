"""What the tests of the matrix-state recurrences share, on a GPU too: dtypes, gradients, errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Tensor | None]


def to(made: Inputs, dtype: torch.dtype, device: str = "cpu") -> list[Any]:
    """Arguments of the op: g and state keep float32 where the rest is bfloat16."""
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    kinds = {"g": wide, "state": wide}
    return [None if x is None else x.to(device, kinds.get(n, dtype)) for n, x in made.items()]


def rounded(made: Inputs, dtype: torch.dtype) -> Inputs:
    """What the op sees in ``dtype``, in float64 again."""
    values = (None if x is None else x.double() for x in to(made, dtype))
    return dict(zip(made, values, strict=True))


def error(result: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    assert result.shape == expected.shape
    largest = expected.detach().abs().max().clamp(min=1e-30)
    return float((result.detach().cpu().double() - expected.detach().cpu()).abs().max() / largest)


def out_gradients(made: Inputs) -> tuple[Tensor, Tensor]:
    """Fixed random gradients of the outputs and of the last state."""
    generator = torch.Generator().manual_seed(1)
    do, dstate = (
        torch.randn(made[n].shape, generator=generator, dtype=torch.float64)  # type: ignore[union-attr]
        for n in ("v", "state")
    )
    return do, dstate
