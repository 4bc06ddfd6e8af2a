"""What stands in the output folder is only replaced by something better: never by a wreck."""

from __future__ import annotations

import dataclasses
import errno
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from edgelin import checkpoint
from edgelin.config import RunConfig, from_dict
from edgelin.errors import EdgelinError
from edgelin.train import loop, snapshot, text
from edgelin.train.loop import train


def _files(folder: Path) -> dict[str, bytes]:
    """Content of every file that must stand after a failure."""
    volatile = {"log.jsonl", "loss.png"}
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in volatile
    }


def _with(config: RunConfig, **values: Any) -> RunConfig:
    optim = {key: value for key, value in values.items() if hasattr(config.optim, key)}
    others = {key: value for key, value in values.items() if key not in optim}
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, **optim), **others)


def test_a_loss_that_is_not_finite_ends_the_run(config: RunConfig, tmp_path: Path) -> None:
    wild = _with(config, learning_rate=1e30, warmup_steps=0, log_every=3)
    with pytest.raises(EdgelinError, match=r"^the loss is nan at step 3; .* \(nothing was saved\)"):
        train(wild, tmp_path / "out", device="cpu")


@pytest.mark.parametrize("every", [(4, 0), (0, 2), (0, 0)])
@pytest.mark.parametrize("held_out", [True, False])
def test_a_run_that_diverges_leaves_what_was_saved(
    run: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: tuple[int, int],
    held_out: bool,
) -> None:
    if not held_out:
        run["data"]["valid"] = []
    config = from_dict(RunConfig, run)
    out = tmp_path / "out"
    train(_with(config, steps=3), out, device="cpu")
    before = _files(out)
    wild = _with(config, eval_every=every[0], save_every=every[1], log_every=1000)
    with monkeypatch.context() as patch, pytest.raises(EdgelinError) as error:
        patch.setattr(loop, "learning_rate", lambda *args: math.nan)
        train(wild, out, resume=True, device="cpu")
    assert str(error.value).endswith("(the state of step 3 is kept, go on from it with --resume)")
    assert _files(out) == before
    assert train(config, out, resume=True, device="cpu").step == 10


@pytest.mark.parametrize("held_out", [True, False])
def test_a_run_that_diverges_at_once_saves_nothing(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: bool
) -> None:
    if not held_out:
        run["data"]["valid"] = []
    config = _with(from_dict(RunConfig, run), log_every=1000)
    monkeypatch.setattr(loop, "learning_rate", lambda *args: math.nan)
    with pytest.raises(EdgelinError, match=r"\(nothing was saved\)$"):
        train(config, tmp_path / "out", device="cpu")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"cache", "log.jsonl"}


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_not_the_best(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, score: float
) -> None:
    scores = iter([2.0, score])
    monkeypatch.setattr(text.Windows, "bits_per_byte", lambda self, model: next(scores))
    out = tmp_path / "out"
    message = f"^the held-out score is {score} at step 8; .* \\(the checkpoint that scored best is "
    with pytest.raises(EdgelinError, match=message):
        train(_with(config, save_every=0), out, device="cpu")
    checkpoint.load(out)


@pytest.mark.parametrize("part", ["embedding", "moment"])
def test_tensors_that_are_not_finite_are_not_saved(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    step = loop.Trainer._train_step

    def broken(self: loop.Trainer) -> Any:
        result = step(self)
        if self.step == 4:
            weight = self.model.embedding.weight
            values = self._optimizer.state[weight]["exp_avg"] if part == "moment" else weight.data
            values[17] = math.nan
        return result

    monkeypatch.setattr(loop.Trainer, "_train_step", broken)
    config = _with(config, eval_every=0, save_every=2)
    with pytest.raises(EdgelinError, match=r"is nan at step 4; .*\(the state of step 2 is kept, "):
        train(config, tmp_path / "out", device="cpu")
    assert snapshot.load(tmp_path / "out")[0].step == 2
    assert checkpoint.load(tmp_path / "out")[0].embedding.weight.isfinite().all()


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "edgelin.json",
        "model.safetensors",
        "model-00001-of-00003.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_a_folder_with_a_model_is_not_overwritten(
    config: RunConfig, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("{}", encoding="utf-8")
    with pytest.raises(EdgelinError) as error:
        train(config, out, device="cpu")
    assert str(error.value) == (
        f"{out} holds a model without training state ({name}), which training would overwrite; "
        f"choose another --out"
    )
    assert _files(tmp_path / "out") == {name: b"{}"}


def test_the_checkpoint_of_a_run_without_its_state_is_not_overwritten(
    config: RunConfig, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train(_with(config, steps=1), out, device="cpu")
    shutil.rmtree(out / "training_state")
    before = _files(out)
    with pytest.raises(EdgelinError, match="holds a model without training state"):
        train(config, out, device="cpu")
    assert _files(out) == before


@pytest.mark.parametrize("held_out", [True, False])
def test_a_full_disk_leaves_no_half_checkpoint(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: bool
) -> None:
    if not held_out:
        run["data"]["valid"] = []
    config, out = from_dict(RunConfig, run), tmp_path / "out"

    def full(tensors: Any, path: Path, **options: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(EdgelinError, match="No space left on device; make room"):
            train(config, out, device="cpu")
    assert {p.name for p in out.iterdir()} == {"cache", "log.jsonl"}
    train(_with(config, steps=3), out, device="cpu")
    before = _files(out)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "save_file", full)
        with pytest.raises(EdgelinError, match="No space left on device; make room"):
            train(config, out, resume=True, device="cpu")
    assert _files(out).keys() == before.keys()
    assert torch.isfinite(snapshot.load(out)[1]["model/embedding.weight"]).all()
