"""Training state on disk: whole or not at all, in small files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from edgelin.errors import EdgelinError
from edgelin.train import snapshot
from edgelin.train.snapshot import Progress


def _tensors(value: float) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((i, 40), value + i) for i in range(8)} | {
        "step": torch.tensor(3.0),
        "position": torch.tensor([1, 2]),
    }


def test_round_trip_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_SHARD", (64 << 10) + 1000)
    done = Progress(7, 1.5, None, {"seed": 0})
    snapshot.save(tmp_path, done, _tensors(0.5))
    files = sorted(p.name for p in (tmp_path / "training_state" / "step-00000007").iterdir())
    assert files[0] == "state.json"
    assert files[1].startswith("training_state-00001-of-0000")
    assert len(files) > 4
    progress, tensors = snapshot.load(tmp_path)
    assert progress == done
    assert tensors.keys() == _tensors(0.5).keys()
    assert all(torch.equal(tensors[name], value) for name, value in _tensors(0.5).items())


def test_a_shard_stays_below_15_mib(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.zeros(1 << 20) for i in range(8)}
    snapshot.save(tmp_path, Progress(1, 0, None, {}), tensors)
    sizes = [p.stat().st_size for p in tmp_path.rglob("*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) < 15 << 20


def test_a_crash_leaves_the_snapshot_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot.save(tmp_path, Progress(1, 0, None, {}), _tensors(1))

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            snapshot.save(tmp_path, Progress(2, 0, None, {}), _tensors(2))
    assert snapshot.load(tmp_path)[0].step == 1
    assert [p.name for p in (tmp_path / "training_state").iterdir()] == ["step-00000001"]
    snapshot.save(tmp_path, Progress(3, 0, 1.5, {}), _tensors(3))
    snapshot.save(tmp_path, Progress(3, 0, 1.25, {}), _tensors(3))
    assert [p.name for p in (tmp_path / "training_state").iterdir()] == ["step-00000003"]
    progress, tensors = snapshot.load(tmp_path)
    assert progress.best == 1.25
    assert torch.equal(tensors["t2"], _tensors(3)["t2"])


def test_missing_and_damaged_snapshots(tmp_path: Path) -> None:
    with pytest.raises(EdgelinError, match=r"holds no training state; start the run without"):
        snapshot.load(tmp_path)
    snapshot.save(tmp_path, Progress(1, 0, None, {}), _tensors(1))
    shard = next(tmp_path.rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(
        EdgelinError, match=r"step-00000001 is damaged \(.*\); start again in another --out"
    ):
        snapshot.load(tmp_path)
    shard.unlink()
    with pytest.raises(EdgelinError, match="is damaged"):
        snapshot.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": "3"},
        {"elapsed": float("nan")},
        {"best": "low"},
        {"run": []},
        {"shards": "many"},
    ],
)
def test_values_that_no_run_writes_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    snapshot.save(tmp_path, snapshot.Progress(1, 1.0, None, {}), {"x": torch.zeros(2)})
    file = tmp_path / "training_state" / "step-00000001" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(EdgelinError, match="is damaged"):
        snapshot.load(tmp_path)
