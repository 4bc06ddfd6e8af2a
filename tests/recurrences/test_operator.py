"""Ordinary calls on a GPU go past the custom ops: same numbers, same rules of autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from edgelin.recurrences import operator
from edgelin.recurrences.delta import delta
from edgelin.recurrences.diagonal import diagonal
from edgelin.recurrences.dplr import dplr
from edgelin.recurrences.linear import linear

Call = Callable[..., tuple[Tensor, ...]]
TIME, HEADS, KEY, VALUE = 65, 2, 4, 3


def draw(*shape: int) -> Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(len(shape)))


def given() -> dict[str, Tensor]:
    rows = (TIME, HEADS)
    made = {name: draw(*rows, KEY) * (0.1 * i + 0.3) for i, name in enumerate("qkab")}
    made |= {"v": draw(*rows, VALUE), "g": -draw(*rows).abs(), "beta": draw(*rows).sigmoid()}
    made |= {"by_key": -draw(*rows, KEY).abs(), "state": draw(HEADS, KEY, VALUE)}
    made |= {"x": draw(TIME, 6), "decay": -draw(6, 2)[0].abs(), "angle": draw(6, 2)[0]}
    made |= {"weight": draw(6, 2, 2)[0], "h": draw(6, 2, 2)}
    return {name: x.requires_grad_() for name, x in made.items()}


CALLS: dict[str, tuple[str, Call]] = {
    "linear": ("q k v state", lambda q, k, v, s: linear(q, k, v, None, s)),
    "linear, decay": ("q k v g state", linear),
    "linear, bonus": ("q k v by_key state a", lambda *x: linear(*x[:5], bonus=x[5][0, 0])),
    "delta": ("q k v beta state", lambda q, k, v, b, s: delta(q, k, v, b, None, s)),
    "delta, decay a key": ("q k v beta by_key state", delta),
    "dplr": ("q k v a b by_key state", dplr),
    "diagonal": ("x weight weight decay angle h", diagonal),
}


@pytest.fixture(params=CALLS)
def case(request: pytest.FixtureRequest) -> tuple[list[Tensor], Call]:
    names, call = CALLS[request.param]
    made = given()
    return [made[name] for name in names.split()], call


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, calls on a CPU go past the custom ops too."""
    return lambda: monkeypatch.setattr(operator, "_is_direct", lambda inputs: True)


def results(call: Call, inputs: list[Tensor]) -> list[Tensor]:
    o, state = call(*inputs)
    ups = [torch.cos(torch.arange(y.numel()).reshape(y.shape)) for y in (o, state)]
    return [o, state, *torch.autograd.grad((o, state), inputs, ups)]


def test_values_and_gradients(case: Any, direct: Callable[[], None]) -> None:
    inputs, call = case
    expected = results(call, inputs)
    direct()
    assert type(call(*inputs)[1].grad_fn).__name__.startswith("edgelin_")
    for found in (results(call, inputs), results(lambda *x: again(call, *x), inputs)):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()


def again(call: Call, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Backwards with the forward pass run a second time."""
    made: tuple[Tensor, ...] = checkpoint(call, *inputs, use_reentrant=False)
    return made


def test_only_one_output_and_one_input(case: Any, direct: Callable[[], None]) -> None:
    inputs, call = case
    inputs = [inputs[0].detach(), inputs[1], *(x.detach() for x in inputs[2:])]
    expected = torch.autograd.grad(call(*inputs)[1].sum(), inputs[1:2])
    direct()
    found = torch.autograd.grad(call(*inputs)[1].sum(), inputs[1:2])
    assert torch.equal(found[0], expected[0])


def test_outputs_may_be_written_to(case: Any, direct: Callable[[], None]) -> None:
    inputs, call = case
    direct()
    for o in (call(*inputs)[0], call(*(x[..., :].detach() for x in inputs))[0]):
        o.mul_(2)
    with torch.no_grad():
        assert call(*inputs)[0].grad_fn is None


def test_second_derivatives_are_refused(case: Any, direct: Callable[[], None]) -> None:
    inputs, call = case
    direct()
    o = call(*inputs)[0].square().sum()
    first = torch.autograd.grad(o, inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(first[0].sum(), inputs[1:2])


def test_a_view_of_more_is_copied(direct: Callable[[], None]) -> None:
    def forward(x: Tensor, scale: float) -> tuple[Tensor]:
        return ((torch.cat([x, x]) * scale)[: len(x)],)

    def backward(x: Tensor, scale: float, up: Tensor) -> tuple[Tensor]:
        return (up * scale,)

    double = operator.Operator("double", forward, backward, outputs=("x",))
    direct()
    x = torch.ones(3, requires_grad=True)
    (y,) = double(x, 2.0)
    y.add_(1)
    assert y.tolist() == [3, 3, 3]
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2, 2, 2]


class Wrapped(Tensor):
    """A subclass, as quantised or distributed tensors are."""


def test_who_sees_the_custom_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    x, seen = torch.ones(2), list[bool]()
    assert not operator._is_direct((x,))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    assert operator._is_direct((x, None, torch.nn.Parameter(x), 0.5))
    assert not operator._is_direct((x, x.as_subclass(Wrapped)))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert not operator._is_direct((fake,))
    with FlopCounterMode(display=False):  # it sees every operator
        assert not operator._is_direct((x,))

    def look(y: Tensor) -> Tensor:
        seen.append(operator._is_direct((y,)))
        return y.sum()

    torch.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.jit.trace(look, x, check_trace=False)
    assert seen == [False, False, False]
