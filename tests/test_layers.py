"""Projections in parts, in the form for GPUs: products, gradients, and what is left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin import layers
from edgelin.layers import project_aligned, project_in_parts

IN = 24
SIZES = [16, 3, 8, 13]
ALIGNED = [0, 2]  # the parts whose width is a multiple of 8


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form for GPUs on the CPU."""
    monkeypatch.setattr(layers, "_is_on_gpu", lambda x: True)


def projection(*, bias: bool = True, width: int = sum(SIZES)) -> nn.Linear:
    """Reproducible weights."""
    torch.manual_seed(0)
    return nn.Linear(IN, width, bias=bias)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def truth(linear: nn.Linear, x: Tensor) -> np.ndarray:
    """x W^T + b in float64."""
    w, b = linear.weight.detach().double().numpy(), linear.bias
    y: np.ndarray = np.einsum("btd,nd->btn", x.detach().double().numpy(), w)
    return y if b is None else y + b.detach().double().numpy()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch, time", [(1, 1), (3, 63)])
def test_parts_are_the_product(batch: int, time: int, dtype: torch.dtype, bias: bool) -> None:
    linear, x = projection(bias=bias).to(dtype), numbers(batch, time, IN).to(dtype)
    expected = np.split(truth(linear, x), np.cumsum(SIZES)[:-1], axis=-1)
    parts = project_in_parts(linear, x, SIZES)
    assert [part.shape[-1] for part in parts] == SIZES
    assert all(part.dtype == dtype for part in parts)
    assert all(parts[i].is_contiguous() for i in ALIGNED)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for part, wanted in zip(parts, expected, strict=True):
        largest = np.abs(wanted).max()
        np.testing.assert_allclose(
            part.detach().double(), wanted, rtol=0, atol=tolerance * max(1, largest)
        )


@pytest.mark.parametrize("width", [1, 3, 8, 17])
@pytest.mark.parametrize("bias", [True, False])
def test_few_columns_are_the_product(width: int, bias: bool) -> None:
    linear, x = projection(width=width, bias=bias), numbers(3, 65, IN)
    np.testing.assert_allclose(project_aligned(linear, x).detach(), truth(linear, x), atol=1e-6)


def test_every_product_has_a_multiple_of_eight_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    usual = F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(len(weight))
        return usual(x, weight, bias)

    monkeypatch.setattr(F, "linear", linear)
    project_in_parts(projection(), numbers(1, 2, IN), SIZES)
    project_aligned(projection(width=6), numbers(1, 2, IN))
    assert seen == [16, 8, 8, 16, 8]


def test_gradients_are_those_of_the_product() -> None:
    """dx = dy W, dW = dy^T x, db = sum dy."""
    linear, x = projection().double(), numbers(3, 65, IN).double().requires_grad_()
    dy = numbers(3, 65, sum(SIZES), seed=2).double()
    parts = project_in_parts(linear, x, SIZES)
    torch.autograd.backward(parts, dy.split(SIZES, dim=-1))
    rows, inputs = dy.flatten(0, 1).numpy(), x.detach().flatten(0, 1).numpy()
    grads = [p.grad for p in (x, linear.weight, linear.bias)]
    wanted = [rows @ linear.weight.detach().numpy(), rows.T @ inputs, rows.sum(0)]
    for grad, array in zip(grads, wanted, strict=True):
        assert grad is not None
        np.testing.assert_allclose(grad.reshape(array.shape), array, atol=1e-12)


class Adapter(nn.Linear):
    """What a library for adapters puts in the place of a projection."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice the product."""
        return 2 * super().forward(x)


class Quantised(Tensor):
    """A weight of another kind, which can't be cut."""


def adapted(linear: nn.Linear) -> nn.Linear:
    """The same weights in a subclass."""
    other = Adapter(IN, linear.out_features, bias=False)
    other.load_state_dict(linear.state_dict())
    return other


def hooked(register: str, hook: Callable[..., Any]) -> Callable[[nn.Linear], nn.Linear]:
    """Add a hook."""

    def change(linear: nn.Linear) -> nn.Linear:
        getattr(linear, register)(hook)
        return linear

    return change


def replaced(linear: nn.Linear) -> nn.Linear:
    """A ``forward`` of this one module."""
    usual = linear.forward
    linear.__dict__["forward"] = lambda x: 2 * usual(x)
    return linear


@pytest.mark.parametrize(
    "change",
    [
        adapted,
        replaced,
        hooked("register_forward_hook", lambda module, given, y: 2 * y),
        hooked("register_forward_pre_hook", lambda module, given: (2 * given[0],)),
    ],
)
def test_a_changed_projection_is_called(change: Callable[[nn.Linear], nn.Linear]) -> None:
    linear, x = projection(bias=False), numbers(1, 5, IN)
    expected = 2 * truth(linear, x)
    changed = change(copy.deepcopy(linear))
    got = torch.cat(project_in_parts(changed, x, SIZES), dim=-1)
    np.testing.assert_allclose(got.detach(), expected, atol=1e-5)
    np.testing.assert_allclose(project_aligned(changed, x).detach(), expected, atol=1e-5)


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_a_backward_hook_sees_the_gradient(register: str) -> None:
    linear, seen = projection(), list[Any]()
    getattr(linear, register)(lambda module, *grads: seen.append(grads))
    x = numbers(1, 5, IN).requires_grad_()
    torch.cat(project_in_parts(linear, x, SIZES), dim=-1).sum().backward()
    assert len(seen) == 1


def test_a_weight_of_another_kind_is_not_cut() -> None:
    linear = projection(bias=False)
    usual = layers._is_plain(linear)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Quantised))
    assert usual and not layers._is_plain(linear)


def test_functional_call_and_vmap_take_the_given_weights() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = projection()

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(project_in_parts(self.proj, x, SIZES), dim=-1)

    module, x = Whole(), numbers(1, 5, IN)
    weights = numbers(2, sum(SIZES), IN, seed=3)

    def call(weight: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(module, {"proj.weight": weight}, (x,))
        return y

    got = torch.func.vmap(call)(weights)
    for row, weight in zip(got, weights, strict=True):
        module.proj.weight.data.copy_(weight)
        np.testing.assert_allclose(row.detach(), truth(module.proj, x), atol=1e-5)
    grad = torch.func.grad(lambda w: call(w).sum())(weights[0])
    np.testing.assert_allclose(grad, x.sum((0, 1)).expand_as(grad), atol=1e-5)


def test_autocast_multiplies_in_bfloat16() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        parts = project_in_parts(projection(), numbers(1, 5, IN), SIZES)
    assert all(part.dtype == torch.bfloat16 for part in parts)


def test_it_compiles_as_one_graph() -> None:
    linear, x = projection(), numbers(3, 5, IN)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        return (*project_in_parts(linear, x, SIZES), project_aligned(linear, x))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for got, wanted in zip(compiled(x), call(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_only_a_gpu_that_does_not_export_takes_this_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    assert layers._is_on_gpu(on_gpu) and not layers._is_on_gpu(numbers(1))
    monkeypatch.setattr(layers, "is_exporting", lambda: True)
    assert not layers._is_on_gpu(on_gpu)
