"""Decode time and state memory against position on a CPU: a linear model beside softmax attention.

Three models of one size with random weights are exported, opened in one process and stepped by
turns, a block of steps each, so that whatever else the machine does hits all of them: Gated
DeltaNet, and attention to all tokens with as many key heads as query heads, and with a quarter of
them (grouped heads). Between the measured positions every stream reads chunks of tokens. With one
thread, the time of a step is that thread's time on a core, so that other programs, which may make
it wait, do not count. Writes ``OUT.json``, ``OUT.png`` and ``OUT.md``.

    python benchmarks/crossover/decoding.py --out crossover
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

import edgelin
from edgelin import checkpoint, tokenizer
from edgelin.errors import EdgelinError
from edgelin.export.bundle import export_checkpoint
from edgelin.files import replacing
from edgelin.model import SequenceModel
from edgelin.model_config import ModelConfig
from edgelin.runtimes import checks, measure
from edgelin.runtimes.stream import Stream

HIDDEN, LAYERS, VOCAB, HEADS = 512, 8, 4096, 8
HEAD = HIDDEN // HEADS
# Keys half as wide as values give every mixer the same four width x width matrices.
MIXERS: dict[str, dict[str, Any]] = {
    "gated delta": {
        "type": "gated_deltanet",
        "num_heads": HEADS,
        "key_dim": HEAD // 2,
        "value_dim": HEAD,
    },
    "softmax": {
        "type": "attention",
        "num_heads": HEADS,
        "num_kv_heads": HEADS,
        "head_dim": HEAD,
        "window": 0,
    },
    "softmax (grouped heads)": {
        "type": "attention",
        "num_heads": HEADS,
        "num_kv_heads": HEADS // 4,
        "head_dim": HEAD,
        "window": 0,
    },
}
# Width inside the MLP; the grouped model has in it what its smaller key and value matrices save.
INTERMEDIATE = {"gated delta": 1344, "softmax": 1344, "softmax (grouped heads)": 1600}
LINEAR = "gated delta"
STEPS, BLOCK, WARM_UP = 100, 10, 2  # steps a position; steps a turn; steps of a turn not counted
ENDS = (120, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


def main() -> None:
    """Build, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--threads", type=int, default=1, help="of onnxruntime")
    parser.add_argument("--quantize", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--last", type=int, default=ENDS[-1], help="last position")
    parser.add_argument("--out", type=Path, default=Path("crossover"), help="name of files")
    options = parser.parse_args()
    table, picture, page = (Path(f"{options.out}{suffix}") for suffix in (".json", ".png", ".md"))
    try:
        checks.target(table)
        measure.check_plot(picture)
        with tempfile.TemporaryDirectory() as folder:
            found = measured(Path(folder), options)
        measure.write_json(found, table)
        draw(found, picture)
    except EdgelinError as error:
        sys.exit(f"Error: {error}")
    with replacing(page) as part:
        part.write_text(text(found, picture.name), encoding="utf-8")
    print(text(found, picture.name))


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Export the models, then step them along."""
    loads = [os.getloadavg()[0]]
    streams, parameters = {}, {}
    for name in MIXERS:
        path, parameters[name] = bundle(folder / name, name, options.quantize)
        streams[name] = edgelin.load(path, threads=options.threads).stream()
    ids = np.random.default_rng(0).integers(0, VOCAB, max(ENDS))
    points = []
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    for end in (end for end in ENDS if end <= options.last):
        points.append(point(streams, ids, end, clock))
        loads.append(os.getloadavg()[0])
        shown = ", ".join(f"{name} {ms:.2f}" for name, ms in points[-1]["step_ms"].items())
        print(f"position {points[-1]['position']}: ms a step: {shown}", file=sys.stderr, flush=True)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "threads": options.threads,
        "clock": clock.__name__,
        "quantize": options.quantize,
        "versions": {
            "edgelin": edgelin.__version__,
            "onnxruntime": importlib.metadata.version("onnxruntime"),
            "python": platform.python_version(),
        },
        "load_average": [min(loads), max(loads)],
        "sizes": {"layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB},
        "mixers": MIXERS,
        "intermediate_size": INTERMEDIATE,
        "parameters": parameters,
        "steps": STEPS,
        "block": BLOCK,
        "points": points,
        "crossover": {name: crossover(points, name) for name in MIXERS if name != LINEAR},
    }


def bundle(folder: Path, name: str, quantize: str) -> tuple[Path, int]:
    """A bundle of a model with random weights, and its parameters."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE[name],
        layers=("mixer",) * LAYERS,
        mixers={"mixer": MIXERS[name]},
    )
    model = SequenceModel(config)
    words = tokenizer.train(["a few words, and a few words more\n" * 20], 300)
    checkpoint.save(folder / "checkpoint", model, words.to_str())
    report = export_checkpoint(folder / "checkpoint", folder / "bundle", quantise=(quantize,))
    return report.bundle, model.num_parameters()


def point(
    streams: dict[str, Stream], ids: NDArray[np.int64], end: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Read on to shortly before a position, then step to it by turns."""
    turns = STEPS // BLOCK
    begin = end - turns * (BLOCK + WARM_UP)
    taken: dict[str, list[float]] = {name: [] for name in streams}
    for stream in streams.values():
        if stream.position < begin:
            stream.feed(ids[stream.position : begin])
    order = list(streams)
    for _ in range(turns):
        order = [*order[1:], order[0]]
        for name in order:
            stream = streams[name]
            block = [timed(stream, ids[stream.position], clock) for _ in range(WARM_UP + BLOCK)]
            taken[name] += block[WARM_UP:]
    quartiles = {name: 1e3 * np.percentile(times, (25, 50, 75)) for name, times in taken.items()}
    return {
        "position": (begin + end) // 2,
        "step_ms": {name: float(values[1]) for name, values in quartiles.items()},
        "quartiles_ms": {name: [float(v[0]), float(v[2])] for name, v in quartiles.items()},
        "state_bytes": {name: stream.state_bytes for name, stream in streams.items()},
    }


def timed(stream: Stream, token: int, clock: Callable[[], float]) -> float:
    """Seconds of one step."""
    begin = clock()
    stream.feed([token])
    return clock() - begin


def crossover(points: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The last two measured positions between which a model becomes slower than the linear one.

    ``position`` is interpolated between ``after`` and ``before``; None stands for a side that no
    measured position is on.
    """
    slower = [p["step_ms"][name] - p["step_ms"][LINEAR] for p in points]
    last = max((i for i, excess in enumerate(slower) if excess <= 0), default=None)
    if last is None:
        return {"after": None, "before": points[0]["position"], "position": None}
    after = points[last]["position"]
    if last == len(points) - 1:
        return {"after": after, "before": None, "position": None}
    before = points[last + 1]["position"]
    share = slower[last] / (slower[last] - slower[last + 1])
    position = round(after + share * (before - after))
    return {"after": after, "before": before, "position": position}


def machine() -> str:
    """Processor and cores."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line[:10] == "model name")
    except (OSError, StopIteration):
        pass
    return f"{name}, {psutil.cpu_count()} logical cores, {platform.system()}"


def text(found: dict[str, Any], picture: str) -> str:
    """The page: what was measured, how, and what it shows."""
    names, points, versions = list(found["mixers"]), found["points"], found["versions"]
    weights = "float32" if found["quantize"] == "none" else found["quantize"]
    sizes = ", ".join(f"{name} {count / 1e6:.1f} M" for name, count in found["parameters"].items())
    low, high = found["load_average"]
    measure_of = "time on a core" if found["clock"] == "thread_time" else "time"
    lines = [
        "# Where a linear model overtakes softmax attention",
        "",
        "## Decoding on a CPU",
        "",
        f"Models of {LAYERS} layers, {HIDDEN} wide, {VOCAB:,} tokens, random weights ({weights}); "
        f"parameters: {sizes}. All exported by `edgelin export` (profile fused) and run by "
        f"`edgelin.runtimes` in one process, in turns of {found['block']} steps; a number is the "
        f"median {measure_of} of {found['steps']} steps around the position. The cache of softmax "
        f"attention is float32; the standard operators of the graphs copy it at every step.",
        "",
        f"{found['date']}; {found['machine']}; {found['threads']} thread(s) for onnxruntime "
        f"{versions['onnxruntime']}; edgelin {versions['edgelin']}, Python {versions['python']}; "
        f"load average {low:.1f} to {high:.1f}. `python benchmarks/crossover/decoding.py`.",
        "",
        f"![Step time and state against position]({picture})",
        "",
        "| position | " + " | ".join(f"{n}, ms a step | state, MB" for n in names) + " |",
        "| ---: |" + " ---: | ---: |" * len(names),
    ]
    for p in points:
        cells = [f"{p['step_ms'][n]:.2f} | {p['state_bytes'][n] / 1e6:.2f}" for n in names]
        lines.append(f"| {p['position']:,} | {' | '.join(cells)} |")
    lines += ["", *(f"- {sentence(found, name)}" for name in found["crossover"]), ""]
    return "\n".join(lines)


def sentence(found: dict[str, Any], name: str) -> str:
    """The crossover in words, and the cost at the last position."""
    at, last = found["crossover"][name], found["points"][-1]
    if at["after"] is None:
        crossing = f"slower than {LINEAR} at every measured position, from {at['before']:,} on"
    elif at["before"] is None:
        crossing = f"not slower than {LINEAR} at any measured position"
    else:
        crossing = (
            f"slower than {LINEAR} from a position between {at['after']:,} and "
            f"{at['before']:,} on ({at['position']:,} by interpolation)"
        )
    times = last["step_ms"][name] / last["step_ms"][LINEAR]
    sizes = last["state_bytes"][name] / last["state_bytes"][LINEAR]
    return (
        f"{name}: {crossing}; at {last['position']:,} a step takes {times:.1f} times as long and "
        f"the state is {sizes:,.0f} times as large."
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """Step time and state size against position."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    points = found["points"]
    position = [p["position"] for p in points]
    for name in found["mixers"]:
        (line,) = left.plot(position, [p["step_ms"][name] for p in points], "o-", label=name)
        low, high = zip(*(p["quartiles_ms"][name] for p in points), strict=True)
        left.fill_between(position, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        right.plot(position, [p["state_bytes"][name] / 1e6 for p in points], "o-", label=name)
    left.set(xlabel="position, tokens", ylabel="step, ms (median, quartiles)", ylim=(0, None))
    right.set(xlabel="position, tokens", ylabel="state, MB", yscale="log")
    left.legend(fontsize="small")
    measure.save_figure(figure, path)


if __name__ == "__main__":
    main()
