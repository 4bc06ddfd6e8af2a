"""Streams tokens through a bundle and shows that neither memory nor step time grows.

Writes ``OUT.json`` and ``OUT.png``. Beside the measured growth of resident memory stands the
key-value cache that a softmax transformer of the same width and layers would need by then; it is
computed, not measured: 2 (key and value) * layers * width * 2 bytes (float16) a token.

A machine's speed drifts over minutes. So at the end the long stream also steps in alternation with
a fresh one: the ratio of their medians is what position costs.

    python benchmarks/constant_memory.py BUNDLE --tokens 200000 --out constant_memory
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes import checks, measure
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.stream import Stream

WARM_UP = 1000  # steps until caches and memory pools have settled
WINDOW = 500  # steps whose median is one point


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000, help="length of the stream")
    parser.add_argument("--variant", help="variant of the bundle")
    parser.add_argument("--threads", type=int, help="default: physical cores")
    parser.add_argument("--out", type=Path, default=Path("constant_memory"), help="name of files")
    options = parser.parse_args()
    if options.tokens < 2 * WINDOW:
        parser.error(f"--tokens must be at least {2 * WINDOW}")
    # Not with_suffix: a dot in the name is a part of it.
    table, picture = (Path(f"{options.out}{suffix}") for suffix in (".json", ".png"))
    try:
        checks.target(table)
        measure.check_plot(picture)
        found = measured(options)
        measure.write_json(found, table)
        draw(found, picture)
    except EdgelinError as error:
        sys.exit(f"Error: {error}")
    print(f"RSS growth after {WARM_UP} steps: {found['rss_growth_bytes'] / 2**20:.2f} MiB")
    print(f"median step, end / start: {found['step_ratio']:.3f}")
    print(f"fastest step, end / start: {found['fastest_ratio']:.3f}")
    print(f"median step, end / a fresh stream in alternation: {found['fresh_ratio']:.3f}")
    print(f"states: {found['state_bytes'] / 2**20:.2f} MiB at any position")
    if found["softmax_cache_bytes_computed"] is not None:
        cache = found["softmax_cache_bytes_computed"][-1] / 2**20
        print(f"KV cache of a softmax transformer by then (computed): {cache:.1f} MiB")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Run the stream."""
    bundle = edgelin.load(options.bundle, variant=options.variant, threads=options.threads)
    stream = bundle.stream(capsule="none")
    later = [WARM_UP + p for p in measure.log_spaced(WINDOW, options.tokens, per_octave=2)]
    # The first point only brings in what measuring itself loads.
    points = measure.series(stream, [WARM_UP, *later], WINDOW)[1:]
    width, layers = sizes(options.bundle)
    cache = [2 * layers * width * 2 * p.position for p in points] if width else None
    return {
        "bundle": str(options.bundle),
        "variant": bundle.variant,
        "threads": bundle.threads,
        "state_bytes": stream.state_bytes,
        "warm_up_steps": WARM_UP,
        "window": WINDOW,
        "points": [vars(point) for point in points],
        "rss_growth_bytes": points[-1].rss_bytes - points[0].rss_bytes,
        "step_ratio": points[-1].step_ms / points[0].step_ms,
        "fastest_ratio": points[-1].fastest_ms / points[0].fastest_ms,
        "fresh_ratio": measure.ratio(stream, fresh(bundle), WINDOW),
        "width": width,
        "layers": layers,
        "softmax_cache_bytes_computed": cache,
    }


def fresh(bundle: Bundle) -> Stream:
    """A stream that has just warmed up."""
    stream = bundle.stream(capsule="none")
    measure.series(stream, [WARM_UP], WINDOW)
    return stream


def sizes(bundle: Path) -> tuple[int, int]:
    """Width and layers from the model's ``config.json``; zeros when it does not say."""
    try:
        config = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
        return int(config["hidden_size"]), len(config["layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0


def draw(found: dict[str, Any], path: Path) -> None:
    """Memory growth and step time against position."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    position = [point["position"] for point in found["points"]]
    start = found["points"][0]["rss_bytes"]
    growth = [(point["rss_bytes"] - start) / 2**20 for point in found["points"]]
    left.plot(position, growth, "o-", label="resident memory, growth (measured)")
    if found["softmax_cache_bytes_computed"] is not None:
        cache = [size / 2**20 for size in found["softmax_cache_bytes_computed"]]
        label = f"KV cache, softmax, width {found['width']}, {found['layers']} layers (computed)"
        left.plot(position, cache, "--", color="grey", label=label)
    left.set(xlabel="position, tokens", ylabel="MiB", xscale="log")
    left.legend(fontsize="small")
    for key, label in (("step_ms", "median"), ("fastest_ms", "fastest")):
        right.plot(position, [point[key] for point in found["points"]], "o-", label=label)
    right.set(xlabel="position, tokens", ylabel="step, ms", xscale="log", ylim=(0, None))
    right.legend(fontsize="small")
    measure.save_figure(figure, path)


if __name__ == "__main__":
    main()
