"""Triton kernels of the delta rule with a decay for every key against a float64 loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparisons import out_gradients, rounded, to
from delta_cases import HARD, SCALE, close, inputs, with_gradients
from torch import Tensor

from edgelin.recurrences.delta.reference import reference


def kernel_results(made: dict[str, Any], dtype: torch.dtype, device: str) -> list[Tensor]:
    """o, the last state and all gradients from the kernels."""
    from edgelin.recurrences.dplr import kernel, kernel_backward

    arguments = to(made, dtype, device)
    do, dstate = out_gradients(made)
    *outputs, carried = kernel.delta_forward(*arguments, SCALE)
    ups = do.to(device, dtype), dstate.to(device, torch.float32)
    kept = kernel.Carried.of(carried.distinct())
    gradients = kernel_backward.delta_backward(*arguments, SCALE, *ups, kept)
    again = kernel_backward.delta_backward(*arguments, SCALE, *ups)
    assert all(map(torch.equal, gradients, again))
    results = [*outputs, *gradients]
    wide = [dtype, torch.float32, *[dtype] * 4, torch.float32, torch.float32]
    assert [r.dtype for r in results] == wide
    return results


def compare(made: dict[str, Any], dtype: torch.dtype, device: str, bound: float) -> None:
    """Values and gradients, both from the inputs as they are in ``dtype``."""
    made = rounded(made, dtype)
    expected = with_gradients(reference, to(made, torch.float64), made)
    close(kernel_results(made, dtype, device), expected, bound)


@pytest.mark.parametrize(
    "time, key, value, batch, heads",
    [(1, 8, 20, 3, 2), (63, 6, 5, 1, 2), (64, 20, 8, 1, 1), (130, 40, 36, 1, 1)],
)
def test_kernels(time: int, key: int, value: int, batch: int, heads: int, device: str) -> None:
    made = inputs(time, batch=batch, heads=heads, key=key, value=value, by_key=True)
    compare(made, torch.float32, device, 1e-5)


@pytest.mark.parametrize("kind", HARD)
def test_kernels_at_hard_inputs(kind: str, device: str) -> None:
    made = inputs(70, batch=1, heads=1, kind=kind, by_key=True)
    compare(made, torch.float32, device, 1e-4)


def test_kernels_in_bfloat16(device: str, bfloat16_dots: None) -> None:
    made = inputs(70, batch=1, heads=1, key=20, value=9, by_key=True)
    compare(made, torch.bfloat16, device, 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("kind", [None, "strong decay", "mixed decay"])
@pytest.mark.parametrize("time, key, value", [(300, 128, 128), (130, 64, 128), (1, 64, 64)])
def test_kernels_on_a_gpu(
    time: int, key: int, value: int, kind: str | None, dtype: torch.dtype, bound: float
) -> None:
    made = inputs(time, heads=4, key=key, value=value, kind=kind, by_key=True)
    made["q"] = made["q"] * key**-0.5
    compare(made, dtype, "cuda", bound)
