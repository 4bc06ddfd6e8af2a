"""Runs on features: order, loss and score beside plain loops; resuming is bit-equal."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from edgelin import checkpoint
from edgelin.cli import main
from edgelin.config import OptimConfig, RunConfig, from_dict
from edgelin.errors import EdgelinError
from edgelin.model import SequenceModel
from edgelin.train import features, log, loop, snapshot
from edgelin.train.dataset import load

KINDS = [(head, task) for head in ("step", "sequence") for task in ("classification", "regression")]


def _answers(x: np.ndarray[Any, Any], lengths: list[int], head: str, task: str) -> Any:
    """Something that can be learned: the sign of column 0, or its value, of a frame or a mean."""
    values = x[:, 0]
    if head == "sequence":
        values = np.array([part.mean() for part in np.split(values, np.cumsum(lengths)[:-1])])
    if task == "regression":
        return np.stack([values, -values], 1).astype(np.float32)
    classes = (values > 0).astype(np.int64)
    if head == "step":
        classes[::7] = -1
    return classes


def _write(path: Path, head: str, task: str, *, seed: int = 0, count: int = 40) -> Path:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 30, count)
    x = generator.normal(size=(lengths.sum(), 3)).astype(np.float32)
    x = np.array([100, 1, 1], np.float32) * x + np.array([0, 50, 7], np.float32)
    x[:, 2] = 7
    np.savez(path, x=x, lengths=lengths, y=_answers(x / 100, list(lengths), head, task))
    return path


def _run(tmp_path: Path, head: str = "sequence", task: str = "classification") -> dict[str, Any]:
    _write(tmp_path / "train.npz", head, task)
    _write(tmp_path / "valid.npz", head, task, seed=1, count=15)
    mixer = {"type": "gated_deltanet", "num_heads": 1, "key_dim": 8, "value_dim": 12}
    return {
        "model": {
            "features": {"size": 3, "outputs": 2, "head": head, "task": task},
            "hidden_size": 16,
            "intermediate_size": 24,
            "layers": ["gdn"],
            "mixers": {"gdn": mixer},
            "dropout": 0.1,
        },
        "data": {
            "train": [str(tmp_path / "train.npz")],
            "valid": [str(tmp_path / "valid.npz")],
        },
        "optim": {
            "steps": 8,
            "batch_size": 4,
            "sequence_length": 12,
            "warmup_steps": 3,
            "learning_rate": 1e-2,
        },
        "eval_every": 4,
        "save_every": 4,
        "log_every": 3,
    }


def _remembering(config: RunConfig) -> SequenceModel:
    """A new model whose answers depend much on what it read before."""
    torch.manual_seed(0)
    model = SequenceModel(config.model)
    model.blocks[0].mixer.out_proj.weight.data.mul_(200)
    model.head.weight.data.mul_(50)
    return model


def test_order_reads_every_window_once_an_epoch() -> None:
    lengths = np.array([3, 12, 13, 40, 5, 24, 1, 12])
    optim = OptimConfig(batch_size=3, sequence_length=12, steps=1)
    order = features.Order(lengths, optim, seed=5)
    assert order.steps_per_epoch == 4  # 1, 1, 2, 4, 1, 2, 1, 1 windows: one of 13 is left out
    seen: list[int] = []
    places = set()
    for step in range(400):
        sequences, offsets, windows = order.windows(step)
        assert (windows == np.minimum(lengths[sequences], 12)).all()
        assert (offsets >= 0).all()
        assert (offsets + windows <= lengths[sequences]).all()
        places |= {(int(s), int(o)) for s, o in zip(sequences, offsets, strict=True)}
        seen += sequences.tolist()
        if (step + 1) % 4 == 0:
            counts = np.bincount(seen[-12:], minlength=8)
            assert (counts <= [1, 1, 2, 4, 1, 2, 1, 1]).all()
    assert {o for s, o in places if s == 3} == set(range(29))  # every place of the longest
    again = features.Order(lengths, optim, seed=5)
    for a, b in zip(again.windows(399), order.windows(399), strict=True):
        assert (a == b).all()
    assert features.Order(lengths, optim, seed=6).windows(0)[0].tolist() != seen[:3]
    with pytest.raises(EdgelinError, match="holds 13 windows, one batch needs 14; lower"):
        features.Order(lengths, dataclasses.replace(optim, batch_size=14), seed=5)


@pytest.mark.parametrize(("head", "task"), KINDS)
def test_loss_and_score_are_those_of_a_plain_loop(tmp_path: Path, head: str, task: str) -> None:
    """Each sequence by itself, float64, no padding; longer ones are not cut here."""
    run = _run(tmp_path, head, task)
    run["optim"] |= {"batch_size": 40, "sequence_length": 30}
    config = from_dict(RunConfig, run)
    task_of = features.FeatureTask(config, torch.device("cpu"))
    model = _remembering(config).eval()
    task_of.initialise(model)
    loss, after = task_of.loss(model, model.hidden, 0, None, compiled=False)
    assert after == {}
    held_out = task_of.score(model)
    assert not model.training

    def plain(path: str) -> tuple[float, float]:
        losses, hits = [], []
        file = np.load(path)
        ends = np.cumsum(file["lengths"])
        exact = SequenceModel(config.model).double().eval()
        exact.load_state_dict(model.state_dict())
        for i, (end, length) in enumerate(zip(ends, file["lengths"], strict=True)):
            x = torch.from_numpy(file["x"][end - length : end]).double()
            outputs = exact(x[None])[0][0].detach().numpy()
            steps = range(length) if head == "step" else [length - 1]
            for t in steps:
                y = file["y"][end - length + t] if head == "step" else file["y"][i]
                if task == "regression":
                    losses.append(np.square(outputs[t] - y).mean())
                elif y >= 0:
                    z = outputs[t]
                    losses.append(np.log(np.exp(z).sum()) - z[y])
                    hits.append(z.argmax() == y)
        return float(np.mean(losses)), float(np.mean(hits or losses))

    assert loss.item() == pytest.approx(plain(config.data.train[0])[0], rel=1e-5)
    assert held_out == pytest.approx(plain(config.data.valid[0])[1], rel=1e-5)


def test_a_long_sequence_is_scored_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = from_dict(RunConfig, _run(tmp_path, "step", "regression"))
    model = _remembering(config)
    assert config.model.features is not None
    data = load(config.data.valid, config.model.features)
    whole = features.score(model, data)
    monkeypatch.setattr(features, "_CHUNK", 5)
    monkeypatch.setattr(features, "_FRAMES", 40)
    assert features.score(model, data) == pytest.approx(whole, rel=1e-5)
    assert model.training


def test_the_model_normalises_by_the_training_data(tmp_path: Path) -> None:
    config = from_dict(RunConfig, _run(tmp_path))
    model = SequenceModel(config.model)
    features.FeatureTask(config, torch.device("cpu")).initialise(model)
    x = np.load(config.data.train[0])["x"].astype(np.float64)
    np.testing.assert_allclose(model.embedding.mean, x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(model.embedding.scale[:2], 1 / x.std(0)[:2], rtol=1e-5)
    assert model.embedding.scale[2] == 1  # a constant column


@pytest.mark.parametrize(("head", "task"), KINDS)
def test_resumed_run_is_bit_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, task: str
) -> None:
    config = from_dict(RunConfig, _run(tmp_path, head, task))
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    whole = loop.train(config, straight, device="cpu")
    assert whole.metric == ("accuracy" if task == "classification" else "mean_squared_error")
    gradients = loop.Trainer._gradients

    def stopping(self: loop.Trainer) -> Any:
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return gradients(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_gradients", stopping)
        assert loop.train(config, parted, device="cpu").interrupted
    torch.manual_seed(99)
    assert loop.train(config, parted, resume=True, device="cpu") == whole
    tensors, resumed = snapshot.load(straight)[1], snapshot.load(parted)[1]
    assert all(torch.equal(tensors[key], resumed[key]) for key in tensors)
    model = (straight / "model.safetensors").read_bytes()
    assert model == (parted / "model.safetensors").read_bytes()
    names = {path.name for path in straight.iterdir()}
    assert names == {
        "config.json", "log.jsonl", "loss.png", "model.safetensors", "training_state"
    }  # fmt: skip
    entries = log.read(straight / "log.jsonl")
    assert [e["step"] for e in entries if whole.metric in e] == [4, 8]
    assert {"frames", "loss", "frames_per_second"} <= entries[0].keys()
    assert entries[-1] == {"step": 8, f"streamed_{whole.metric}": whole.score}


@pytest.mark.parametrize(
    ("task", "scores", "best"),
    [("classification", [0.5, 0.75, 0.7], 0.75), ("regression", [0.5, 0.4, 0.6], 0.4)],
)
def test_the_best_weights_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, scores: list[float], best: float
) -> None:
    run = _run(tmp_path, task=task)
    run["eval_every"] = 3
    left = iter([*scores, best])
    monkeypatch.setattr(features, "score", lambda model, data: next(left))
    kept = []
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *a: (kept.append(a), save(*a)))
    loop.train(from_dict(RunConfig, run), tmp_path / "out", device="cpu")
    assert len(kept) == 2
    assert snapshot.load(tmp_path / "out")[0].best == best


def test_the_command_learns_from_a_file_and_keeps_the_latest(tmp_path: Path) -> None:
    _write(tmp_path / "train.npz", "sequence", "classification")
    (tmp_path / "run.toml").write_text(
        """
log_every = 1
[model]
hidden_size = 16
intermediate_size = 24
layers = ["gdn"]
[model.features]
size = 3
outputs = 2
head = "sequence"
labels = ["below", "above"]
[model.mixers.gdn]
type = "gated_deltanet"
num_heads = 1
key_dim = 8
value_dim = 8
[data]
train = ["train.npz"]
[optim]
steps = 60
batch_size = 20
sequence_length = 32
warmup_steps = 5
learning_rate = 1e-2
""",
        encoding="utf-8",
    )
    arguments = ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/out: 60 steps\n")
    model, config = checkpoint.load(tmp_path / "out")
    assert config.features is not None
    assert config.features.labels == ("below", "above")
    tensors = snapshot.load(tmp_path / "out")[1]
    assert torch.equal(model.norm.weight, tensors["model/norm.weight"])
    assert features.score(model, load([tmp_path / "train.npz"], config.features)) > 0.9

    other = ["--out", str(tmp_path / "other"), "--set"]
    for setting, message in (
        ("data.carry_state=true", "data.carry_state is True, which is for text only; leave it out"),
        ("data.tokenizer='a'", "data.tokenizer is 'a', which is for text only; leave it out"),
        ("model.features.size=4", "train.npz: x has 3 features a frame, the model reads 4"),
    ):
        result = CliRunner().invoke(main, [*arguments[:2], *other, setting])
        assert result.exit_code == 1
        assert message in result.stderr.splitlines()[-1], result.stderr


def test_other_data_are_not_resumed(tmp_path: Path) -> None:
    config = from_dict(RunConfig, _run(tmp_path))
    loop.train(config, tmp_path / "out", device="cpu")
    _write(tmp_path / "train.npz", "sequence", "classification", seed=9)
    with pytest.raises(EdgelinError, match=r"cannot resume .* with another data\.train"):
        loop.train(config, tmp_path / "out", resume=True, device="cpu")
