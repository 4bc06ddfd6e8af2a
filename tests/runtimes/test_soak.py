"""A soak: what it records beside a float64 loop, how it goes on, and what it does not let pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tiny_bundle import DECAY

import edgelin
from edgelin.cli import main
from edgelin.errors import EdgelinError
from edgelin.runtimes import state_file
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.soak import Point, Progress, Soak, Source, positions
from edgelin.runtimes.soak_report import SoakReport
from edgelin.runtimes.stream import Stream

TOKENS = 300


@pytest.fixture(scope="module")
def bundle(tiny: Any) -> Bundle:
    return edgelin.load(tiny.path, threads=1)


@pytest.fixture(scope="module")
def source(bundle: Bundle) -> Source:
    return Source.of(bundle, np.arange(1, 91), "a text")


def stopping_after(calls: int) -> Callable[[], bool]:
    """Asks to stop when it was asked so often."""
    left = iter(range(calls))
    return lambda: next(left, None) is None


def seen(progress: Progress) -> Any:
    """What does not depend on the machine."""
    content = asdict(progress)
    for point in content["points"]:
        del point["run"], point["step_ms"], point["rss_bytes"]
    return {**content, "run": 0}


def test_positions_double() -> None:
    assert positions(300) == [64, 128, 256, 300]
    assert positions(256) == [64, 128, 256]
    assert positions(1) == [1]


def test_points_are_those_of_the_loop(
    tiny: Any, bundle: Bundle, source: Source, tmp_path: Path
) -> None:
    """Norms, largest values at the looks, mean entropies, all from the equation in float64."""
    soak = Soak(bundle, source, tmp_path / "s")
    soak.run(TOKENS)
    w = {name: value.astype(np.float64) for name, value in tiny.weights.items()}
    ids = np.arange(1, 91)[np.arange(TOKENS) % 90]
    logits, _ = tiny.reference(ids)
    state, states = np.full((6, 10), 0.25), []
    for token in ids:
        e = w["E"][token]
        state = DECAY * state + np.outer(e @ w["Wk"], e @ w["Wv"])
        states.append(state)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    entropy = -(p * np.log(p)).sum(-1)
    looks, first = [64, 128, 192, 256, 300], 0
    assert [point.position for point in soak.progress.points] == [64, 128, 256, 300]
    for point in soak.progress.points:
        here = [t for t in looks if first < t <= point.position]
        first = point.position
        assert point.norms == pytest.approx({"recurrent.0": np.linalg.norm(states[first - 1])})
        largest = max(np.abs(states[t - 1]).max() for t in here)
        assert point.largest == pytest.approx({"recurrent.0": largest})
        assert point.entropy == pytest.approx(np.mean([entropy[t - 1] for t in here]), rel=1e-4)
        assert point.step_ms > 0 and point.rss_bytes > 1 << 20


def test_steps_and_chunks_are_the_same(bundle: Bundle, source: Source, tmp_path: Path) -> None:
    runs = [Soak(bundle, source, tmp_path / f"{f}", one_by_one=f) for f in (False, True)]
    for soak in runs:
        soak.run(130)
    one, two = (soak.progress.points for soak in runs)
    for a, b in zip(one, two, strict=True):
        assert a.norms == pytest.approx(b.norms, rel=1e-5)
        assert a.entropy == pytest.approx(b.entropy, rel=1e-5)


def test_goes_on_where_it_stopped(bundle: Bundle, source: Source, tmp_path: Path) -> None:
    """Stopped twice, once between two points, and then told to go further."""
    whole = Soak(bundle, source, tmp_path / "whole")
    whole.run(TOKENS)
    for calls, tokens in ((3, 256), (1, 256), (99, 256), (99, TOKENS)):
        parts = Soak(bundle, source, tmp_path / "parts")
        parts.run(tokens, stopping_after(calls))
        names = {path.name for path in (tmp_path / "parts").iterdir()}
        state = f"stream-{parts.progress.position}.state"
        assert names == {"progress.json", "marks", state}
    assert seen(parts.progress) == seen(whole.progress)
    assert parts.progress.run == 4
    for name in ("64", "256", "300"):
        files = [tmp_path / run / "marks" / f"{name}.state" for run in ("whole", "parts")]
        one, two = (state_file.read(file).tensors for file in files)
        assert all(np.array_equal(array, two[key]) for key, array in one.items())


def test_random_tokens_depend_on_their_position_alone(bundle: Bundle) -> None:
    source = Source.of(bundle, None, "")
    whole = source.read(0, 200)
    assert np.array_equal(whole[30:171], source.read(30, 141))
    assert whole.max() < bundle.manifest.output.size and len(np.unique(whole)) > 50


def test_another_soak_is_refused(
    bundle: Bundle, source: Source, tmp_path: Path, build: Callable[..., Any]
) -> None:
    folder = tmp_path / "s"
    Soak(bundle, source, folder).run(64)
    other = edgelin.load(build(tmp_path / "other", model_hash="22" * 32).path, threads=1)
    for given, what in (
        ((other, Source.of(other, np.arange(1, 91), "a text")), "model_hash"),
        ((bundle, Source.of(bundle, np.arange(1, 92), "a text")), "source"),
    ):
        with pytest.raises(EdgelinError, match=f"holds a soak with {what}"):
            Soak(*given, folder)
    with pytest.raises(EdgelinError, match="holds a soak with one_by_one"):
        Soak(bundle, source, folder, one_by_one=True)
    with pytest.raises(EdgelinError, match="is no soak, and not empty"):
        Soak(bundle, source, tmp_path)
    for text in ("", "[]", "{}", '{"points": 3}', "[" * 100_000):
        (folder / "progress.json").write_text(text)
        with pytest.raises(EdgelinError, match=r"progress\.json is damaged"):
            Soak(bundle, source, folder)


def test_a_lost_state_is_told(bundle: Bundle, source: Source, tmp_path: Path) -> None:
    Soak(bundle, source, tmp_path / "s").run(64)
    (tmp_path / "s" / "stream-64.state").unlink()
    with pytest.raises(EdgelinError, match="stream-64"):
        Soak(bundle, source, tmp_path / "s")


@pytest.mark.parametrize("where", ["states", "outputs"])
def test_what_is_not_finite_ends_it(
    bundle: Bundle, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """At once, and again when it is started again; what was found before is kept."""
    soak = Soak(bundle, source, tmp_path / "s")
    soak.run(128)
    feed, states = Stream.feed, Stream.states

    def spoilt(stream: Stream) -> Any:
        found = states(stream)
        found["recurrent.0"][0, 3, 3] = np.inf
        return found

    def fails(stream: Stream, inputs: Any) -> Any:
        stream._buffers.states[0][...] = np.nan
        return feed(stream, inputs)

    name, value = ("states", spoilt) if where == "states" else ("feed", fails)
    monkeypatch.setattr(Stream, name, value)
    soak.run(TOKENS)
    again = Soak(bundle, source, tmp_path / "s")
    again.run(TOKENS)
    assert again.progress.failure is not None and "not finite" in again.progress.failure
    assert [point.position for point in again.progress.points] == [64, 128]
    report = SoakReport(bundle.path, bundle.manifest, again.progress, None)
    assert not report.passed and "no NaN or infinity: NO" in report.failure()


def _report(bundle: Bundle, rss: dict[tuple[int, int], float], far: dict[int, float]) -> SoakReport:
    """A report of MiB by run and position, and of distances by position."""
    points = [
        Point(position, run, 1.0, int(mib * 2**20), None, {"a": 1.0}, {"a": 1.0})
        for (run, position), mib in rss.items()
    ]
    progress = Progress("", "model", "", "", False, 1 << 20, run=2, points=points)
    distances = [
        {"position": p, "outputs": x, "kl": None, "states": {"a": 0}} for p, x in far.items()
    ]
    return SoakReport(bundle.path, bundle.manifest, progress, distances)


def test_verdicts(bundle: Bundle) -> None:
    """Memory counts after warming up and within one process; drift against the first steps."""
    flat = {
        (1, 64): 10.0,
        (1, 4096): 100.0,
        (1, 65536): 101.0,
        (2, 131072): 180.0,
        (2, 1 << 20): 181.0,
    }
    assert _report(bundle, flat, {64: 1e-2, 1 << 20: 3e-2}).passed
    assert _report(bundle, flat, {64: 1e-6, 1 << 20: 9e-5}).passed
    grown = _report(bundle, {**flat, (2, 1 << 20): 189.0}, {64: 1e-2})
    assert "flat memory: NO, +9.00 MiB" in grown.failure()
    drifted = _report(bundle, flat, {64: 1e-2, 1 << 20: 5e-2})
    assert "bounded drift: NO" in drifted.failure()
    growing = replace(bundle.manifest.states[0], shape=("past", 10))
    grown.manifest = replace(bundle.manifest, states=[growing])
    assert grown.passed and "grows by design" in grown.text()


def _run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["soak", *map(str, arguments)])


def test_command(tiny: Any, sensor: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "t.txt").write_text("The quiet river runs past the old mill. ")
    folder = tmp_path / "s"
    options = ["--threads", 1, "-o", folder]
    result = _run(tiny.path, "--tokens", 200, "--text", tmp_path / "t.txt", *options)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "no NaN or infinity: yes, over 200 tokens" in result.stdout
    found = json.loads((folder / "soak.json").read_text())
    assert found["passed"] and found["position"] == 200 and found["float64"] is None
    assert (folder / "soak.md").read_text() in result.stdout
    assert (folder / "soak.png").read_bytes().startswith(b"\x89PNG")

    (tmp_path / "empty.txt").touch()
    refused = _run(tiny.path, "--text", tmp_path / "empty.txt", "-o", tmp_path / "x")
    assert refused.stderr == "Error: empty.txt is empty; give at least one token\n"
    refused = _run(sensor.path, *options)
    assert "reads features; give them with --features" in refused.stderr
    np.savez(
        tmp_path / "f.npz",
        x=np.random.default_rng(0).standard_normal((90, 5)).astype(np.float32),
        lengths=np.array([50, 40]),
    )
    features = ["--features", tmp_path / "f.npz", "--threads", 1, "-o", tmp_path / "f"]
    assert _run(sensor.path, "--tokens", 130, *features).exit_code == 0
    assert "200,000" not in (tmp_path / "f" / "soak.md").read_text()
    assert _run(tiny.path, "--tokens", 0, "-o", tmp_path / "x").exit_code == 1
