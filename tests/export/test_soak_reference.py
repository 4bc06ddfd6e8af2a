"""The float64 model beside a soak's marks, against the sequential recurrence in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import edgelin
from edgelin.cli import main
from edgelin.errors import EdgelinError
from edgelin.export import soak_reference
from edgelin.export.bundle import export_checkpoint
from edgelin.export.soak_reference import distances
from edgelin.export.verify.forms import replay
from edgelin.export.verify.torch_forms import TorchForm
from edgelin.export.verify.weights import read_weights, rounded_weights
from edgelin.runtimes import state_file
from edgelin.runtimes.buffers import initial_state
from edgelin.runtimes.soak import Soak, Source, mark

TOKENS = 150


@pytest.fixture(scope="module")
def bundle(small_checkpoint: Path) -> Path:
    out = small_checkpoint.with_name("soaked")
    export_checkpoint(small_checkpoint, out, quantise=("none", "int4"))
    return out


@pytest.mark.parametrize("variant", ["model", "model_q4"])
def test_distances_are_those_of_the_recurrence(
    bundle: Path, small_checkpoint: Path, tmp_path: Path, variant: str
) -> None:
    opened = edgelin.load(bundle, variant=variant, threads=1)
    source = Source.of(opened, None, "")
    soak = Soak(opened, source, tmp_path)
    soak.run(TOKENS)
    at = [64, 128, 150]
    found = distances(opened, small_checkpoint, source, tmp_path, at)

    graph = bundle / opened.manifest.variants[variant].file
    weights = rounded_weights(graph, read_weights(small_checkpoint))
    form = TorchForm(small_checkpoint, sequential=True, weights=weights)
    state = {spec.name: initial_state(spec, 1) for spec in opened.manifest.states}
    truth = replay(form, source.read(0, TOKENS)[None], state, size=1)
    for distance in found:
        saved = state_file.read(mark(tmp_path, distance.position)).tensors
        errors = {}
        for name in [*distance.states, "logits"]:
            wanted = truth[name][distance.position - 1]
            errors[name] = np.abs(saved[name] - wanted).max() / np.abs(wanted).max()
        assert distance.outputs == pytest.approx(errors.pop("logits"), rel=1e-4)
        assert distance.states == pytest.approx(errors, rel=1e-4)
        assert distance.outputs < (1e-5 if variant == "model" else 0.1)
        assert (distance.kl or 0) < (1e-9 if variant == "model" else 0.01)


def test_goes_on_and_sees_a_wrong_mark(
    bundle: Path, small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_reference, "_CALL", 30)
    opened = edgelin.load(bundle, variant="model", threads=1)
    source = Source.of(opened, np.arange(70), "a text")
    Soak(opened, source, tmp_path).run(TOKENS)
    left = iter(range(5))

    def read(stop: Any = lambda: False) -> Any:
        return distances(opened, small_checkpoint, source, tmp_path, [64, 128, 150], stop)

    assert [d.position for d in read(lambda: next(left, None) is None)] == [64]
    found = read()
    assert [d.position for d in found] == [64, 128, 150]
    assert read() == found
    (tmp_path / soak_reference.STATES).unlink()
    saved = state_file.read(mark(tmp_path, 128))
    saved.tensors["recurrent.0"][0, 1, 2, 3] += 0.5 * np.abs(saved.tensors["recurrent.0"]).max()
    state_file.write(mark(tmp_path, 128), saved)
    changed = read()
    assert changed[1].states["recurrent.0"] > 0.4 and changed[2] == found[2]
    content = (tmp_path / soak_reference.STATES).read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
    for damaged in (b"PK", flipped):
        (tmp_path / soak_reference.STATES).write_bytes(damaged)
        with pytest.raises(EdgelinError, match=r"float64\.npz is damaged"):
            read()


def test_command(bundle: Path, small_checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["soak", str(bundle), "--variant", "model", "--tokens", "100", "--threads", "1"]
    more = ["--checkpoint", str(small_checkpoint), "-o", str(tmp_path)]
    result = CliRunner().invoke(main, [*arguments, *more])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "bounded drift: yes" in result.stdout
    found = json.loads((tmp_path / "soak.json").read_text())
    assert [d["position"] for d in found["float64"]] == [64, 100]
