"""Tries launch configurations of our kernels on a GPU and keeps the fastest of each.

    python benchmarks/gpu/tune.py --only kda,rwkv --seconds 400

A kernel is tuned within a forward and a backward of its case over 8 x 4,096 tokens, by the GPU time
of both together. The winner becomes the first choice of its line in
``edgelin/recurrences/launches.json``, which is written after every kernel, so that a run that is
stopped loses nothing; give ``--table`` another path where the checkout does not survive. All
configurations are compiled beforehand, on all cores, into Triton's cache. A configuration whose
output differs from the first one's by more than rounding is told and never chosen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measure
import torch
from cases import CASES, Sizes
from results import need_gpu, selected
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from edgelin.recurrences import launches

TABLE = Path(launches.__file__).with_suffix(".json")
WARPS, STAGES = [4, 8], [1, 2, 3]
_PASS = {"BLOCK": [64, 128], "num_warps": WARPS, "num_stages": STAGES}
_OUTER = {**_PASS, "BLOCK": [32, 64, 128]}  # of these the other side of the state is whole
_SERIAL = {"BV": [16, 32, 64, 128], "num_warps": WARPS, "num_stages": STAGES}
# Kernel names, as launches.json has them, by the beginning and the word that tells them apart: what
# to try. The first that fits counts.
GRID: dict[tuple[str, str], dict[str, list[int]]] = {
    ("linear", " dq "): _OUTER,
    ("linear", " dk "): _OUTER,
    ("linear", " split "): {"BK": [32, 64, 128], "num_warps": [2, 4, 8]},
    ("", " split "): {"BK": [32, 64], "num_warps": WARPS},
    ("linear", ""): _PASS,
    ("", " states "): _SERIAL,
    ("", " reverse "): _SERIAL,
    ("delta", " invert "): {"BK": [64, 128], "num_warps": WARPS, "num_stages": STAGES},
    ("delta", " keys "): {"BV": [64, 128], "num_warps": WARPS, "num_stages": [1, 2]},
    ("delta", ""): {"BV": [64, 128], "num_warps": WARPS, "num_stages": STAGES},
    ("kda", ""): {"BV": [64, 128], "num_warps": WARPS, "num_stages": [1, 2]},
    ("dplr", ""): {"num_warps": WARPS, "num_stages": STAGES},
    ("diagonal", " totals"): {"BT": [16, 32], "BD": [32, 64], "num_warps": [1, 2]},
    ("diagonal", ""): {"lanes": [16384, 32768], "BT": [16, 32], "BD": [64], "num_warps": [1, 2]},
}
# Reads outside its tensors (Triton 3.6), after which nothing works in the process.
CRASHES = {"BLOCK": 32, "num_stages": 1}.items()


def grid(kernel: str) -> list[launches.Choice]:
    """The configurations to try, none for a kernel without a grid; the rule is the first."""
    fitting = (axes for (start, word), axes in GRID.items()
               if kernel.startswith(start) and word in kernel)  # fmt: skip
    axes = next(fitting, {})
    combinations = itertools.product(*axes.values())
    choices = [dict(zip(axes, values, strict=True)) for values in combinations]
    return [{}, *(choice for choice in choices if not choice.items() >= CRASHES)] if axes else []


def step_of(name: str, shape: str) -> measure.Step:
    """A forward and backward of our kernels."""
    case = CASES[name]
    batch, length = map(int, shape.split("x"))
    sizes = Sizes(batch, length, case.heads, case.key, case.value)
    return measure.steps_of(case, "ours", sizes)[1]


def kernels_of(step: measure.Step, word: str) -> list[str]:
    """Names with a certain word of the kernels with a grid that a step launches."""
    launches.forget()
    step()
    return sorted(kernel for kernel in launches.asked if word in kernel and grid(kernel))


def gpu_ms(step: measure.Step, repeats: int = 4) -> float:
    """Median GPU time of a step."""
    times = []
    for _ in range(repeats):
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        events = seen.events() or []
        times.append(
            sum(e.time_range.elapsed_us() for e in events if e.device_type == DeviceType.CUDA)
        )
    return float(statistics.median(times)) / 1e3


def numbers(step: measure.Step) -> list[torch.Tensor]:
    """Output and gradients of a step."""
    found: Any = step()
    return [x.float() for x in found]


def differ(first: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """Largest relative norm of a difference."""
    pairs = zip(first, found, strict=True)
    return max(float((x - y).norm() / x.norm().clamp(min=1e-30)) for x, y in pairs)


def tune(kernel: str, step: measure.Step) -> Iterator[tuple[float, launches.Choice]]:
    """Times of the configurations of a kernel, those that work."""
    table = launches.table()
    before = table.get(kernel, [])
    first: list[torch.Tensor] = []
    for choice in [*before[:1], *grid(kernel)]:
        table[kernel] = [choice]
        launches.forget()
        try:
            found = numbers(step)
            first = first or found
            apart = differ(first, found)
            if not apart < 2e-2:
                print(f"{kernel} {choice}: differs by {apart:.1e}", flush=True)
                continue
            yield gpu_ms(step), choice
        except Exception as error:  # too much shared memory, or registers
            print(f"{kernel} {choice}: {str(error).splitlines()[0][:90]}", flush=True)
    table[kernel] = before
    launches.forget()


def compile_share(names: list[str], shape: str, word: str, part: int, parts: int) -> None:
    """Compile every ``parts``-th configuration of all kernels of cases, by running them."""
    turn = 0
    for name in names:
        step = step_of(name, shape)
        for kernel in kernels_of(step, word):
            before = launches.table().get(kernel)
            for choice in grid(kernel):
                turn += 1
                if turn % parts != part:
                    continue
                launches.table()[kernel] = [choice]
                launches.forget()
                try:
                    step()
                except Exception:  # said when it is measured
                    torch.cuda.synchronize()
            launches.table().pop(kernel, None)
            if before is not None:
                launches.table()[kernel] = before
            launches.forget()


def compile_ahead(names: list[str], options: argparse.Namespace) -> None:
    """Fill Triton's cache from several processes, in small shapes that ask for the same kernels."""

    def one(part: int) -> None:
        command = [sys.executable, __file__, "--compile", f"{part},{options.workers}",
                   "--only", ",".join(names), "--kernels", options.kernels]  # fmt: skip
        subprocess.run(command, capture_output=True, timeout=options.seconds)

    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(one, range(options.workers)))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="beginnings of names of cases, with commas")
    parser.add_argument(
        "--kernels", default="", help="a word in the names of kernels, as in launches.json"
    )
    parser.add_argument("--shape", default="8x4096", help="rows x tokens")
    parser.add_argument("--seconds", type=float, default=1e9, help="after these none begins")
    parser.add_argument("--table", type=Path, default=TABLE, help="where winners are written")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1,
                        help="processes that compile")  # fmt: skip
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Tune the kernels of the chosen cases, one after the other."""
    began, options = time.monotonic(), parse()
    need_gpu()
    names = selected(options.only, [n for n, case in CASES.items() if "ours" in case.calls])
    if options.compile:
        part, parts = map(int, options.compile.split(","))
        compile_share(names, "2x1024", options.kernels, part, parts)
        return
    compile_ahead(names, options)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    done: set[str] = set()
    for name in names:
        step = step_of(name, options.shape)
        for kernel in kernels_of(step, options.kernels):
            if kernel in done or time.monotonic() - began > options.seconds:
                continue
            done.add(kernel)
            times = sorted(tune(kernel, step), key=lambda pair: pair[0])
            if not times:
                continue
            launches.table()[kernel] = [choice for _, choice in times[:4]]
            options.table.write_text(json.dumps(launches.table(), indent=1) + "\n")
            best = ", ".join(f"{ms:.3f} {choice}" for ms, choice in times[:3])
            print(f"{name} {kernel}: {best}; worst {times[-1][0]:.3f}", flush=True)


if __name__ == "__main__":
    main()
