"""``edgelin inspect`` shows the contract and finds damage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from click.testing import CliRunner

from edgelin.cli import main
from edgelin.runtimes.manifest import digest


def test_tables(tiny: Any) -> None:
    result = CliRunner().invoke(main, ["inspect", str(tiny.path)])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    state = ["recurrent.0", "batch", "6", "10", "batch", "key", "value", "float32", "240"]
    assert state in lines
    assert ["total,", "one", "stream", "248"] in lines
    assert "plain, opset 21" in result.stdout and ">= 1.20.0 needed" in result.stdout
    assert f"{onnxruntime.__version__} installed" in result.stdout
    size = sum((tiny.path / "onnx" / f).stat().st_size for f in ("model.onnx", "model.onnx_data"))
    assert f"model (default)  float32             {size}  sha256 right  yes" in result.stdout
    assert "int8, blocks of 32" in result.stdout


def test_json(tiny: Any) -> None:
    result = CliRunner().invoke(main, ["inspect", str(tiny.path), "--json"])
    found = json.loads(result.stdout)
    assert found["state_bytes"] == 248 and found["problems"] == []
    assert found["variants"]["model_q8"]["loads"] is True
    assert found["states"][0]["initial"] == 0.25


@pytest.mark.parametrize("name", ["onnx/model.onnx", "onnx/model_q8.onnx_data", "config.json"])
def test_damage_is_shown(damaged: Path, name: str) -> None:
    content = bytearray((damaged / name).read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / name).write_bytes(content)
    result = CliRunner().invoke(main, ["inspect", str(damaged)])
    assert result.exit_code == 1
    assert "damaged" in result.stdout
    assert result.stderr == f"Error: {name} differs from its sha256 in the manifest\n"


def test_graph_that_does_not_load(damaged: Path) -> None:
    from edgelin.runtimes.manifest import Manifest, Variant, file_records

    (damaged / "onnx" / "model.onnx").write_bytes(b"no graph")
    manifest = Manifest.read(damaged)
    records = file_records(damaged, manifest.variants["model"].files)
    manifest.variants["model"] = Variant("onnx/model.onnx", records)
    manifest.write(damaged)
    result = CliRunner().invoke(main, ["inspect", str(damaged)])
    assert result.exit_code == 1
    assert "cannot load" in result.stderr and result.stderr.count("\n") == 1


def test_too_old_onnxruntime(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.19.2")
    result = CliRunner().invoke(main, ["inspect", str(tiny.path)])
    assert result.exit_code == 1
    assert "needs onnxruntime >= 1.20.0, 1.19.2 is installed" in result.stderr
    assert "not tried" in result.stdout


def test_edited_manifest(damaged: Path) -> None:
    text = (damaged / "edgelin.json").read_text().replace('"chunk": 8', '"chunk": 7')
    (damaged / "edgelin.json").write_text(text)
    result = CliRunner().invoke(main, ["inspect", str(damaged)])
    assert result.exit_code == 1 and "was changed after export" in result.stderr


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["input"].update(vocab_size=301),
        lambda content: content["input"].update(name="tokens"),
        lambda content: content["states"][0].update(shape=["batch", 6, 11]),
        lambda content: content.update(max_time=9),
    ],
)
def test_contract_of_another_graph(damaged: Path, change: Any) -> None:
    """What ``run`` refuses is not healthy."""
    path = damaged / "edgelin.json"
    content = json.loads(path.read_text())
    change(content)
    content["digest"] = digest(content)
    path.write_text(json.dumps(content))
    result = CliRunner().invoke(main, ["inspect", str(damaged)])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "does not carry the contract of edgelin.json" in result.stderr


@pytest.mark.parametrize("text", [None, "{}", '{"model": 3}'])
def test_tokenizer_is_read(damaged: Path, text: str | None) -> None:
    """A file that is as recorded, or is not recorded, and is no tokenizer."""
    from edgelin.runtimes.manifest import FileRecord

    content = json.loads((damaged / "edgelin.json").read_text())
    if text is None:
        (damaged / "tokenizer.json").unlink()
        del content["files"]["tokenizer.json"]
    else:
        (damaged / "tokenizer.json").write_text(text)
        content["files"]["tokenizer.json"] = vars(FileRecord.of(damaged / "tokenizer.json"))
    content["digest"] = digest(content)
    (damaged / "edgelin.json").write_text(json.dumps(content))
    result = CliRunner().invoke(main, ["inspect", str(damaged)])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "tokenizer" in result.stderr


def test_needs_no_torch(tiny: Any) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'onnx', 'onnx_ir']));"
        "from edgelin.cli import main; main(['inspect', sys.argv[1]])"
    )
    done = subprocess.run([sys.executable, "-c", code, tiny.path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
