"""The log of a run (``log.jsonl``, one JSON object a line) and the picture of its losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from edgelin.files import replacing
from edgelin.train.task import Metric


class Log:
    """Appends entries to a JSON-lines file.

    Args:
        path: The file.
        last_step: Entries after this step are dropped: a resumed run will make them again.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._path = path
        kept = [entry for entry in read(path) if entry["step"] <= last_step]
        with replacing(path) as part:
            part.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")

    def write(self, **entry: Any) -> None:
        """Append one entry; it has at least ``step``."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All whole entries of a log; an empty list if there is none.

    A line that a crash cut off, or that is no entry, is left out.
    """
    if not path.is_file():
        return []
    entries = []
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
    return entries


def plot(log: Path, picture: Path, unit: str, metric: Metric) -> None:
    """Draw training loss and held-out score over what was read, as a PNG.

    Args:
        log: The log.
        picture: The PNG.
        unit: Key of what was read, a plural.
        metric: The score.
    """
    entries = read(log)
    # A bare Figure draws without a display and leaves pyplot's global state alone.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left = figure.add_subplot()
    train = [(e[unit], e["loss"]) for e in entries if {unit, "loss"} <= e.keys()]
    valid = [(e[unit], e[metric.name]) for e in entries if {unit, metric.name} <= e.keys()]
    left.set_xlabel(f"training {unit}")
    left.set_ylabel("training loss")
    lines = []
    if train:
        lines += left.plot(*zip(*train, strict=True), color="C0", label="training loss")
    if valid:
        right = left.twinx()
        right.set_ylabel(f"held-out {metric.words}")
        lines += right.plot(*zip(*valid, strict=True), "o-", color="C1", label="held-out")
    if lines:
        left.legend(handles=lines)
    with replacing(picture) as part:
        figure.savefig(part, format="png", dpi=120)
