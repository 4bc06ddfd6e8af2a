"""Load time, memory and speed of one variant, measured in a process of its own.

``python -m edgelin.export.measure BUNDLE VARIANT`` prints JSON; :func:`measure` calls just that, so
that neither torch nor an earlier session counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

import edgelin.runtimes
from edgelin.errors import EdgelinError
from edgelin.runtimes.measure import speed

_STEPS = 32  # timed: a large model takes a second for ten


def measure(bundle: Path, variant: str) -> dict[str, float]:
    """Run this module in a fresh interpreter.

    Returns:
        ``load_s``, ``rss_bytes`` (what loading and running added), ``threads``,
        ``decode_tokens_per_s`` and ``prefill_tokens_per_s``.

    Raises:
        EdgelinError: The variant cannot be run.
    """
    command = [sys.executable, "-m", __name__, str(bundle), variant]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EdgelinError(f"variant {variant} failed in a fresh process: {last}")
    result: dict[str, float] = json.loads(done.stdout)
    return result


def _run(bundle: str, variant: str) -> dict[str, float]:
    """What :func:`measure` returns, in this process."""
    process = psutil.Process()
    before = process.memory_info().rss
    start = time.perf_counter()
    opened = edgelin.runtimes.load(bundle, variant=variant)
    loaded = time.perf_counter() - start
    found = speed(opened, opened.stream(), repeats=_STEPS)
    return {
        "load_s": round(loaded, 3),
        "rss_bytes": process.memory_info().rss - before,
        "threads": opened.threads,
        **{name: round(value, 1) for name, value in found.items()},
    }


if __name__ == "__main__":
    print(json.dumps(_run(*sys.argv[1:])))
