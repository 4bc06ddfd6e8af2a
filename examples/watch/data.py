"""Make the .npz files of the smart-watch exercises from the PyPI package seglearn (1.2.5).

    pip install --no-deps seglearn==1.2.5
    python examples/watch/data.py --person 1 --out examples/watch/data/1

A frame is ten samples of the six channels, 60 numbers five times a second. ``train.npz`` has the
recordings of all other people, their mirror images, and copies of both by people who move faster or
slower and wear the watch askew; ``test.npz`` has those of the person left out, as they are, cut in
windows of four seconds that do not overlap.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

SPLITS = range(1, 11)  # the people
SAMPLES = 10  # of a frame, at 50 Hz
WINDOW = 20  # frames of four seconds
# The other arm: accelerations are mirrored across the watch, turns about its other two axes too.
MIRROR = np.array([-1, 1, 1, 1, -1, -1], dtype=np.float32)
COPIES = 3
PACE = 0.25  # a copy is faster or slower by up to e to this
ASKEW = 0.2  # radians: standard deviation of a copy's turn about each axis


def source() -> dict[str, Any]:
    """The content of the package's file, found without importing the package."""
    spec = importlib.util.find_spec("seglearn")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("seglearn is missing: pip install --no-deps seglearn==1.2.5")
    path = Path(spec.submodule_search_locations[0]) / "data" / "watch_dataset.npy"
    content: dict[str, Any] = np.load(path, allow_pickle=True).item()
    return content


def write(person: int, out: Path) -> None:
    """Write ``train.npz`` and ``test.npz`` with a person left out.

    Args:
        person: 1 to 10.
        out: Folder; made if missing.
    """
    content = source()
    recordings = [np.asarray(x, dtype=np.float32) for x in content["X"]]
    classes, people = np.asarray(content["y"]), np.asarray(content["subject"])
    out.mkdir(parents=True, exist_ok=True)
    train = [i for i in range(len(recordings)) if people[i] != person]
    generator = np.random.default_rng(person)
    parts, answers = [], []
    for i in train:
        for recording in (recordings[i], recordings[i] * MIRROR):
            copies = [_another(recording, generator) for _ in range(COPIES)]
            parts += [_frames(copy) for copy in (recording, *copies)]
            answers += [int(classes[i])] * (1 + COPIES)
    _save(out / "train.npz", parts, answers)
    windows, answers = [], []
    for i in np.flatnonzero(people == person):
        frames = _frames(recordings[i])
        count = len(frames) // WINDOW
        windows += np.split(frames[: count * WINDOW], count)
        answers += [int(classes[i])] * count
    _save(out / "test.npz", windows, answers)


def _another(recording: Array, generator: np.random.Generator) -> Array:
    """A recording ``[n, 6]`` at another pace, by a watch that sits otherwise on the wrist."""
    pace = math.exp(generator.uniform(-PACE, PACE))
    places = np.arange(0, len(recording) - 1, pace)
    samples = np.arange(len(recording))
    moved = np.stack([np.interp(places, samples, channel) for channel in recording.T], 1)
    moved[:, 3:] *= pace
    turn = _rotation(generator.normal(0, ASKEW, 3))
    both = np.concatenate([moved[:, :3] @ turn, moved[:, 3:] @ turn], 1)
    return both.astype(np.float32)


def _rotation(turn: Array) -> Array:
    """The matrix of a turn about an axis by its length in radians (Rodrigues' formula)."""
    angle = float(np.linalg.norm(turn))
    x, y, z = turn / angle
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross


def _frames(recording: Array) -> Array:
    """Samples ``[n, 6]`` to frames ``[n / SAMPLES, 6 SAMPLES]``; a rest is left out."""
    whole = len(recording) // SAMPLES * SAMPLES
    return recording[:whole].reshape(-1, SAMPLES * recording.shape[1])


def _save(path: Path, parts: list[Array], answers: list[int]) -> None:
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    np.savez(path, x=np.concatenate(parts), lengths=lengths, y=np.array(answers, dtype=np.int64))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the files of the smart-watch exercises.")
    parser.add_argument("--person", type=int, choices=SPLITS, default=1, help="who is left out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data" / "1")
    options = parser.parse_args()
    write(options.person, options.out)
