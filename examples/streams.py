"""Train a worked example on every split, export it to int8, and print the table of its README.

    python examples/streams.py digits
    python examples/streams.py watch

A split of the digits is a seed, which shuffles the recordings and is the seed of the run too; one
of the watch is the person whom the model has not met.
"""

from __future__ import annotations

import argparse
import importlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import edgelin
from edgelin import checkpoint
from edgelin.config import load_run
from edgelin.export.bundle import export_checkpoint
from edgelin.runtimes import evaluate_features
from edgelin.runtimes.measure import speed
from edgelin.train import dataset, features
from edgelin.train.loop import train

COLUMNS = (
    "| split | sequences | float32 | int8 | ms a step | s of training |\n" + "| --- " * 6 + "|"
)


@dataclass(frozen=True)
class Row:
    """What came of a split.

    Args:
        sequences: Scored.
        full: Accuracy of the checkpoint.
        quantised: Accuracy of the int8 bundle.
        milliseconds: A step of the bundle on one core.
        seconds: Of one core, for training.
    """

    sequences: int
    full: float
    quantised: float
    milliseconds: float
    seconds: float


def run(config: Path, settings: list[str], files: Path, out: Path) -> Row:
    """Train on a split, export, and score both on its test part."""
    began = time.process_time()
    path = (files / "train.npz").resolve()
    train(load_run(config, [*settings, f"data.train=['{path}']"]), out, device="cpu")
    seconds = time.process_time() - began
    model, sizes = checkpoint.load(out)
    assert sizes.features is not None
    test = dataset.load([files / "test.npz"], sizes.features)
    full = features.score(model, test)
    folder = out.with_name(f"{out.name}-int8")
    export_checkpoint(out, folder, quantise=("int8",))
    bundle = edgelin.load(folder, threads=1)
    quantised = evaluate_features.evaluate(bundle, files / "test.npz").accuracy
    assert quantised is not None
    milliseconds = 1000 / speed(bundle, bundle.stream())["decode_steps_per_s"]
    return Row(len(test.lengths), full, quantised, milliseconds, seconds)


def main() -> None:
    """Run the splits one after another on one core."""
    parser = argparse.ArgumentParser(description="Train a worked example on every split.")
    parser.add_argument("example", choices=["digits", "watch"])
    parser.add_argument("--splits", type=int, nargs="+", help="only these")
    parser.add_argument("--out", type=Path, help="folder for data and runs [runs/EXAMPLE]")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = importlib.import_module(f"{options.example}.data")
    config = Path(__file__).parent / options.example / "config.toml"
    out = options.out or Path("runs") / options.example
    rows = []
    print(COLUMNS)
    for split in options.splits or data.SPLITS:
        files = out / f"data-{split}"
        data.write(split, files)
        seed = split if options.example == "digits" else 0
        row = run(config, [f"seed={seed}", *options.settings], files, out / f"split-{split}")
        print(
            f"| {split} | {row.sequences} | {row.full:.2%} | {row.quantised:.2%} "
            f"| {row.milliseconds:.2f} | {row.seconds:.0f} |",
            flush=True,
        )
        rows.append(row)
    full = sum(row.full for row in rows) / len(rows)
    quantised = sum(row.quantised for row in rows) / len(rows)
    print(f"| mean | | {full:.2%} | {quantised:.2%} | | |")


if __name__ == "__main__":
    main()
