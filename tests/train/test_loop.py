"""Whole runs on the CPU: resuming is bit-equal, stops are clean, what is kept is the best."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from edgelin import checkpoint
from edgelin.config import RunConfig, from_dict
from edgelin.errors import EdgelinError
from edgelin.train import log, loop, optimizer, snapshot, text
from edgelin.train.loop import train


def _with(config: RunConfig, **optim: Any) -> RunConfig:
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, **optim))


def _stop_after(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    """Send a signal to this process while it computes a step."""
    gradients = loop.Trainer._gradients

    def patched(self: loop.Trainer) -> Any:
        if self.step == step - 1:
            os.kill(os.getpid(), number)
        return gradients(self)

    monkeypatch.setattr(loop.Trainer, "_gradients", patched)


def _without_time(path: Path) -> list[dict[str, Any]]:
    clock = ("seconds", "tokens_per_second")
    return [{k: v for k, v in entry.items() if k not in clock} for entry in log.read(path)]


@pytest.mark.parametrize("carry", [False, True])
def test_resumed_run_is_bit_equal(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carry: bool
) -> None:
    run["data"]["carry_state"] = carry
    run["log_every"] = 1
    config = from_dict(RunConfig, run)
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    whole = train(config, straight, device="cpu")
    with monkeypatch.context() as patch:
        _stop_after(patch, 5)
        first = train(config, parted, device="cpu")
    assert (first.step, first.interrupted, first.score) == (5, True, None)
    torch.manual_seed(99)
    second = train(config, parted, resume=True, device="cpu")
    assert second == whole
    done, tensors = snapshot.load(straight)
    again, resumed = snapshot.load(parted)
    assert (done.step, done.best, done.run) == (again.step, again.best, again.run)
    assert tensors.keys() == resumed.keys()
    assert any(key.startswith("carried/") for key in tensors) == carry
    assert all(torch.equal(tensors[key], resumed[key]) for key in tensors)
    assert _without_time(straight / "log.jsonl") == _without_time(parted / "log.jsonl")
    model = (straight / "model.safetensors").read_bytes()
    assert model == (parted / "model.safetensors").read_bytes()


def test_attention_to_all_tokens_trains_but_carries_no_state(
    run: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "window": 0}
    run["model"]["mixers"]["gdn"] = {"type": "attention", **sizes}
    result = train(from_dict(RunConfig, run), tmp_path / "out", device="cpu")
    assert result.step == 10 and result.score is not None and math.isfinite(result.score)
    run["data"]["carry_state"] = True
    with pytest.raises(EdgelinError, match=r"layer 0, which attends to all tokens, grow"):
        train(from_dict(RunConfig, run), tmp_path / "other", device="cpu")


def test_run_leaves_a_checkpoint_a_log_and_a_picture(config: RunConfig, tmp_path: Path) -> None:
    result = train(config, tmp_path / "out", device="cpu")
    assert result.step == 10
    assert result.score is not None
    entries = log.read(tmp_path / "out" / "log.jsonl")
    losses = [e for e in entries if "loss" in e]
    assert [e["step"] for e in losses] == [3, 6, 9, 10]
    keys = ["step", "seconds", "tokens", "loss", "lr", "grad_norm", "tokens_per_second"]
    assert list(losses[0]) == keys
    assert losses[-1]["tokens"] == 600
    assert losses[-1]["loss"] < losses[0]["loss"] < math.log(300) + 0.1
    assert [e["step"] for e in entries if "bits_per_byte" in e] == [4, 8, 10]
    assert entries[-1] == {"step": 10, "streamed_bits_per_byte": result.score}
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    model, _ = checkpoint.load(tmp_path / "out")
    _, tensors = snapshot.load(tmp_path / "out")
    name, tensor = next(iter(checkpoint.own_tensors(model).items()))
    assert torch.equal(tensor, tensors[f"model/{name}"])


def test_the_best_weights_are_kept(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([2.0, 1.5, 1.75])
    monkeypatch.setattr(text.Windows, "bits_per_byte", lambda self, model: next(scores))
    kept = []
    save = checkpoint.save

    def record(folder: Path, model: Any, tokenizer_json: str) -> None:
        kept.append(model)
        save(folder, model, tokenizer_json)

    monkeypatch.setattr(checkpoint, "save", record)
    train(config, tmp_path / "out", device="cpu")
    assert len(kept) == 2
    assert snapshot.load(tmp_path / "out")[0].best == 1.5


def test_without_held_out_text_the_latest_is_kept(run: dict[str, Any], tmp_path: Path) -> None:
    del run["data"]["valid"]
    result = train(from_dict(RunConfig, run), tmp_path / "out", device="cpu")
    assert result.score is None
    model, _ = checkpoint.load(tmp_path / "out")
    _, tensors = snapshot.load(tmp_path / "out")
    assert torch.equal(model.embedding.weight, tensors["model/embedding.weight"])


def test_seconds_end_a_run_and_add_up(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run["optim"] |= {"steps": None, "max_seconds": 100.0}
    run["save_every"] = run["eval_every"] = 0
    config = from_dict(RunConfig, run)
    clock = iter(range(10**6))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(clock)))
    with monkeypatch.context() as patch:
        _stop_after(patch, 4, signal.SIGTERM)
        assert train(config, tmp_path / "out", device="cpu").interrupted
    part = snapshot.load(tmp_path / "out")[0].elapsed
    assert 4 < part < 60
    train(config, tmp_path / "out", resume=True, device="cpu")
    done = snapshot.load(tmp_path / "out")[0]
    assert 100 <= done.elapsed < 120
    rates = [e["lr"] for e in log.read(tmp_path / "out" / "log.jsonl") if "loss" in e]
    assert rates[-1] < 0.02 * config.optim.learning_rate


def test_resuming_a_finished_run_changes_nothing(config: RunConfig, tmp_path: Path) -> None:
    first = train(config, tmp_path / "out", device="cpu")
    model = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert train(config, tmp_path / "out", resume=True, device="cpu") == first
    assert model == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_a_folder_is_not_overwritten_and_not_resumed_as_another_run(
    run: dict[str, Any], config: RunConfig, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(EdgelinError, match=r"out holds no run to resume; start it without --resu"):
        train(config, out, resume=True, device="cpu")
    assert not out.exists()
    train(_with(config, steps=1), out, device="cpu")
    with pytest.raises(EdgelinError, match=r"out holds a run already; add --resume, or choose an"):
        train(config, out, device="cpu")
    with pytest.raises(EdgelinError) as error:
        train(_with(config, batch_size=2), out, resume=True, device="cpu")
    assert str(error.value) == (
        f"cannot resume {out} with another optim.batch_size (it was 3, is now 2); put it back, "
        f"or start a new run in another --out"
    )
    run["model"]["dropout"] = 0.0
    with pytest.raises(EdgelinError, match="with another model; put it back"):
        train(from_dict(RunConfig, run), out, resume=True, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_cuda_without_a_gpu_is_refused(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(EdgelinError, match="there is no CUDA GPU; take --device cpu or auto"):
        train(config, tmp_path / "out", device="cuda")


def test_vectors_do_not_decay(config: RunConfig) -> None:
    model = loop.SequenceModel(config.model)
    built = optimizer.build(model, config.optim)
    decay = {id(p): g["weight_decay"] for g in built.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.1 if parameter.ndim >= 2 else 0.0), name
    assert len(decay) == len(list(model.parameters()))


def test_a_training_state_without_a_tensor_is_refused(config: RunConfig, tmp_path: Path) -> None:
    train(_with(config, steps=1), tmp_path)
    progress, tensors = snapshot.load(tmp_path)
    tensors.pop("model/norm.weight")
    shutil.rmtree(tmp_path / "training_state")
    snapshot.save(tmp_path, progress, tensors)
    with pytest.raises(EdgelinError, match=r"lacks or spoils 'model/norm\.weight'; start again"):
        train(_with(config, steps=2), tmp_path, resume=True)


def test_log_lines_that_are_no_entries_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n[2]\n"three"\n{"step": "4"}\n\xff\n{"step": 5}\n')
    assert log.read(path) == [{"step": 1}, {"step": 5}]


def test_a_log_line_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste', encoding="utf-8")
    log.Log(path, 2).write(step=3, loss=1.0)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1},
        {"step": 2},
        {"step": 3, "loss": 1.0},
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_run_resumes(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    monkeypatch.undo()  # inductor allocates by torch.empty
    run |= {"compile": compiled}
    run["data"]["carry_state"] = True
    config = from_dict(RunConfig, run)
    with monkeypatch.context() as patch:
        _stop_after(patch, 5)
        assert train(config, tmp_path / "out", device="cuda").interrupted
    result = train(config, tmp_path / "out", resume=True, device="cuda")
    assert result.step == 10
    assert result.score is not None
