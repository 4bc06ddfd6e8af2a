"""How the GPU kernels are launched: what is chosen, and what is kept from call to call.

Choices are in one table, ``launches.json``. A line of it is a kernel at certain widths, by name,
and a list of choices; the first is the one that runs. The others are what
``benchmarks/gpu/tune.py`` tries on a GPU, which puts the fastest first. Kernels that are not in the
table are launched by the rule beside them. Nothing is tried at run time.

All that follows from the shape of a call is worked out once, by functions that are ``planned``. In
the end they give a :class:`Launch`, which needs only tensors.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

Choice = dict[str, int]
Table = dict[str, list[Choice]]
P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def table() -> Table:
    """The table; who changes it for a measurement calls :func:`forget`."""
    text = (resources.files(__package__) / "launches.json").read_text(encoding="utf-8")
    loaded: Table = json.loads(text)
    return loaded


def choose(kernel: str, rule: Choice) -> Choice:
    """The first choice for a kernel, completed by the rule, or the rule."""
    asked.add(kernel)
    return {**rule, **next(iter(table().get(kernel, [])), {})}


asked: set[str] = set()  # names of kernels that were chosen for: what a measurement can tune
_forget: list[Callable[[], None]] = []


def planned(work: Callable[P, R], most: int = 4096) -> Callable[P, R]:
    """Keep what a function of shapes works out; of more than ``most``, those used last."""
    kept = functools.lru_cache(maxsize=most)(work)
    _forget.append(kept.cache_clear)
    return kept  # type: ignore[return-value]


def forget() -> None:
    """Work everything out again: the table has changed."""
    for clear in _forget:
        clear()
    asked.clear()


def cdiv(x: int, y: int) -> int:
    """x / y rounded up. Triton's own is a function of kernels, slow to call from Python."""
    return -(-x // y)


def power_of_2(x: int) -> int:
    """The smallest power of 2 that is at least x, likewise."""
    return 1 << (x - 1).bit_length()


class Compiled(NamedTuple):
    """What Triton compiled for tensors of certain dtypes."""

    dtypes: list[torch.dtype]
    kernel: Any
    rest: tuple[Any, ...]  # the arguments after the tensors


class Launch:
    """A launch of a kernel, all but the tensors, which are its first arguments.

    The first call goes through Triton's ``kernel[grid]``, which looks at every argument, and
    compiles. What it compiled is kept and launched by the next calls with tensors of the same
    dtypes on the same GPU. Triton also compiles for integers, which are the same in every call, and
    for addresses that are multiples of 16: other ones always go through Triton.

    Args:
        kernel: A function of ``triton.jit``.
        grid: Numbers of programs.
        numbers: The arguments after the tensors.
        tiles: Programs beside each other on the first axis of the grid that share a segment.
        constants: The ``constexpr`` arguments after these, and ``num_warps`` and the like.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *numbers: int | float,
        tiles: int = 1,
        **constants: Any,
    ) -> None:
        self.kernel, self.numbers, self.constants, self.tiles = kernel, numbers, constants, tiles
        self.full_grid = (*grid, 1, 1)[:3]
        self.compiled: dict[int, Compiled] = {}

    def __call__(self, *tensors: Tensor, programs: int | None = None) -> None:
        """Start the programs, of the grid or with ``programs`` x tiles for its first number."""
        device, grid = tensors[0].get_device(), self.full_grid
        if programs is not None:
            grid = (programs * self.tiles, *grid[1:])
        compiled = self.compiled.get(device)
        if compiled is None or not _fit(tensors, compiled.dtypes):
            self._through_triton(device, grid, tensors)
            return
        _, kernel, rest = compiled
        hooks, stream_of = _runtime()
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", True) or getattr(leave, "calls", True):
            kernel[grid](*tensors, *rest)  # somebody watches, such as Triton's profiler
            return
        kernel.run(
            *grid, stream_of(device), kernel.function, kernel.packed_metadata,
            None, None, None, *tensors, *rest,
        )  # fmt: skip

    def _through_triton(
        self, device: int, grid: tuple[int, ...], tensors: tuple[Tensor, ...]
    ) -> None:
        """Start them and keep what was compiled, nothing when kernels are interpreted."""
        kernel = self.kernel[grid](*tensors, *self.numbers, **self.constants)
        if kernel is None:
            return
        dtypes = [x.dtype for x in tensors]
        if _fit(tensors, dtypes):
            names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            rest = (*self.numbers, *[self.constants[name] for name in names])
            self.compiled[device] = Compiled(dtypes, kernel, rest)


def _fit(tensors: tuple[Tensor, ...], dtypes: list[torch.dtype]) -> bool:
    """Whether tensors have these dtypes and addresses that are multiples of 16."""
    bits = 0
    for x in tensors:
        bits |= x.data_ptr()
    return bits % 16 == 0 and [x.dtype for x in tensors] == dtypes


@functools.cache
def _runtime() -> tuple[Any, Callable[[int], int]]:
    """Triton's hooks around launches, and what tells the current stream of a GPU."""
    from triton import knobs  # noqa: TID251 - a kernel has been compiled
    from triton.runtime import driver  # noqa: TID251

    return knobs.runtime, driver.active.get_current_stream
