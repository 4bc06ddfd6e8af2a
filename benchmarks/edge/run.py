"""Measure figures of decoding on a CPU and append them to a file of results.

python benchmarks/edge/run.py int4-step            one figure
python benchmarks/edge/run.py                      all of them
python benchmarks/edge/run.py --list               what there is
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from figures import FIGURES, Found, Place
from models import Store

from edgelin.errors import EdgelinError


def main() -> None:
    """Parse, measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="names; all without one")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--models", type=Path, default=Path("bundles/edge"),
                        help="where models and bundles are kept")  # fmt: skip
    parser.add_argument("--llama", type=Path, help="built source folder of llama.cpp")
    parser.add_argument("--priority", type=int, default=10,
                        help="real-time priority while measuring, if allowed; 0: none")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("bundles/edge/results.jsonl"))
    options = parser.parse_args()
    if options.list:
        for name, figure in FIGURES.items():
            print(f"{name:14} {figure.text}; bar {figure.bar:g}")
        return
    unknown = [name for name in options.figures if name not in FIGURES]
    if unknown:
        sys.exit(f"figure {unknown[0]!r} is not known; --list prints the names")
    place = Place(Store(options.models), options.llama, options.priority)
    failed = [name for name in options.figures or FIGURES if not measure(name, place, options.out)]
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


def measure(name: str, place: Place, out: Path) -> bool:
    """Measure one figure and append it; says whether it could be measured."""
    began = time.monotonic()
    try:
        found = FIGURES[name].measure(place)
    except (OSError, ImportError, EdgelinError) as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return False
    line = entry(name, found)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(report(name, found), f"({time.monotonic() - began:.0f} s)", flush=True)
    return True


def entry(name: str, found: Found) -> dict[str, Any]:
    """A line of the file of results."""
    figure = FIGURES[name]
    return {
        "figure": name,
        "text": figure.text,
        "value": found.value,
        "bar": figure.bar,
        "at_most": figure.at_most,
        "reached": figure.reached(found.value),
        "sides": found.sides,
        "rounds": found.rows,
        "details": found.details,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average": os.getloadavg()[0],
        "versions": {n: version(n) for n in ("edgelin", "onnxruntime", "numpy")}
        | {"python": platform.python_version()},
    }


def report(name: str, found: Found) -> str:
    """The figure in a few lines: value, bar, medians and range of every side."""
    figure = FIGURES[name]
    verdict = "reached" if figure.reached(found.value) else "missed"
    sign = "<=" if figure.at_most else ">="
    lines = [f"{name}: {figure.text}: {found.value:.3g} (bar {sign} {figure.bar:g}: {verdict})"]
    for side, values in zip(found.sides, zip(*found.rows, strict=True), strict=False):
        ordered = sorted(values)
        low, middle, high = ordered[0], ordered[len(ordered) // 2], ordered[-1]
        lines.append(f"  {side}: {middle:.4g} ({low:.4g} to {high:.4g})")
    lines += [f"  {key}: {value}" for key, value in found.details.items()]
    return "\n".join(lines)


def machine() -> str:
    """Processor, cores, and the widest vectors that it has."""
    name, flags = platform.processor() or platform.machine(), ""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        name = value.strip() if key.strip() == "model name" else name
        flags = value if key.strip() == "flags" else flags
    known = ("avx512_vnni", "avx_vnni", "avx2")
    vectors = next((flag for flag in known if flag in flags.split()), "none")
    return f"{name}, {os.cpu_count()} cores, {vectors}, {platform.system()}"


if __name__ == "__main__":
    main()
