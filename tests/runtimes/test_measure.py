"""Benchmarks count what they say they count; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes import measure

ROOT = Path(__file__).parents[2]


def test_log_spaced() -> None:
    assert measure.log_spaced(64, 1024) == [64, 128, 256, 512, 1024]
    assert measure.log_spaced(10, 1000, per_octave=2)[0::13] == [10, 1000]
    assert measure.log_spaced(64, 65) == [64, 65]


def test_series_measures_at_the_positions(tiny: Any) -> None:
    stream = edgelin.load(tiny.path, threads=1).stream()
    stream.feed([1, 2, 3])
    points = measure.series(stream, [2, 5, 40], window=4)
    assert [point.position for point in points] == [5, 8, 43]
    assert stream.position == 43
    assert all(point.step_ms > 0 and point.rss_bytes > 2**20 for point in points)


def test_series_takes_the_median_of_the_last_steps(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(1, 100))
    monkeypatch.setattr(measure, "_timed", lambda stream, ids: float(next(seconds)))
    stream = edgelin.load(tiny.path, threads=1).stream()
    points = measure.series(stream, [2, 7, 12], window=5)
    assert [point.step_ms for point in points] == [1500, 5000, 10000]
    assert [point.fastest_ms for point in points] == [1000, 3000, 8000]


def test_bench(tiny: Any) -> None:
    found = measure.bench(tiny.path, tokens=100, threads=None, variant=None)
    assert found["speed"][0]["threads"] == 1
    assert found["state_bytes"] == 248 and found["series"][-1]["position"] == 100
    json.dumps(found)
    with pytest.raises(EdgelinError, match="tokens is 3; 64 or more"):
        measure.bench(tiny.path, tokens=3, threads=1, variant=None)


def test_a_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(EdgelinError, match="a plot needs matplotlib"):
        measure.check_plot(tmp_path / "p.png")


def test_constant_memory_script(tiny: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = ROOT / "benchmarks" / "constant_memory.py"
    arguments = [str(tiny.path), "--tokens", "1000", "--threads", "1", "--out", str(tmp_path / "o")]
    done = subprocess.run(
        [sys.executable, str(script), *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "KV cache of a softmax transformer by then (computed): 0.1 MiB" in done.stdout
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["fresh_ratio"] > 0
    assert found["points"][0]["position"] == 1500 and found["points"][-1]["position"] == 2000
    assert found["softmax_cache_bytes_computed"][-1] == 2 * 1 * 16 * 2 * 2000
    assert (tmp_path / "o.png").stat().st_size > 1000


@pytest.mark.parametrize("out", ["no/o", "f"])
def test_constant_memory_checks_its_targets_first(tiny: Any, tmp_path: Path, out: str) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "f.png").mkdir()
    script = ROOT / "benchmarks" / "constant_memory.py"
    command = [sys.executable, str(script), str(tiny.path), "--tokens", str(10**9), "--out", out]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["f.png"]


def test_ratio_feeds_both_streams_in_turn(tiny: Any) -> None:
    one, other = edgelin.load(tiny.path).stream(), edgelin.load(tiny.path).stream()
    one.feed([1, 2, 3])
    assert measure.ratio(one, other, 5) > 0
    assert (one.position, other.position) == (8, 5)
