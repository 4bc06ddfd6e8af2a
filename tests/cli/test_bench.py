"""``edgelin bench`` prints, writes JSON and draws."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edgelin.cli import main
from edgelin.runtimes import measure


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


@pytest.mark.parametrize(
    "arguments",
    [["--json", "no/x.json"], ["--json", "."], ["--json", ""],
     ["--json", "pipe"], ["--plot", "no/x.png"], ["--plot", "."], ["--plot", "x.foo"],
     ["--plot", "x"], ["--plot", "folder.png"], ["--json", "x" * 300]],
    ids=lambda arguments: " ".join(arguments)[:20],
)  # fmt: skip
def test_targets_are_checked_before_measuring(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    os.mkfifo("pipe")
    monkeypatch.setattr(measure, "bench", lambda *a, **k: pytest.fail("it measured"))
    _refused(CliRunner().invoke(main, ["bench", str(tiny.path), *arguments]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.png", "pipe"]


@pytest.mark.parametrize("threads", ["0", "-1", "99999999999"])
def test_odd_threads(tiny: Any, threads: str) -> None:
    arguments = ["bench", str(tiny.path), "--tokens", "64", "--threads", threads]
    assert f"threads is {threads}" in _refused(CliRunner().invoke(main, arguments))


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_full_disk_leaves_nothing(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    figure = pytest.importorskip("matplotlib.figure")

    def full(first: Any, second: Any, *args: Any, **kwargs: Any) -> None:
        part = first if isinstance(first, Path) else second
        part.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(figure.Figure, "savefig", full)
    arguments = ["bench", str(tiny.path), "--tokens", "64", "--threads", "1"]
    result = CliRunner().invoke(main, [*arguments, option, str(tmp_path / "x.png")])
    assert "x.png cannot be written: No space left on device" in _refused(result)
    assert list(tmp_path.iterdir()) == []


def _refused(result: Result) -> str:
    assert result.exit_code == 1, (result.output, result.exception)
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    return result.stderr
