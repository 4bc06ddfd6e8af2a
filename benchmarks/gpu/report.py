"""Makes the tables and the picture of the measurements: ours beside fla and softmax attention.

python benchmarks/gpu/report.py results.jsonl --out /tmp/gpu
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import results
from cases import CASES
from kernels import COLD, PACKED, PACKED_CASES, SHAPES, SWEEP
from matplotlib.figure import Figure
from model import FLA, MODELS, MODES
from model import SHAPES as MODEL_SHAPES

from edgelin.files import replacing

TIMES = {"8x4096": "gpu_ms", "1x32768": "wall_ms"}
HOST_MS, FIRST_S, MEMORY, ERROR = 0.3, 10, 0.5, 1.2  # bars of every kernel; the last two of fla's
TOKENS = {
    ("gla", "16x2048"): 600e3,
    ("scalar", "16x2048"): 650e3,
    ("gla", "1x2048"): 200e3,
    ("scalar", "1x2048"): 200e3,
}
Kernels = dict[tuple[str, str, str], dict[str, Any]]
Models = dict[tuple[str, str, str, str], dict[str, Any]]


def main() -> None:
    """Read, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="name of the files")
    options = parser.parse_args()
    lines = results.read(options.results)
    kernels, models = by_job(lines)
    parts = [
        speed(kernels), packed(kernels), costs(kernels), training(models), crossovers(kernels)
    ]  # fmt: skip
    machines = sorted(
        {", ".join(line.get(k, "?") for k in ("gpu", "torch", "triton")) for line in lines}
    )
    text = "\n\n".join([*parts, "Measured on: " + "; ".join(machines) + " (GPU, torch, triton)."])
    print(text)
    with replacing(options.out.with_suffix(".md")) as part:
        part.write_text(text + "\n", encoding="utf-8")
    with replacing(options.out.with_suffix(".png")) as part:
        draw(kernels).savefig(part, format="png", dpi=120)


def by_job(lines: list[results.Line]) -> tuple[Kernels, Models]:
    """The last line of every job that did not fail."""
    kernels: Kernels = {}
    models: Models = {}
    for line in lines:
        if "failed" in line:
            continue
        if "case" in line:
            kernels[line["case"], line["shape"], line["who"]] = line
        else:
            models[line["model"], line["shape"], line["mode"], line["weights"]] = line
    return kernels, models


def table(title: str, head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [f"**{title}**", "", "| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def number(value: float | None, form: str = ".2f") -> str:
    """A cell."""
    return "-" if value is None else format(value, form)


def verdict(value: float | None, bar: float | None) -> str:
    """Whether a value is at most its bar."""
    return "-" if value is None or bar is None else "yes" if value <= bar else "**no**"


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below, where both are known."""
    return above / below if above is not None and below else None


def speed(kernels: Kernels) -> str:
    """Time of forward and backward."""
    rows = []
    for name, case in CASES.items():
        for place, (shape, measure) in enumerate(TIMES.items()):
            ours, fla = (
                kernels.get((name, shape, who), {}).get(measure) for who in ("ours", "fla")
            )
            if case.bars is None or (ours is None and fla is None):
                continue
            bar = case.bars[place]
            cells = [number(x) for x in (ours, fla, ratio(fla, ours), bar)]
            rows.append([name, f"{shape}, {measure.split('_')[0]}", *cells, verdict(ours, bar)])
    head = ["kernel", "shape, time", "ours ms", "fla ms", "fla / ours", "bar ms", "met"]
    return table("Forward and backward, 32,768 tokens", head, rows)


def packed(kernels: Kernels) -> str:
    """Sequences of different lengths in one row, and what the same tokens cost in equal ones."""
    rows = []
    for name in PACKED_CASES:
        ours, fla, equal = (
            kernels.get((name, shape, who), {})
            for shape, who in ((PACKED, "ours"), (PACKED, "fla"), (SHAPES[0], "ours"))
        )
        for measure in ("gpu_ms", "wall_ms") if ours or fla else ():
            mine, theirs = ours.get(measure), fla.get(measure)
            cells = [mine, theirs, ratio(theirs, mine), ratio(mine, equal.get(measure))]
            rows.append([f"{name}, {measure.split('_')[0]}", *map(number, cells)])
    head = ["kernel, time", "ours ms", "fla ms", "fla / ours", f"ours / ours at {SHAPES[0]}"]
    return table("32,768 tokens in packed sequences of 64 to 4,096 (cu_seqlens)", head, rows)


def costs(kernels: Kernels) -> str:
    """Host time, first call, memory and errors."""
    rows = []
    for name in CASES:
        ours, fla = (
            dict(pair for shape in (SHAPES[0], "1x300", COLD)
                 for pair in kernels.get((name, shape, who), {}).items())
            for who in ("ours", "fla")
        )  # fmt: skip
        if not ours:
            continue
        worst, error = worst_error(ours.get("errors"), fla.get("errors"))
        memory = ratio(ours.get("peak_mb"), fla.get("peak_mb"))
        checks = [
            verdict(ours.get("host_ms"), HOST_MS),
            verdict(ours.get("first_s"), FIRST_S),
            verdict(memory, MEMORY),
            verdict(error, ERROR),
        ]
        rows.append([
            name,
            *(pair(ours, fla, key, form) for key, form in (
                ("launches", ".0f"), ("host_ms", ".2f"), ("first_s", ".1f"), ("peak_mb", ".0f"))),
            f"{number(error)} ({worst})",
            ", ".join(checks),
        ])  # fmt: skip
    head = ["kernel", "launches", "host ms", "first call s", "peak MB",
            "worst error / fla's", "host, first, memory, error met"]  # fmt: skip
    return table("Ours / fla", head, rows)


def pair(ours: dict[str, Any], fla: dict[str, Any], key: str, form: str) -> str:
    """Both numbers of a cell."""
    return f"{number(ours.get(key), form)} / {number(fla.get(key), form)}"


def worst_error(
    ours: dict[str, float] | None, fla: dict[str, float | None] | None
) -> tuple[str, float | None]:
    """The result whose error is largest beside fla's, and that quotient; ours alone without fla."""
    if not ours:
        return "-", None
    if not fla:
        name = max(ours, key=lambda key: ours[key])
        return f"{name} {ours[name]:.1e}, no fla", None
    quotients = {key: ours[key] / other for key, other in fla.items() if other}
    name = max(quotients, key=lambda key: quotients[key])
    return f"{name} {ours[name]:.1e}", quotients[name]


def training(models: Models) -> str:
    """Tokens a second of whole models."""
    rows = []
    for weights in ("bfloat16", "float32"):
        for name in MODELS:
            for shape in MODEL_SHAPES:
                found = [models.get((name, shape, mode, weights), {}) for mode in MODES]
                if not any(found):
                    continue
                speeds = [line.get("tokens_s") for line in found]
                best = max((x for x in speeds if x is not None), default=None)
                bar = TOKENS.get((name, shape))
                met = "-" if bar is None or best is None else "yes" if best >= bar else "**no**"
                thousands = [number(x and x / 1e3, ".0f") for x in (*speeds, bar)]
                memory = number(next(filter(None, found)).get("peak_gb"), ".1f")
                rows.append([name, shape, weights, *thousands, met, memory])
    head = ["model", "shape", "weights", "eager", "CUDA graph", "compiled, CUDA graph", "bar",
            "met", "peak GB (eager)"]  # fmt: skip
    return table(f"Thousand tokens a second of a training step ({FLA}: fla's own)", head, rows)


def curve(kernels: Kernels, name: str, who: str) -> dict[int, float]:
    """GPU ms by length."""
    shapes = (*SWEEP, *TIMES)
    found = {int(s.split("x")[1]): kernels.get((name, s, who), {}).get("gpu_ms") for s in shapes}
    return {length: ms for length, ms in sorted(found.items()) if ms is not None}


def softmax_of(name: str) -> str:
    """The attention that a kernel is compared with: of its width, of 128 for the others."""
    return "softmax-64" if name.endswith("-64") else "softmax-128"


def crossing(ours: dict[int, float], softmax: dict[int, float]) -> str:
    """The length from which softmax takes longer, between measured ones along straight lines in
    logarithms."""
    lengths = [length for length in ours if length in softmax]
    gaps = [math.log(softmax[length] / ours[length]) for length in lengths]
    if not gaps:
        return "-"
    if gaps[0] >= 0:
        return f"< {lengths[0]:,}"
    for i in range(1, len(gaps)):
        if gaps[i] >= 0:
            share = -gaps[i - 1] / (gaps[i] - gaps[i - 1])
            return f"{lengths[i - 1] * (lengths[i] / lengths[i - 1]) ** share:,.0f}"
    return f"> {lengths[-1]:,}"


def crossovers(kernels: Kernels) -> str:
    """Where ours, and fla's, overtake softmax attention."""
    rows = []
    for name in CASES:
        softmax = curve(kernels, softmax_of(name), "sdpa")
        ours, fla = (curve(kernels, name, who) for who in ("ours", "fla"))
        if not softmax or not ours:
            continue
        last = max(ours)
        gain = number(ratio(softmax.get(last), ours[last]), ".1f")
        rows.append([name, crossing(ours, softmax), crossing(fla, softmax), f"{gain} at {last:,}"])
    head = ["kernel", "ours from T", "fla from T", "softmax / ours"]
    return table("Length from which softmax attention (cuDNN) takes longer", head, rows)


def draw(kernels: Kernels) -> Figure:
    """GPU time against length, one plot a width of the heads."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    places = figure.subplots(1, 2, sharey=True)
    for place, softmax in zip(places, ("softmax-128", "softmax-64"), strict=True):
        named = [name for name, case in CASES.items() if case.bars and softmax_of(name) == softmax]
        curves = [(name, who, f"C{i}{style}") for i, name in enumerate(named)
                  for who, style in (("ours", "o-"), ("fla", "x:"))]  # fmt: skip
        for name, who, style in [*curves, (softmax, "sdpa", "k--")]:
            points = curve(kernels, name, who)
            text = None if who == "fla" else name
            if points:  # logarithmic axes without any can't be drawn
                place.loglog(list(points), list(points.values()), style, label=text, ms=4)
        lengths = [int(shape.split("x")[1]) for shape in (*SWEEP, *TIMES)]
        place.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
        place.minorticks_off()
        place.set_xlabel("T, tokens of a sequence (32,768 in all)")
        place.set_title(f"heads of {softmax.split('-')[1]}; dotted: fla", fontsize=10)
        place.grid(alpha=0.3)
        if place.lines:
            place.legend(fontsize=8)
    figure.axes[0].set_ylabel("GPU ms, forward and backward")
    return figure


if __name__ == "__main__":
    main()
