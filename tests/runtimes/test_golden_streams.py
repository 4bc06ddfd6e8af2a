"""The Python runner replays the golden streams that runners in all languages replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edgelin
from edgelin.runtimes.buffers import Buffers
from edgelin.runtimes.distribution import divergence
from edgelin.runtimes.session import Bundle

GOLDEN = Path(__file__).parents[2] / "runtimes" / "golden"
CASES = sorted(GOLDEN.glob("*/*.json"))
# Rows of different positions have no state file.
SAVED = [path for path in CASES if path.with_suffix(".state").exists()]


def _bundle(path: Path) -> tuple[Bundle, dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["bundle"], found["variant"]) == (path.parent.name, path.stem)
    return edgelin.load(path.parent / "bundle", variant=path.stem, threads=1), found


def _compare(outputs: NDArray[Any], wanted: list[Any], tolerance: dict[str, float]) -> None:
    """Each row is near, or, where this is allowed, near as a distribution."""
    for got, row in zip(outputs, wanted, strict=True):
        if row is None or np.abs(got - np.array(row, np.float32)).max() <= tolerance["outputs"]:
            continue
        kl = divergence(np.array([row]), np.array([got], np.float64)).item()
        assert "kl" in tolerance and kl <= tolerance["kl"], f"KL {kl:.3g}, {tolerance}"


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_calls(path: Path) -> None:
    bundle, golden = _bundle(path)
    buffers = Buffers(bundle.session, bundle.manifest, golden["batch"], in_place=bundle.in_place)
    for call in golden["calls"]:
        steps = np.array(call.get("ids", call.get("features")), bundle.manifest.input.dtype)
        lengths = np.array(call["lengths"]) if "lengths" in call else None
        outputs = buffers.run(steps, lengths=lengths)[:, -1]
        _compare(outputs, call["outputs"], golden["tolerance"])


@pytest.mark.parametrize("path", SAVED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_follows_the_state_file(path: Path) -> None:
    bundle, golden = _bundle(path)
    stream, tolerance = bundle.stream(), golden["tolerance"]
    stream.load(path.parent / golden["state_file"])
    assert stream.position == sum(len(next(iter(c.values()))[0]) for c in golden["calls"])
    assert stream.outputs is not None
    _compare(stream.outputs, golden["calls"][-1]["outputs"], {"outputs": 0})
    for key in {"greedy", "sampled"} & golden.keys():
        twin, wanted = stream.fork(), golden[key]
        settings = wanted.get("settings", {"temperature": 0})
        if "kl" in tolerance:
            twin.feed(wanted["ids"])
        else:
            count = len(wanted["ids"])
            assert list(twin.generate(max_tokens=count, **settings)) == wanted["pieces"]
            recent = twin.saved().text
            assert recent is not None and recent.recent[-count:] == wanted["ids"]
        assert twin.outputs is not None
        _compare(twin.outputs, wanted["outputs"], tolerance)
    for shorter in golden.get("shorter", []):
        stream.load(path.parent / shorter["state_file"])
        stream.feed(shorter["ids"])
        _compare(stream.outputs, shorter["outputs"], tolerance)
    if "text" in golden:
        assert bundle.text.encode(golden["text"]["prompt"]) == golden["text"]["ids"]


def test_there_are_all_kinds() -> None:
    kinds = {path.parent.name for path in CASES}
    assert kinds == {
        "fused", "plain", "portable", "complex", "hybrid", "growing", "features", "streams",
    }  # fmt: skip
    assert {path.parent.name for path in SAVED} == kinds - {"streams"}
    assert {path.stem for path in CASES} >= {"model", "model_q8", "model_q4"}
