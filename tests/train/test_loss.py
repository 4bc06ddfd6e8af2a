"""Chunked cross-entropy beside torch's own in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from edgelin.train import loss as subject


@pytest.mark.parametrize("rows", [1, 4, 5, 10, 8192])
def test_value_and_gradients(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(subject, "_ROWS", rows)
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(9, (2, 5))
    value = subject.cross_entropy(hidden, weight, targets)
    got = torch.autograd.grad(value * 3, [hidden, weight])
    logits = hidden @ weight.T
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    want = torch.autograd.grad(expected * 3, [hidden, weight])
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(got, want)


def test_autocast_multiplies_in_bfloat16(device: str) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(50, 32, device=device, requires_grad=True)
    weight = torch.randn(70, 32, device=device, requires_grad=True)
    targets = torch.randint(70, (50,), device=device)
    with torch.autocast(device, torch.bfloat16):
        value = subject.cross_entropy(hidden, weight, targets)
    value.backward()  # type: ignore[no-untyped-call]
    expected = functional.cross_entropy((hidden @ weight.T).double(), targets)
    assert value.dtype == torch.float32
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32
    want = torch.autograd.grad(expected, [hidden, weight])
    torch.testing.assert_close(value.double(), expected, rtol=2e-2, atol=0)
    torch.testing.assert_close(hidden.grad, want[0], rtol=5e-2, atol=2e-3)
    torch.testing.assert_close(weight.grad, want[1], rtol=5e-2, atol=2e-3)


def test_large_logits_stay_finite() -> None:
    hidden = torch.full((2, 4), 1e4)
    weight = torch.eye(4) * 100
    assert torch.isfinite(subject.cross_entropy(hidden, weight, torch.tensor([0, 3])))
