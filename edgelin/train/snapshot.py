"""Training state on disk: all that a run needs to go on bit for bit.

``training_state/step-00001000/`` holds ``state.json`` and safetensors shards of less than 15 MiB
(a larger tensor has a shard of its own): weights, both AdamW moments and, with carried state, the
recurrent states. Random numbers need none of it: they are seeded anew at every step. A snapshot
is written beside under another name and renamed when complete, then the older one is removed, so
that a crash at any moment leaves one whole snapshot.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from edgelin.errors import EdgelinError
from edgelin.files import replacing

_SHARD = 15 << 20
_FORMAT = 1


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Args:
        step: Optimizer steps done.
        elapsed: Seconds of training done, over all calls.
        best: Best held-out score so far (None: not measured).
        run: What must be the same to go on (name to value).
    """

    step: int
    elapsed: float
    best: float | None
    run: dict[str, Any]


def exists(out: Path) -> bool:
    """Whether the output folder of a run holds a snapshot."""
    return _latest(out) is not None


def latest_step(out: Path) -> int | None:
    """Step of the snapshot in the output folder of a run; None if there is none."""
    folder = _latest(out)
    return None if folder is None else int(folder.name.removeprefix("step-"))


def save(out: Path, progress: Progress, tensors: dict[str, torch.Tensor]) -> None:
    """Write a snapshot and remove older ones.

    Args:
        out: Output folder of the run.
        progress: Goes into ``state.json``.
        tensors: By name, on any device.
    """
    root = out / "training_state"
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step-{progress.step:08d}"
    if (final / "state.json").is_file():  # a resumed run that took no step: same tensors
        with replacing(final / "state.json") as file:
            header = json.loads((final / "state.json").read_text(encoding="utf-8"))
            _write_header(file, header | asdict(progress))
        return
    part = root / f".{final.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        _write(part, progress, tensors)
        os.replace(part, final)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in root.iterdir():
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def load(out: Path) -> tuple[Progress, dict[str, torch.Tensor]]:
    """Read the latest snapshot, tensors on the CPU.

    Raises:
        EdgelinError: There is none, or it is damaged.
    """
    folder = _latest(out)
    if folder is None:
        raise EdgelinError(f"{out} holds no training state; start the run without --resume")
    tensors: dict[str, torch.Tensor] = {}
    try:
        header = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if header.pop("format") != _FORMAT:
            raise EdgelinError(f"{folder} was written by another version of edgelin")
        count = header.pop("shards")
        for i in range(count):
            tensors |= load_file(folder / _shard_name(i, count))
        return _checked(Progress(**header)), tensors
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise EdgelinError(
            f"{folder} is damaged ({error}); start again in another --out"
        ) from error


def _checked(progress: Progress) -> Progress:
    """Raise ValueError for values that no run writes."""
    numbers = [progress.elapsed, *([] if progress.best is None else [progress.best])]
    if type(progress.step) is not int or progress.step < 0 or not isinstance(progress.run, dict):
        raise ValueError("state.json has a wrong step or run")
    if not all(isinstance(x, int | float) and math.isfinite(x) and x >= 0 for x in numbers):
        raise ValueError("state.json has a wrong elapsed or best")
    return progress


def _write(folder: Path, progress: Progress, tensors: dict[str, torch.Tensor]) -> None:
    """Put the files of a snapshot into a folder."""
    shards = _shards(tensors)
    for i, names in enumerate(shards):
        shard = {name: tensors[name].detach().cpu().contiguous() for name in names}
        save_file(shard, folder / _shard_name(i, len(shards)))
    header = {"format": _FORMAT, "shards": len(shards)} | asdict(progress)
    _write_header(folder / "state.json", header)


def _write_header(path: Path, header: dict[str, Any]) -> None:
    path.write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")


def _latest(out: Path) -> Path | None:
    found = [
        path.parent
        for path in sorted((out / "training_state").glob("step-*/state.json"))
        if path.parent.name.removeprefix("step-").isdecimal()
    ]
    return found[-1] if found else None


def _shards(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Group names, in order, into shards below the limit."""
    shards: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room or not shards:
            shards.append([])
            room = _SHARD - (64 << 10)  # the file's own header
        shards[-1].append(name)
        room -= size
    return shards


def _shard_name(index: int, count: int) -> str:
    return f"training_state-{index + 1:05d}-of-{count:05d}.safetensors"
