"""Speed of a bundle, and whether time and memory of a step stay the same along a stream."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import psutil
from tqdm import tqdm

import edgelin
from edgelin.errors import EdgelinError
from edgelin.files import replacing
from edgelin.runtimes import checks
from edgelin.runtimes.session import Bundle, default_threads
from edgelin.runtimes.stream import Stream

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW = 64  # steps whose median is one point
_WARM_UP = 16


@dataclass(frozen=True)
class Point:
    """One measured position of a stream.

    Args:
        position: Tokens or steps read when the window of steps ended.
        step_ms: Median time of the last steps, in milliseconds.
        fastest_ms: Shortest of them: what a busy machine disturbs least.
        rss_bytes: Resident memory of the process.
    """

    position: int
    step_ms: float
    fastest_ms: float
    rss_bytes: int


def bench(bundle: Path, *, tokens: int, threads: int | None, variant: str | None) -> dict[str, Any]:
    """Decode and prefill speed with one and all threads, and the series of a long stream.

    Args:
        bundle: Bundle folder.
        tokens: Length of the stream.
        threads: Measure this number of threads only; None is 1 and all physical cores.
        variant: Name of a variant; None is the default one.
    """
    if tokens < WINDOW:
        raise EdgelinError(f"tokens is {tokens}; {WINDOW} or more are needed for a median")
    counts = [threads] if threads is not None else sorted({1, default_threads()})
    speeds, stream = [], None
    for count in counts:
        model = edgelin.load(bundle, variant=variant, threads=count)
        stream = model.stream(capsule="none")
        speeds.append({"threads": count, **speed(model, stream)})
    assert stream is not None
    stream.reset()
    return {
        "bundle": str(bundle),
        "variant": model.variant,
        "profile": model.manifest.profile,
        "unit": model.manifest.input.unit,
        "states_in_place": model.in_place,
        "state_bytes": stream.state_bytes,
        "state_bytes_per_step": sum(spec.bytes_per_step for spec in model.manifest.states),
        "machine": f"{platform.machine()}, {platform.system()}, {psutil.cpu_count()} logical cores",
        "onnxruntime": onnxruntime.__version__,
        "speed": speeds,
        "series_threads": counts[-1],
        "series": [asdict(p) for p in series(stream, log_spaced(WINDOW, tokens))],
    }


def speed(bundle: Bundle, stream: Stream, repeats: int = 100) -> dict[str, float]:
    """Median tokens (or steps) a second, one a call and a chunk a call; advances the stream."""
    chunk, unit = bundle.manifest.chunk, bundle.manifest.input.unit
    inputs = _inputs(stream, chunk)
    stream.feed(inputs)
    steps = [_timed(stream, inputs[:1]) for _ in range(_WARM_UP + repeats)][_WARM_UP:]
    chunks = [_timed(stream, inputs) for _ in range(2 + max(5, repeats // chunk))][2:]
    return {
        f"decode_{unit}s_per_s": 1 / float(np.median(steps)),
        f"prefill_{unit}s_per_s": chunk / float(np.median(chunks)),
    }


def series(stream: Stream, positions: list[int], window: int = WINDOW) -> list[Point]:
    """Feed steps one by one and measure at the given positions.

    Args:
        stream: Where to go on from.
        positions: Ascending, as steps from here; a point is the median of the ``window`` steps
            that end there.
        window: See above.
    """
    inputs = _inputs(stream, 4096)
    process = psutil.Process()
    recent = np.zeros(window)
    points = []
    remaining = iter(positions)
    wanted = next(remaining)
    for step in tqdm(range(1, positions[-1] + 1), unit="step", disable=None, leave=False):
        recent[step % window] = _timed(stream, inputs[step % len(inputs)][None])
        if step == wanted:
            taken = 1e3 * recent[recent > 0]
            rss = process.memory_info().rss
            middle, least = float(np.median(taken)), float(taken.min())
            points.append(Point(stream.position, middle, least, rss))
            wanted = next(remaining, 0)
    return points


def ratio(one: Stream, other: Stream, steps: int) -> float:
    """Median step time of one stream over that of another, taken in alternation."""
    inputs = _inputs(one, steps)
    taken = [[_timed(stream, step[None]) for stream in (one, other)] for step in inputs]
    first, second = np.median(taken, axis=0)
    return float(first / second)


def log_spaced(first: int, last: int, per_octave: int = 1) -> list[int]:
    """Positions from ``first`` to ``last``, each 2^(1/per_octave) times the one before."""
    count = max(2, round(per_octave * np.log2(last / first)) + 1)
    return sorted({round(float(x)) for x in np.geomspace(first, last, count)})


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is measured.

    Raises:
        EdgelinError: matplotlib is not installed or does not know the suffix, or the file cannot
            be written.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise EdgelinError(
            'a plot needs matplotlib: pip install "edgelin[plot]", or use --json'
        ) from error
    checks.target(path)
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise EdgelinError(
            f"{str(path)!r} is no picture that matplotlib can draw; end the name in one of: "
            f"{', '.join(known)}"
        )


def write_json(found: Any, path: Path) -> None:
    """Write results whole or not at all."""
    with _whole(path) as part:
        part.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture whole or not at all, in the format of the name's suffix."""
    with _whole(path) as part:
        figure.savefig(part, dpi=120, format=path.suffix[1:].lower())


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """``replacing`` that tells a full disk in one line."""
    try:
        with replacing(path) as part:
            yield part
    except OSError as error:
        raise EdgelinError(f"{path} cannot be written: {error.strerror or error}") from error


def plot(found: dict[str, Any], title: str, path: Path) -> None:
    """Draw step time and memory against position into a path that :func:`check_plot` allows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    points = found["series"]
    position = [point["position"] for point in points]
    upper.plot(position, [point["step_ms"] for point in points], "o-")
    upper.set(title=title, ylabel="median step, ms", xscale="log", ylim=(0, None))
    memory = [point["rss_bytes"] / 2**20 for point in points]
    lower.plot(position, memory, "o-")
    limits = (0, 1.2 * max(memory))  # a flat line would lie on the frame
    lower.set(xlabel=f"position, {found['unit']}s", ylabel="resident memory, MiB", ylim=limits)
    save_figure(figure, path)


def _timed(stream: Stream, inputs: Any) -> float:
    """Seconds of one feed."""
    begin = time.perf_counter()
    stream.feed(inputs)
    return time.perf_counter() - begin


def _inputs(stream: Stream, count: int) -> Any:
    """Random but repeatable steps, without a batch axis."""
    return stream.input.random(np.random.default_rng(0), 1, count)[0]
