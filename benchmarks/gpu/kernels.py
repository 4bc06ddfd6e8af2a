"""Measures the kernels of ``cases.py``, ours, fla's and PyTorch's attention, in one run.

One job is (case, shape, who). Its numbers are appended to a file of JSON lines; jobs that are there
already are left out, so that a stopped run goes on. The shapes 8x4096 and 1x32768 give times,
launches and memory, 1x300 the errors against float64 and, of 64 tokens, the host's time;
``--shapes`` takes the lengths between for the crossover. ``--cold`` gives the seconds of first
calls of 8x4096. Some cases have the shape "packed" too: sequences of 64 to 4,096 tokens in one row,
told by ``cu_seqlens``.

    python benchmarks/gpu/kernels.py --out results.jsonl --only gla,kda --seconds 500
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import measure
import peer
import results
from cases import CASES, Sizes, packed_ends
from results import Job

KEYS = ("case", "shape", "who")
ERRORS = "1x300"
SHAPES = ("8x4096", "1x32768", ERRORS)
PACKED, PACKED_CASES = "packed", ("linear-128", "gla-128", "gated-delta-128")
COLD = "cold"
SWEEP = ("32x1024", "16x2048", "4x8192", "2x16384")
WHO = ("ours", "fla", "sdpa")


def sizes(name: str, shape: str) -> Sizes:
    """The sizes of a case in a shape like "8x4096"."""
    case = CASES[name]
    batch, length = (1, 32768) if shape == PACKED else map(int, shape.split("x"))
    ends = packed_ends(length, 64, 4096) if shape == PACKED else ()
    return Sizes(batch, length, case.heads, case.key, case.value, ends)


def jobs(only: str, who: list[str], shapes: list[str]) -> list[Job]:
    """All jobs but first calls, case by case, so that a run that is stopped leaves whole rows."""
    return [
        (name, shape, one)
        for name in results.selected(only, list(CASES))
        for shape in shapes
        for one in WHO
        if one in who and one in CASES[name].calls and (shape != PACKED or name in PACKED_CASES)
    ]


def first_calls(only: str, who: list[str]) -> list[Job]:
    """The jobs of first calls."""
    names = results.selected(only, list(CASES))
    return [(name, COLD, one) for name in names for one in who if one in CASES[name].calls]


def run(job: Job, tuned: Path) -> dict[str, Any]:
    """The numbers of one job."""
    if job[2] != "fla":
        return numbers(job)
    with peer.tuned(tuned, label(job), like(job)):
        return numbers(job)


def numbers(job: Job) -> dict[str, Any]:
    """Errors and host time, or speed and memory."""
    name, shape, who = job
    case, size = CASES[name], sizes(name, shape)
    if shape == ERRORS:
        return {"errors": measure.errors(case, who, size), "host_ms": measure.host_ms(case, who)}
    return dict(measure.speed(case, who, size))


def measure_first_calls(todo: list[Job], options: argparse.Namespace, deadline: float) -> None:
    """Measure several at once: each compiles on one core, and the GPU is idle meanwhile."""
    with ThreadPoolExecutor(max(1, options.workers // 2)) as pool:
        running = {job: pool.submit(first_call, job) for job in todo}
        finish = lambda job: {"first_s": running[job].result()}  # noqa: E731
        results.work(todo, KEYS, finish, options.out, deadline)


def first_call(job: Job) -> float:
    """Seconds of the first call in a process of its own, with nothing compiled before."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--first", ",".join(job)],
            env={**os.environ, "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    return float(done.stdout.split()[-1])


def warm_up(job: Job) -> None:
    """Call what a job calls, in a small copy of its shape that asks for the same kernels."""
    name, shape, who = job
    full = sizes(name, shape)
    length = min(full.time, 4096)
    ends = packed_ends(length, 64, 2048) if full.ends else ()
    small = replace(full, batch=min(full.batch, 2), time=length, ends=ends)
    if shape == ERRORS:
        measure.errors(CASES[name], who, small)
    _, step = measure.steps_of(CASES[name], who, small)
    step()


def label(job: Job) -> str:
    """Under which fla's choices are kept: a sweep takes those of 8x4096."""
    name, shape, _ = job
    return f"{name} {SHAPES[0] if shape in SWEEP else shape}"


def like(job: Job) -> str:
    """Whose choices are all that fla tries, "" for its own: another length changes little, and
    retention runs the kernels of a scalar decay."""
    name, shape, _ = job
    kin = name.replace("retention", "scalar")
    return f"{kin} {SHAPES[0]}" if kin != name or shape in (ERRORS, PACKED) else ""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = results.options(argparse.ArgumentParser(description=__doc__.split("\n", 1)[0]))
    parser.add_argument("--who", default=",".join(WHO), help="of ours, fla, sdpa; with commas")
    parser.add_argument("--shapes", default=",".join([*SHAPES, PACKED]), help="with commas; "
                        f"for the crossover also {','.join(SWEEP)}")  # fmt: skip
    parser.add_argument("--cold", default="", help="whose first calls to measure: of ours, fla "
                        "(which takes minutes), with commas; nothing else then")  # fmt: skip
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1,
                        help="processes that compile")  # fmt: skip
    parser.add_argument("--first", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run what is missing."""
    began, options = time.monotonic(), parse()
    results.need_gpu()
    if options.first:
        name, _, who = options.first.split(",")
        if who == "fla":
            peer.allow()
        print(measure.first_call_s(CASES[name], who, sizes(name, SHAPES[0])))
        return
    whose = (options.cold or options.who).split(",")
    who = [one for one in whose if one != "fla" or peer.is_installed()]
    if options.cold:
        wanted = first_calls(options.only, who)
    else:
        wanted = jobs(options.only, who, options.shapes.split(","))
    todo = results.missing(wanted, KEYS, results.read(options.out), again=options.again)
    deadline = began + options.seconds
    if options.cold:
        measure_first_calls(todo, options, deadline)
        return
    theirs = [(label(job), like(job), job) for job in todo if job[2] == "fla"]
    if theirs:
        peer.prepare()
        peer.compile_ahead(warm_up, theirs, options.tuned, options.workers)
    results.work(todo, KEYS, lambda job: run(job, options.tuned), options.out, deadline)


if __name__ == "__main__":
    main()
