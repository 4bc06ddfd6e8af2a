"""The kernels of the normalised linear recurrence against the float64 loop and its gradients."""

from __future__ import annotations

import pytest
import torch
from linear_cases import error, make
from torch import Tensor

from edgelin.recurrences.linear import linear, reference

EPS, SCALE = 1e-2, 0.3
NAMES = ("q", "k", "v", "g", "state", "normalizer", "floor")
Inputs = list[Tensor | None]


def inputs(decay: str, time: int, dtype: torch.dtype, floored: bool, **sizes: int) -> Inputs:
    """Positive queries and keys, or, with a floor, of both signs, which puts some sums below it."""
    q, k, v, g, state = make(decay, time, dtype=dtype, **sizes)
    rng = torch.Generator().manual_seed(7)
    normalizer = torch.rand(state.shape[:3], generator=rng)
    if not floored:
        return [q.abs(), k.abs(), v, g, state.abs(), normalizer, None]
    return [q, k, v, g, state, normalizer, 0.5 + torch.rand(v.shape[:3], generator=rng)]


def truth(made: Inputs, ups: list[Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients by autograd through the sequential form in float64."""
    leaves = [None if x is None else x.double().requires_grad_() for x in made]
    q, k, v, g, state, normalizer, floor = leaves
    assert k is not None and normalizer is not None and v is not None
    o, last = reference.forward(q, k, v, g, state, SCALE)
    ones = torch.ones_like(v[..., :1])
    sums, z = reference.forward(q, k, ones, g, normalizer[..., None], SCALE)
    if floor is not None:
        sums = torch.maximum(sums.abs(), floor[..., None])
    outputs = [o / (sums + EPS), last, z[..., 0]]
    given = {n: x for n, x in zip(NAMES, leaves, strict=True) if x is not None}
    grads = torch.autograd.grad(outputs, list(given.values()), [up.double() for up in ups])
    results = dict(zip(("o", "last", "z"), outputs, strict=True))
    return results | {f"d{n}": x for n, x in zip(given, grads, strict=True)}


def gradients_of_outputs(made: Inputs) -> list[Tensor]:
    """Random ones, of o, the state and the normaliser."""
    rng = torch.Generator().manual_seed(1)
    like = [x for x in (made[2], made[4], made[5]) if x is not None]
    return [torch.randn(x.shape, generator=rng).to(x.dtype) for x in like]


def check(made: Inputs, found: dict[str, Tensor], ups: list[Tensor], bound: float) -> None:
    """All results; a decay's gradient is a sum of q dq - k dk, whose rounding it has."""
    want = truth(made, ups)
    assert found.keys() == want.keys()
    errors = {name: error(found[name], want[name]) for name in want}
    if "dg" in errors:
        q = made[0]
        assert q is not None
        noise = (q.double() * want["dq"]).abs().max() / want["dg"].abs().max()
        errors["dg"] /= max(1.0, float(noise))
    assert max(errors.values()) < bound, errors


def run(made: Inputs, ups: list[Tensor], device: str) -> dict[str, Tensor]:
    """By the kernels."""
    from edgelin.recurrences.linear import kernel_normalizer

    moved = [None if x is None else x.to(device) for x in made]
    *outputs, kept = kernel_normalizer.forward(*moved, SCALE, EPS)
    assert [x.shape for x in kept] == [x.shape for x in kernel_normalizer.allocate(*moved[:3])]
    ups = [up.to(device) for up in ups]
    grads = kernel_normalizer.backward(*moved, SCALE, EPS, *ups, [outputs[0], *kept])
    again = kernel_normalizer.backward(*moved, SCALE, EPS, *ups, [outputs[0], kept[0]])
    assert all(map(torch.equal, grads, again))
    results = dict(zip(("o", "last", "z"), outputs, strict=True))
    for name, x, grad in zip(NAMES, made, grads, strict=True):
        if x is None:
            assert grad.numel() == 0
        else:
            assert grad.dtype == x.dtype
            results[f"d{name}"] = grad
    return results


@pytest.mark.parametrize("floored", [False, True])
@pytest.mark.parametrize("decay", ["none", "head"])
@pytest.mark.parametrize("time, batch, heads", [(1, 3, 1), (65, 3, 1), (130, 1, 2)])
def test_kernels(
    time: int, batch: int, heads: int, decay: str, floored: bool, device: str, short_segments: None
) -> None:
    made = inputs(decay, time, torch.float32, floored, batch=batch, heads=heads, key=20, value=12)
    ups = gradients_of_outputs(made)
    check(made, run(made, ups, device), ups, 5e-6)


@pytest.mark.parametrize("decay", ["none", "head"])
def test_shared_queries_and_keys(decay: str, device: str, short_segments: None) -> None:
    made = inputs(decay, 70, torch.float32, False, batch=2, heads=3, key=20, value=12)
    for i in range(2):
        x = made[i]
        assert x is not None
        made[i] = x[:, :, :1].expand(-1, -1, 3, -1)
    ups = gradients_of_outputs(made)
    check(made, run(made, ups, device), ups, 5e-6)


@pytest.mark.parametrize("decay", ["none", "head"])
def test_bfloat16(decay: str, device: str, short_segments: None) -> None:
    """Sums, their state and their gradient are float32 whatever the values are."""
    made = inputs(decay, 130, torch.bfloat16, False, key=64, value=64)
    ups = gradients_of_outputs(made)
    found = run(made, ups, device)
    check(made, found, ups, 2e-2)
    assert error(found["z"], truth(made, ups)["z"]) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("floored", [False, True])
@pytest.mark.parametrize("decay", ["none", "head"])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("key, value", [(64, 64), (128, 128), (64, 128), (256, 256)])
def test_on_a_gpu(
    key: int, value: int, dtype: torch.dtype, bound: float, decay: str, floored: bool, device: str
) -> None:
    """The public function under autograd, over several segments."""
    made = inputs(decay, 1100, dtype, floored, batch=2, key=key, value=value)
    ups = gradients_of_outputs(made)
    leaves = [None if x is None else x.to(device).requires_grad_() for x in made]
    q, k, v, g, state, normalizer, floor = leaves
    assert q is not None and k is not None and v is not None and state is not None
    outputs = linear(q, k, v, g, state, scale=SCALE, normalizer=normalizer, floor=floor, eps=EPS)
    given = {n: x for n, x in zip(NAMES, leaves, strict=True) if x is not None}
    grads = torch.autograd.grad(outputs, list(given.values()), [up.to(device) for up in ups])
    found = dict(zip(("o", "last", "z"), outputs, strict=True))
    if floored:  # sums of both signs cancel, and numerators are larger than what is left of them
        bound *= 10
    check(made, found | {f"d{n}": x for n, x in zip(given, grads, strict=True)}, ups, bound)
