"""``edgelin export --attention``: what becomes of layers that attend to all tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from export_models import VOCAB, make_model

import edgelin
from edgelin import checkpoint, tokenizer
from edgelin.cli import main
from edgelin.errors import EdgelinError
from edgelin.export import attention
from edgelin.export.bundle import export_checkpoint

CORPUS = "a small text of a few words and more words " * 20
FULL = {"type": "attention", "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "window": 0}


def save(folder: Path, *layers: str) -> Path:
    """A checkpoint of these layers."""
    checkpoint.save(folder, make_model(layers), tokenizer.train([CORPUS], VOCAB).to_str())
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and a bundle of it with a window and sinks."""
    path = tmp_path_factory.mktemp("attention")
    save(path / "checkpoint", "full", "attention")
    (path / "text.txt").write_text(CORPUS)
    options = ["--attention", "window=64,sinks=3", "--text", str(path / "text.txt")]
    command = ["export", str(path / "checkpoint"), "--out", str(path / "bundle"), *options]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    return path


def test_the_window_and_the_sinks_are_what_a_token_sees(folder: Path) -> None:
    values = json.loads((folder / "checkpoint" / "config.json").read_text())
    assert values["mixers"]["full"]["window"] == 0  # the checkpoint itself stays
    model, _ = checkpoint.load(folder / "checkpoint")
    ids = np.random.default_rng(0).integers(0, VOCAB, 150)
    bundle = edgelin.load(folder / "bundle", threads=1)
    found = bundle.stream().feed(ids, all_outputs=True)
    with torch.no_grad():
        full, _ = model(torch.from_numpy(ids)[None])
    # The first 64 + 3 tokens all see all before them; later ones do not.
    difference = np.abs(found - full[0].numpy()).max(-1) / np.abs(found).max()
    assert difference[:67].max() < 1e-5 and difference[67:].min() > 1e-5
    shapes = {spec.name: spec.shape for spec in bundle.manifest.states}
    assert shapes["key.0"] == (2, 67, 8) and shapes["key.1"] == (2, 64, 8)


def test_verify_finds_the_choice_in_the_bundle(folder: Path, tmp_path: Path) -> None:
    command = ["verify", str(folder / "bundle"), "--checkpoint"]
    result = CliRunner().invoke(main, [*command, str(folder / "checkpoint")])
    assert result.exit_code == 0, result.output
    other = save(tmp_path / "other", "full", "full")
    result = CliRunner().invoke(main, [*command, str(other)])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"Error: {other} is another model")


def test_the_report_says_what_the_window_costs(folder: Path) -> None:
    report = json.loads((folder / "bundle" / "report.json").read_text())
    cost = report["attention_cost"]
    assert report["attention"] == "window=64,sinks=3" and report["state_bytes_per_step"] == 0
    assert cost["tokens"] > 100 and cost["full"] != cost["window"]
    for name, row in (("full", folder / "checkpoint"), ("window", folder / "bundle")):
        result = CliRunner().invoke(
            main, ["eval", str(row), "--text", str(folder / "text.txt"), "--json"]
        )
        assert json.loads(result.stdout)["bits_per_byte"] == pytest.approx(cost[name], rel=1e-5)
    text = (folder / "bundle" / "report.md").read_text()
    assert "sees the last 64 and the first 3, in constant memory" in text
    assert f"{cost['full']:.4f} bits per byte" in text and "Not constant memory" not in text


def test_without_a_text_the_report_says_so(tmp_path: Path) -> None:
    source = save(tmp_path / "checkpoint", "full")
    export_checkpoint(source, tmp_path / "bundle", attention="window=64")
    assert "What that costs was not measured" in (tmp_path / "bundle" / "report.md").read_text()


def test_attention_inside_of_other_mixers_is_found(tmp_path: Path) -> None:
    parts = [{"type": "mamba2"}, dict(FULL), {**FULL, "window": 128}]
    values: dict[str, Any] = {"mixers": {"both": {"type": "parallel", "parts": parts}}}
    for name, choice in (("own", None), ("bundle", 256)):
        (tmp_path / name).mkdir()
        parts[1]["window"] = choice or 0
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    choice = attention.chosen(tmp_path / "own", tmp_path / "bundle")
    assert choice == attention.Attention(256)
    with attention.applied(tmp_path / "own", choice) as used:
        assert json.loads((used / "config.json").read_text()) == values
    assert not used.exists()


@pytest.mark.parametrize(
    "given, message",
    [
        ("none", "--attention is 'none'; give full, window=N or window=N,sinks=M"),
        ("window=63", "--attention window=63: a window has 64 tokens or more"),
        ("window=64,sinks=-1", "--attention is 'window=64,sinks=-1'; give full"),
        ("window=64,sinks=99999", "sinks is 99999; give at most 65536"),
        ("window=64", "no layer of .* attends to all tokens; leave --attention out"),
    ],
)
def test_other_choices_are_refused(given: str, message: str, tmp_path: Path) -> None:
    source = save(tmp_path / "checkpoint", "full" if "sinks" in given else "linear")
    with pytest.raises(EdgelinError, match=message):
        export_checkpoint(source, tmp_path / "bundle", attention=given)
    with pytest.raises(EdgelinError, match="give --attention window=N with --text"):
        export_checkpoint(source, tmp_path / "bundle", text="some text")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
