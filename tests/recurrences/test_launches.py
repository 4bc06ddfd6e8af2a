"""What is kept from a launch is used again only where Triton would choose the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from edgelin.recurrences import launches
from edgelin.recurrences.launches import Launch
from edgelin.recurrences.linear import linear

STREAM = 7


class Kernel:
    """Stands for a function of ``triton.jit``, whose launches give a compiled kernel."""

    arg_names = ("x", "y", "T", "scale", "BLOCK", "HAS_G")

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles
        self.calls: list[tuple[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **constants: Any) -> Any:
            self.calls.append(("triton", (grid, args[2:], constants)))
            return Compiled(self.calls) if self.compiles else None

        return launch


class Compiled:
    """A compiled kernel: it takes three numbers of programs, and constants by position."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        self.calls = calls

    def run(self, *args: Any) -> None:
        assert args[3:9] == (STREAM, "function", "metadata", None, None, None)
        self.calls.append(("kept", (args[:3], args[11:])))

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: self.calls.append(("watched", (grid, args[2:])))


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> SimpleNamespace:
    """Triton's, around launches; only a test of a GPU has the real ones."""
    runtime = SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[])
    )
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(launches, "_runtime", lambda: (runtime, lambda device: STREAM))
    return runtime


def new(kernel: Kernel) -> Launch:
    return Launch(kernel, (4, 2), 65, 0.5, HAS_G=False, BLOCK=32, num_warps=4)


def test_the_second_launch_is_what_the_first_compiled() -> None:
    kernel, x = Kernel(), torch.empty(64)
    launch = new(kernel)
    launch(x, x)
    launch(x, torch.empty(8))
    constants = {"HAS_G": False, "BLOCK": 32, "num_warps": 4}
    assert kernel.calls == [
        ("triton", ((4, 2, 1), (65, 0.5), constants)),
        ("kept", ((4, 2, 1), (65, 0.5, 32, False))),
    ]


def test_the_first_number_of_programs_may_change() -> None:
    kernel, x = Kernel(), torch.empty(64)
    launch = new(kernel)
    for programs in (5, 6, None):
        launch(x, x, programs=programs)
    grids = [(how, what[0]) for how, what in kernel.calls]
    assert grids == [("triton", (5, 2, 1)), ("kept", (6, 2, 1)), ("kept", (4, 2, 1))]


def test_hooks_see_launches(hooks: SimpleNamespace) -> None:
    kernel, x = Kernel(), torch.empty(64)
    launch = new(kernel)
    launch(x, x)
    for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        hook.calls.append(print)
        launch(x, x)
        hook.calls.clear()
    hooks.launch_exit_hook = None
    launch(x, x)
    assert kernel.calls[1:] == [("watched", ((4, 2, 1), (65, 0.5, 32, False)))] * 3


def test_other_dtypes_and_addresses_go_through_triton() -> None:
    kernel, x = Kernel(), torch.empty(64)
    launch = new(kernel)
    half = x.bfloat16()
    for y in (x[1:], x, x, x[1:], x[4:], half, half, x):
        launch(x, y)
    assert [how for how, _ in kernel.calls] == [
        "triton", "triton", "kept", "triton", "kept", "triton", "kept", "triton",
    ]  # fmt: skip


def test_other_devices_go_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Kernel(), torch.empty(64)
    launch = new(kernel)
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(Tensor, "get_device", lambda self, device=device: device)
        launch(x, x)
    assert [how for how, _ in kernel.calls] == ["triton", "triton", "kept", "kept"]


def test_nothing_is_kept_of_what_did_not_compile() -> None:
    kernel, x = Kernel(compiles=False), torch.empty(64)
    launch = new(kernel)
    for _ in range(2):
        launch(x, x)
    assert [how for how, _ in kernel.calls] == ["triton", "triton"]


def test_plans_are_made_once_until_the_table_changes() -> None:
    made = []

    @launches.planned
    def plan(width: int) -> int:
        made.append(width)
        return width

    for width in (1, 2, 1, 2):
        plan(width)
    assert made == [1, 2]
    launches.forget()
    assert (plan(1), made) == (1, [1, 2, 1])


@pytest.mark.parametrize("x", [1, 2, 3, 16, 17, 63, 64, 65])
def test_integers(x: int) -> None:
    assert launches.cdiv(x, 16) == len(range(0, x, 16))
    assert launches.power_of_2(x) == min(2**i for i in range(10) if 2**i >= x)


@pytest.mark.gpu
def test_kept_launches_compute_the_same() -> None:
    """Aligned or not, in any order."""
    draw = torch.randn(3 * 130 * 2 * 64 + 1, generator=torch.Generator().manual_seed(0))
    buffer, found = draw.cuda().bfloat16(), []
    state = torch.zeros(1, 2, 64, 64, device="cuda")
    for shift in (0, 1, 0, 1, 0):
        moved = buffer.clone()
        moved[shift:] = buffer[: len(buffer) - shift]
        inputs = moved[shift : len(buffer) - 1 + shift].view(3, 1, 130, 2, 64)
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        assert q.data_ptr() % 16 == 2 * shift
        o, after = linear(q, k, v, None, state, scale=0.1)
        found.append([o, after, *torch.autograd.grad(o.float().square().sum(), (q, k, v))])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a - b).float().norm() < 1e-2 * a.float().norm()
