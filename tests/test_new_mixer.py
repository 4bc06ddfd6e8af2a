"""The page about a mixer of one's own, run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from edgelin.cli import main

PAGE = (Path(__file__).parents[1] / "docs" / "new-mixer.md").read_text(encoding="utf-8")


def block(language: str, number: int = 0) -> str:
    """A fenced block of the page."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[number]


def test_the_page_trains_exports_and_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "forgetful.py").write_text(block("python"), encoding="utf-8")
    (tmp_path / "forgetful.toml").write_text(block("toml"), encoding="utf-8")
    (tmp_path / "text.txt").write_text("Once upon a time there was a lane. " * 400)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # what PYTHONPATH=. does
    commands = [line for line in (block("sh") + block("sh", 1)).splitlines() if "edgelin" in line]
    assert [line.split()[1] for line in commands] == ["train", "export", "verify", "run"]
    for command in commands:
        words = [word.strip('"') for word in command.split()[1:]]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 0, f"{command}\n{result.output}"
    assert (tmp_path / "forgetful.bundle" / "onnx" / "model_q8.onnx").is_file()
