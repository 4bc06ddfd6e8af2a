"""Recurrences under ``torch.func``: what it makes of them is what it makes of their loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparisons import error
from torch import Tensor
from torch.autograd import forward_ad

from edgelin.recurrences.delta import delta
from edgelin.recurrences.delta.reference import reference as delta_loop
from edgelin.recurrences.diagonal import diagonal
from edgelin.recurrences.diagonal.reference import forward as diagonal_loop
from edgelin.recurrences.dplr import dplr
from edgelin.recurrences.dplr.reference import reference as dplr_loop
from edgelin.recurrences.linear import linear
from edgelin.recurrences.linear.reference import forward as linear_loop

Call = Callable[..., Any]
B, T, H, K, V = 2, 5, 2, 4, 3
SHAPES = {
    "q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, V), "a": (B, T, H, K), "b": (B, T, H, K),
    "g": (B, T, H), "by_key": (B, T, H, K), "beta": (B, T, H), "state": (B, H, K, V),
    "x": (B, T, K), "weight": (K, V, 2), "decay": (K, V), "angle": (K, V), "h": (B, K, V, 2),
}  # fmt: skip
CASES: dict[str, tuple[str, Call, Call]] = {
    "linear": ("q k v g state", linear, lambda q, k, v, g, s: linear_loop(q, k, v, g, s, 1.0)),
    "linear, no decay": (
        "q k v state",
        lambda q, k, v, s: linear(q, k, v, None, s),
        lambda q, k, v, s: linear_loop(q, k, v, None, s, 1.0),
    ),
    "delta": ("q k v beta g state", delta, delta_loop),
    "delta, decay a key": ("q k v beta by_key state", delta, delta_loop),
    "dplr": ("q k v a b by_key state", dplr, dplr_loop),
    "diagonal": ("x weight weight decay angle h", diagonal, diagonal_loop),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[list[Tensor], Call, Call]:
    names, call, loop = CASES[request.param]
    generator = torch.Generator().manual_seed(3)
    made = [0.5 * torch.randn(SHAPES[name], generator=generator) for name in names.split()]
    negative = ("g", "by_key", "decay")
    made = [-x.abs() if n in negative else x for n, x in zip(names.split(), made, strict=True)]
    return made, call, loop


def loss(call: Call) -> Call:
    """A number that all outputs have a part in."""
    return lambda *inputs: sum(y.double().cos().sum() for y in call(*inputs))


def compare(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) < 2e-6


def test_gradients(case: Any) -> None:
    inputs, call, loop = case
    exact, places = [x.double() for x in inputs], tuple(range(len(inputs)))
    for take in (torch.func.grad, torch.func.jacrev):
        compare(take(loss(call), places)(*inputs), take(loss(loop), places)(*exact))


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("records", [True, False])
def test_many_at_once(case: Any, place: int, dim: int, records: bool) -> None:
    """One input has many values, the others one."""
    inputs, call, loop = case
    place %= len(inputs)
    many = torch.stack([inputs[place], 0.5 * inputs[place]], dim)
    dims = tuple(dim if i == place else None for i in range(len(inputs)))

    def expected(run: Call) -> Any:
        each = [[*inputs[:place], x, *inputs[place + 1 :]] for x in many.unbind(dim)]
        return [run(*[x.double() for x in one]) for one in each]

    given = [*inputs[:place], many, *inputs[place + 1 :]]
    with torch.set_grad_enabled(records):
        found = torch.vmap(call, dims)(*given)
    compare(found, [torch.stack(y) for y in zip(*expected(loop), strict=True)])
    if records:
        gradient = torch.vmap(torch.func.grad(loss(call), place), dims)(*given)
        compare([gradient], [torch.stack(expected(torch.func.grad(loss(loop), place)))])


def test_gradients_of_many_at_once(case: Any) -> None:
    inputs, call, loop = case
    many = [torch.stack([x, 0.5 * x]).requires_grad_() for x in inputs]
    o, state = torch.vmap(call)(*many)
    found = torch.autograd.grad((o.cos().sum() + state.cos().sum()), many)
    places = tuple(range(len(inputs)))
    exact = [torch.func.grad(loss(loop), places)(*[x[i].double() for x in many]) for i in (0, 1)]
    compare(found, [torch.stack(pair) for pair in zip(*exact, strict=True)])


def test_packed_sequences() -> None:
    """Of different lengths, which are put into rows and taken out of them."""
    lengths, ends = [1, 0, 130, 2], torch.tensor([0, 1, 1, 131, 133])
    generator = torch.Generator().manual_seed(3)
    q, k = (0.3 * torch.randn(1, 133, H, K, generator=generator) for _ in range(2))
    v, state = torch.randn(2, 133, H, V, generator=generator), torch.zeros(4, H, K, V)
    found = torch.vmap(
        torch.func.grad(loss(lambda v: linear(q, k, v, None, state, cu_seqlens=ends)))
    )(v[:, None])

    def each(v: Tensor) -> list[Tensor]:
        rows = [x.double().split(lengths, 1) for x in (q, k, v)]
        found: list[Tensor] = []
        for a, b, c in zip(*rows, strict=True):
            found += linear_loop(a, b, c, None, state[:1].double(), 1.0) if a.shape[1] else ()
        return found

    compare(found, [torch.func.grad(loss(each))(x[None]) for x in v.double()])


def test_what_there_is_not(case: Any) -> None:
    """Where PyTorch would leave a recurrence out, its derivative would be zero without a word."""
    inputs, call, _ = case

    def first(x: Tensor) -> Tensor:
        gradient: Tensor = torch.func.grad(loss(call))(x, *inputs[1:])
        return gradient.square().sum()

    with pytest.raises(RuntimeError, match="has no second derivatives"):
        torch.func.grad(first)(inputs[0])
    with pytest.raises(NotImplementedError, match="has no forward mode"):
        torch.func.jvp(lambda x: call(x, *inputs[1:]), (inputs[0],), (inputs[0],))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="has no forward mode"):
        call(forward_ad.make_dual(inputs[0], inputs[0]), *inputs[1:])
