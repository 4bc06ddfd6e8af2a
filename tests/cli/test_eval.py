"""``edgelin eval`` reads texts and prints what edgelin.runtimes.evaluate measures."""

from __future__ import annotations

import gzip
import json
import lzma
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import edgelin
from edgelin.cli import main
from edgelin.runtimes.evaluate import evaluate

TEXT = "The quiet river runs past the old mill. Köln 🙂\n"


def _eval(*arguments: Any, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["eval", *map(str, arguments)], input=stdin)


def test_plain_and_compressed_texts(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "t.xz").write_bytes(lzma.compress(TEXT.encode()))
    (tmp_path / "t.gz").write_bytes(gzip.compress(TEXT.encode()))
    expected = evaluate(edgelin.load(tiny.path), TEXT)
    for name in ("t.txt", "t.xz", "t.gz"):
        result = _eval(tiny.path, "--text", tmp_path / name, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["bits_per_byte"] == expected.bits_per_byte
    assert json.loads(_eval(tiny.path, "--text", "-", "--json", stdin=TEXT).stdout)["tokens"] > 10
    assert f"bits_per_byte          {expected.bits_per_byte:.6g}" in (
        _eval(tiny.path, "--text", tmp_path / "t.txt").stdout
    )


def test_against(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    result = _eval(
        tiny.path, "--text", tmp_path / "t.txt", "--against", tiny.path,
        "--against-variant", "model_q8", "--max-tokens", 12, "--json",
    )  # fmt: skip
    found = json.loads(result.stdout)
    assert found["tokens"] == 12 and found["kl_nat"] == 0 and found["top1_agreement"] == 1


@pytest.mark.parametrize("name", ["t.xz", "t.gz"])
def test_damaged_texts(tiny: Any, tmp_path: Path, name: str) -> None:
    compress = lzma.compress if name == "t.xz" else gzip.compress
    content = compress(TEXT.encode() * 50)
    for damaged in (content[:-20], b"no such format"):
        (tmp_path / name).write_bytes(damaged)
        result = _eval(tiny.path, "--text", tmp_path / name)
        assert result.exit_code == 1 and f"{name} is damaged" in result.stderr


def test_empty_text(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("")
    result = _eval(tiny.path, "--text", tmp_path / "t.txt")
    assert result.exit_code == 1 and "the text is empty" in result.stderr


def test_checkpoints_go_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "edgelin"}')
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    called = []
    stub: Any = types.ModuleType("edgelin.runtimes.evaluate")

    def evaluate_checkpoint(folder: Path, text: str, *, max_tokens: int | None) -> Any:
        called.append((folder, text, max_tokens))
        return evaluate_type(1, 1, 1.0)

    from edgelin.runtimes.evaluate import Quality as evaluate_type

    stub.evaluate_checkpoint = evaluate_checkpoint
    monkeypatch.setitem(sys.modules, "edgelin.runtimes.evaluate", stub)
    monkeypatch.setattr("edgelin.runtimes.evaluate", stub, raising=False)
    result = _eval(tmp_path, "--text", tmp_path / "t.txt", "--max-tokens", 5)
    assert result.exit_code == 0, result.output
    assert called == [(tmp_path, TEXT, 5)]
    refused = _eval(tmp_path, "--text", tmp_path / "t.txt", "--against", tmp_path)
    assert refused.exit_code == 1 and "is a checkpoint; --against" in refused.stderr


def test_a_variant_of_no_second_bundle_is_refused(tiny: Any) -> None:
    result = _eval(tiny.path, "--text", "pyproject.toml", "--against-variant", "model")
    assert result.exit_code == 1
    assert result.stderr == "Error: --against-variant needs --against, the bundle to compare with\n"
