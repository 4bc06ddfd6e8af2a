"""``edgelin export`` from the command line, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgelin import checkpoint, tokenizer
from edgelin.cli import main
from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.model import SequenceModel
from edgelin.runtimes.manifest import Manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one small layer."""
    config = ModelConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=24,
        layers=("gdn",),
        mixers={"gdn": {"type": "gated_deltanet", "num_heads": 1, "key_dim": 8, "value_dim": 8}},
    )
    tokens = tokenizer.train(["a few words and more words " * 20], 300)
    checkpoint.save(tmp_path / "run", SequenceModel(config), tokens.to_str())
    return tmp_path / "run"


def test_export_writes_a_bundle_and_prints_the_report(folder: Path) -> None:
    arguments = ["export", str(folder), "--quantize", "none", "--quantize", "int4"]
    result = CliRunner().invoke(main, [*arguments, "--profile", "plain"])
    assert result.exit_code == 0, result.stderr
    out = folder.with_name("run-bundle")
    assert list(Manifest.read(out).variants) == ["model", "model_q4"]
    assert result.stdout.startswith(f"{out}: profile plain, ")
    assert result.stdout.endswith(f"\nThe whole report: {out / 'report.md'}\n")
    assert (out / "report.md").read_text().startswith("# Export report: profile plain\n")
    assert "tracing 1 layers" in result.stderr
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 1
    assert again.stderr == (
        f"Error: {out} exists; choose another --out, or replace it with --force\n"
    )


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        f"Error: there is no checkpoint folder {tmp_path / 'none'}; `edgelin train` writes one"
    )
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_exits_with_two(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["export", str(tmp_path), "--quantize", "int3"])
    assert result.exit_code == 2
    assert "'int3' is not one of 'none', 'int8', 'int4'" in result.stderr


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("run", "run-bundle"),
        ("run/", "run-bundle"),
        (".", "{}/here-bundle"),
        ("run/..", "{}/here-bundle"),
    ],
)
def test_the_default_name_of_a_bundle(
    given: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def export(checkpoint: Path, out: Path, **options: Any) -> None:
        asked.append(out)
        raise EdgelinError("enough")

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("edgelin.export.bundle.export_checkpoint", export)
    assert CliRunner().invoke(main, ["export", given]).stderr == "Error: enough\n"
    assert asked == [Path(wanted.format(tmp_path))]


def test_the_root_needs_an_out() -> None:
    result = CliRunner().invoke(main, ["export", "/"])
    assert result.exit_code == 1
    assert result.stderr == "Error: / has no name to call the bundle by; choose an --out\n"
