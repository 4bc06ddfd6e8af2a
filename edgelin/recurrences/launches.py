"""How the GPU kernels are launched where that was measured: one table, ``launches.json``.

A line of the table is a kernel at certain widths, by name, and a list of choices; the first is the
one that runs. The others are what ``benchmarks/gpu/tune.py`` tries on a GPU, which puts the fastest
first. Kernels that are not in the table are launched by the rule beside them. Nothing is tried at
run time.
"""

from __future__ import annotations

import functools
import json
from importlib import resources

Choice = dict[str, int]
Table = dict[str, list[Choice]]


@functools.cache
def table() -> Table:
    """The table; who changes it for a measurement calls ``clear`` of the rules that read it."""
    text = (resources.files(__package__) / "launches.json").read_text(encoding="utf-8")
    loaded: Table = json.loads(text)
    return loaded


def choose(kernel: str, rule: Choice) -> Choice:
    """The first choice for a kernel, completed by the rule, or the rule."""
    asked.add(kernel)
    return {**rule, **next(iter(table().get(kernel, [])), {})}


asked: set[str] = set()  # names of kernels that were launched: what a measurement can tune
