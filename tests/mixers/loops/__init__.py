"""One file a mixer: ``CASES``, tables by name, and ``loop``, its float64 numpy truth.

A loop maps (mixer, x, state, position) to (y, state) and shares no code with the mixer: rotations
are complex products, attention is a softmax over a list of all tokens it may see.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

LOOPS: dict[str, Any] = {
    found.name: importlib.import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
    if found.name != "common"
}
CASES: dict[str, dict[str, Any]] = {
    case: table for module in LOOPS.values() for case, table in module.CASES.items()
}
