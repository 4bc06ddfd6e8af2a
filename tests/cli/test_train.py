"""``edgelin train`` from the command line, end to end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from torch.utils._device import _device_constructors

from edgelin import checkpoint
from edgelin.cli import main
from edgelin.train import snapshot

RUN = """
save_every = 0
eval_every = 0
[model]
vocab_size = 280
hidden_size = 16
intermediate_size = 24
layers = ["gdn"]
[model.mixers.gdn]
type = "gated_deltanet"
num_heads = 1
key_dim = 8
value_dim = 8
[data]
train = ["text.txt"]
valid = ["text.txt"]
[optim]
steps = 20
batch_size = 4
sequence_length = 32
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("once upon a time<|end|>\n" * 200, encoding="utf-8")
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    return tmp_path


def test_trains_20_steps(folder: Path) -> None:
    arguments = ["train", str(folder / "run.toml"), "--out", str(folder / "out")]
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{folder}/out: 20 steps, held-out ")
    assert result.stdout.endswith(" bits per byte\n")
    assert result.stdout.count("\n") == 1
    _, config = checkpoint.load(folder / "out")
    assert config.vocab_size == 280
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_default_output_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(main, ["train", "run.toml", "--set", "optim.steps=1"])
    assert result.exit_code == 0, result.output
    assert snapshot.exists(folder / "runs" / "run")


def test_ctrl_c_saves_and_says_how_to_go_on(folder: Path) -> None:
    command = [sys.executable, "-c", "from edgelin.cli import main; main()", "train"]
    command += [str(folder / "run.toml"), "--out", str(folder / "out"), "--device", "cpu"]
    command += ["--set", "optim.steps=100000", "--set", "log_every=1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    log = folder / "out" / "log.jsonl"
    deadline = time.monotonic() + 60
    while not (log.is_file() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert output == ""
    step = snapshot.load(folder / "out")[0].step
    assert errors.splitlines()[-1] == (
        f"Stopped after step {step}, all is saved. Go on with: edgelin train {folder}/run.toml "
        f"--out {folder}/out --resume --device cpu --set optim.steps=100000 --set log_every=1"
    )


def test_a_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "edgelin.train.loop", None)
    result = CliRunner().invoke(main, ["train", str(folder / "run.toml")])
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: training needs edgelin.train.loop: pip install 'edgelin[train]', "
        "in a checkout: pip install -c constraints.txt -e '.[train]'\n"
    )


def test_an_output_that_cannot_be_written_is_named(folder: Path) -> None:
    (folder / "file").write_text("", encoding="utf-8")
    arguments = ["train", str(folder / "run.toml"), "--out", str(folder / "file")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: cannot write {folder}/file: File exists; ")


def test_a_window_that_cannot_be_exported_is_told_at_the_start(folder: Path) -> None:
    local = "{type='attention', num_heads=2, num_kv_heads=1, head_dim=4, window=%d}"
    for window, warned in ((32, 1), (64, 0)):
        arguments = ["train", str(folder / "run.toml"), "--out", str(folder / f"out{window}")]
        arguments += ["--set", f"model.mixers.gdn={local % window}", "--set", "optim.steps=1"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        message = f"warning: an attention window of {window} can't be exported: "
        assert result.stderr.count(message) == warned


def test_a_model_is_checked_before_the_texts_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # a replaced torch.empty does not follow torch.device("meta")
    _device_constructors.cache_clear()
    arguments = ["train", str(folder / "run.toml"), "--out", str(folder / "out")]
    for setting in ("model.mixers.x={type='os.path'}", "model.hidden_size=1048576"):
        wide = ["--set", "model.intermediate_size=1048576"]
        result = CliRunner().invoke(main, [*arguments, *wide, "--set", setting])
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: "), result.output
        assert result.stderr.count("\n") == 1
    assert not (folder / "out").exists()


def test_errors_take_one_line_and_exit_with_1(folder: Path) -> None:
    arguments = ["train", str(folder / "run.toml"), "--set", "optim.step=3"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: config.optim has an unknown key 'step'; did you mean 'steps'?\n"
    )
    assert CliRunner().invoke(main, ["train"]).exit_code == 2
    help_text = CliRunner().invoke(main, ["train", "-h"]).stdout
    assert "Examples:\n    edgelin train examples/demo/config.toml" in help_text
