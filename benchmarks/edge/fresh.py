"""One bundle in a process of its own: load time, memory, and whether they grow.

    python fresh.py BUNDLE VARIANT            what loading, steps and a prompt take
    python fresh.py BUNDLE VARIANT STEPS      what so many steps change

Prints JSON. Neither torch nor another session is in the process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import edgelin
import edgelin.runtimes  # a bundle's load time is not that of Python modules

_STEPS, _CHUNKS = 30, 3
_SETTLED = 1000  # steps after which nothing is allocated for the first time
_PAIRS = 2000  # steps compared at the end


def main() -> None:
    """Measure and print."""
    bundle, variant, *steps = sys.argv[1:]
    print(json.dumps(_along(bundle, variant, int(steps[0])) if steps else _once(bundle, variant)))


def _once(bundle: str, variant: str) -> dict[str, float]:
    """Load time in seconds, and the process's largest memory after steps and chunks."""
    begin = time.perf_counter()
    model = edgelin.load(bundle, variant=variant)
    stream = model.stream()
    loaded = time.perf_counter() - begin
    tokens = stream.input.random(np.random.default_rng(0), 1, model.manifest.chunk)
    for step in range(_STEPS):
        stream.feed(tokens[:, step : step + 1])
    for _ in range(_CHUNKS):
        stream.feed(tokens)
    return {"load_s": loaded, "peak_bytes": _peak_bytes()}


def _along(bundle: str, variant: str, steps: int) -> dict[str, float]:
    """Growth of memory between the first steps and the last, and the time of a late step."""
    from edgelin.runtimes import measure

    model = edgelin.load(bundle, variant=variant)
    old = model.stream()
    early, late = measure.series(old, [_SETTLED, steps])
    fresh = model.stream()
    measure.series(fresh, [100])
    return {
        "growth_bytes": late.rss_bytes - early.rss_bytes,
        "late_over_early": measure.ratio(old, fresh, _PAIRS),
        "early_ms": early.step_ms,
        "late_ms": late.step_ms,
    }


def _peak_bytes() -> int:
    """Largest resident memory so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
