"""What a recurrence is given, checked before it runs: a kernel would read past the end of a tensor.

Only what costs no time is looked at, shapes, dtypes and devices. Numbers are not, since reading
them would wait for the GPU: that log decays are <= 0 and lengths are from 0 to T is the caller's.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from edgelin.recurrences.exporting import is_exporting

LENGTHS = (torch.int32, torch.int64)
VALUES = (torch.float32, torch.bfloat16)
STATES = (torch.float32,)

Fact = tuple[str, torch.Size, torch.dtype, torch.device]


class Arguments:
    """The layouts of a recurrence's tensors.

    A layout has a letter an axis, the same letter everywhere for the same size of at least 1.
    Special are ``R``, the rows of states: B, or with ``cu_seqlens`` the sequences; ``d``: D or 1;
    ``2``: re and im; ``L``, which may be 0.

    Args:
        precise: Names of states and of what says how they decay, never bfloat16.
        layouts: By name; where there are several, ``|`` is between them.
    """

    def __init__(self, precise: tuple[str, ...], **layouts: str) -> None:
        layouts["lengths"] = "B"
        self.packed = {name: _by_rank(layout) for name, layout in layouts.items()}
        self.plain = {name: _by_rank(layout.replace("R", "B")) for name, layout in layouts.items()}
        on_gpu = {name: STATES if name in precise else VALUES for name in layouts}
        on_gpu["lengths"] = LENGTHS
        self.on_gpu = on_gpu
        self.on_cpu = {**{name: (*kinds, torch.float64) for name, kinds in on_gpu.items()},
                       "lengths": LENGTHS}  # fmt: skip
        self._verify_once = functools.lru_cache(maxsize=4096)(self._verify)

    def check(self, cu_seqlens: Tensor | None, **given: Tensor | None) -> None:
        """Raise ValueError where tensors do not fit together.

        Args:
            cu_seqlens: Whether rows of states are sequences; it is read elsewhere.
            given: Tensors by name. The first one says the device.
        """
        if is_exporting():
            return  # sizes are symbols, which no branch may depend on
        facts = tuple(
            [(name, x.shape, x.dtype, x.device) for name, x in given.items() if x is not None]
        )
        # The same again is the rule. The compiler looks into functions, not into what they keep.
        verify = self._verify if torch.compiler.is_compiling() else self._verify_once
        verify(cu_seqlens is None, facts)

    def _verify(self, plain: bool, facts: tuple[Fact, ...]) -> None:
        """Raise ValueError where tensors of these names, shapes, dtypes and devices don't fit."""
        layouts = self.plain if plain else self.packed
        leader, device = facts[0][0], facts[0][3]
        kinds = self.on_gpu if device.type == "cuda" else self.on_cpu
        sizes = {"1": 1, "2": 2}
        for name, shape, dtype, where in facts:
            layout = layouts[name].get(len(shape), "")
            fits = bool(layout)
            for letter, size in zip(layout, shape, strict=False):
                axis = letter if letter != "d" else "D" if size != 1 else "1"
                fits &= sizes.setdefault(axis, size) == size and (size > 0 or axis == "L")
            if not fits:
                raise ValueError(_shapes(name, shape, layouts[name], sizes))
            if dtype not in kinds[name]:
                allowed = ", ".join(str(kind) for kind in kinds[name])
                raise ValueError(f"{name} is {dtype} on {device.type}, need one of {allowed}")
            if where != device:
                raise ValueError(f"{name} is on {where}, need {device}, where {leader} is")


def _by_rank(layout: str) -> dict[int, str]:
    """Layouts by how many axes they have."""
    return {len(one): one for one in layout.split("|")}


def _shapes(name: str, shape: torch.Size, layouts: dict[int, str], sizes: dict[str, int]) -> str:
    """What is wrong with a shape, in a line."""
    words = {"R": "sequences", "d": "D or 1"}
    wanted = [", ".join(words.get(letter, letter) for letter in one) for one in layouts.values()]
    letters = dict.fromkeys("".join(layouts.values()).replace("d", "D"))
    known = [f"{x} = {sizes[x]}" for x in letters if sizes.get(x) and x not in "12"]
    return (
        f"{name} is {tuple(shape)}, need {' or '.join(f'[{one}]' for one in wanted)}"
        f"{', at least 1 of each' * (0 in shape)}{', here ' * bool(known)}{', '.join(known)}"
    )
