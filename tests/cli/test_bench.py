"""``edgelin bench`` prints, writes JSON and draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edgelin.cli import main


def test_prints_and_writes(tiny: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["bench", str(tiny.path), "--tokens", "130", "--threads", "1"]
    files = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    result = CliRunner().invoke(main, [*arguments, *files])
    assert result.exit_code == 0, (result.output, result.exception)
    assert result.stdout.startswith("1 threads: decode ")
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["series"][-1]["position"] == 130
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "b.png"]
