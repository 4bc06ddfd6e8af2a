"""What it costs to load, save and copy a state, in steps of the same stream.

Every operation is timed in turn with a step of one token, so that whatever else the machine does
hits both; medians of the rounds, and of their ratios, are printed as a Markdown table.

    python benchmarks/state_moves.py BUNDLE --prompt 512
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import edgelin
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.stream import Stream


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    begin = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begin)


def moves(bundle: Bundle, stream: Stream, folder: Path) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    files = {dtype: folder / dtype for dtype in ("float32", "int8")}
    for dtype, path in files.items():
        stream.save(path, dtype=dtype)
    ids = np.random.default_rng(0).integers(1, 100, stream.position)

    def first_step() -> None:
        stream.load(files["float32"])
        stream.feed([5])

    def first_token() -> None:
        stream.load(files["float32"])
        next(stream.generate(max_tokens=1, temperature=0.0))

    return {
        "read the bytes of the file": files["float32"].read_bytes,
        "load": lambda: stream.load(files["float32"]),
        "load and read a token": first_step,
        "load and write a token": first_token,
        "load int8": lambda: stream.load(files["int8"]),
        "save": lambda: stream.save(folder / "saved"),
        "fork": stream.fork,
        f"read {len(ids)} tokens instead": lambda: bundle.stream(capsule="none").feed(ids),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompt", type=int, default=512, help="tokens that the state has read")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--variant", help="variant of the bundle")
    options = parser.parse_args()
    bundle = edgelin.load(options.bundle, variant=options.variant, threads=1)
    stream = bundle.stream(capsule="none")
    stream.feed(np.random.default_rng(1).integers(1, 100, options.prompt))
    version = importlib.metadata.version
    print(
        f"{datetime.date.today()}; {platform.machine()}, {platform.system()}; onnxruntime "
        f"{version('onnxruntime')}, numpy {version('numpy')}, edgelin {edgelin.__version__}; "
        f"variant {bundle.variant}, 1 thread, state {stream.state_bytes:,} bytes\n"
    )
    print("| operation | ms | steps |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for name, work in moves(bundle, stream, Path(folder)).items():
            rounds = [(timed(work), timed(lambda: stream.feed([5]))) for _ in range(options.rounds)]
            taken = statistics.median(pair[0] for pair in rounds)
            ratio = statistics.median(pair[0] / pair[1] for pair in rounds)
            print(f"| {name} | {taken:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
