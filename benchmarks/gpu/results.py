"""A file of results: one JSON line a job, appended when it is done; what is there is left out."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

Job = tuple[str, ...]
Line = dict[str, Any]


def options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that all measuring programs have."""
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--only", default="", help="beginnings of names, with commas")
    parser.add_argument("--seconds", type=float, default=1e9, help="after these no job begins")
    parser.add_argument("--again", action="store_true", help="measure what failed once more")
    parser.add_argument("--tuned", type=Path, default=Path("tuned.json"),
                        help="fla's choices, kept from run to run")  # fmt: skip
    return parser


def selected(only: str, names: Sequence[str]) -> list[str]:
    """The names that begin as ``only`` says, all without it."""
    starts = tuple(filter(None, only.split(",")))
    return [name for name in names if not starts or name.startswith(starts)]


def read(path: Path) -> list[Line]:
    """The lines of a file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def missing(
    jobs: Sequence[Job], keys: Sequence[str], lines: Sequence[Line], *, again: bool
) -> list[Job]:
    """The jobs that no line has under ``keys``; ``again``: or none that did not fail."""
    kept = [line for line in lines if not (again and "failed" in line)]
    done = {tuple(line.get(key) for key in keys) for line in kept}
    return [job for job in jobs if job not in done]


def work(
    jobs: Sequence[Job],
    keys: Sequence[str],
    run: Callable[[Job], Line],
    out: Path,
    deadline: float,
) -> None:
    """Do the jobs one after the other and append what they give, or why they failed.

    Args:
        jobs: What to do.
        keys: Names of a job's parts.
        run: Gives the numbers of a job.
        out: The file.
        deadline: By ``time.monotonic``; no job begins after it.
    """
    for job in jobs:
        if time.monotonic() > deadline:
            print("out of time; the same command goes on from here")
            return
        began = time.monotonic()
        line: Line = dict(zip(keys, job, strict=True))
        try:
            line |= run(job)
        except Exception as error:
            # one failure must not end the run, whatever it is
            line["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | machine()) + "\n")
        print(f"{time.monotonic() - began:6.1f} s", json.dumps(line), flush=True)
        if is_broken():
            sys.exit("the GPU is unusable for this process; the same command goes on from here")
        torch.cuda.empty_cache()


def need_gpu() -> None:
    """End the program where there is none."""
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA GPU here; nothing was measured")


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "torch": torch.__version__, "triton": version("triton")}


def is_broken() -> bool:
    """Whether an error has left the GPU unusable for this process."""
    try:
        torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu").item()
    except RuntimeError:
        return True
    return False
