"""Graphs that lose, fix or mix up states, each caught by name, and what the report then says."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper, numpy_helper

import edgelin
from edgelin.cli import main
from edgelin.export.bundle import export_checkpoint
from edgelin.export.verify.compare import LENGTHS, random_calls, verify
from edgelin.export.verify.inputs import random_state, random_steps
from edgelin.export.verify.probe import sensitivity
from edgelin.runtimes.manifest import Manifest, file_records


@pytest.fixture(scope="module")
def bundle(small_checkpoint: Path) -> Path:
    """Gated DeltaNet and linear attention: a convolution, two matrices and a normaliser."""
    out = small_checkpoint.with_name("probed")
    export_checkpoint(small_checkpoint, out)
    return out


def damage(bundle: Path, out: Path, change: Callable[[onnx.GraphProto], None]) -> Path:
    """A copy with another graph that its manifest vouches for."""
    shutil.copytree(bundle, out)
    manifest = Manifest.read(out)
    variant = manifest.variants["model"]
    model = onnx.load(out / variant.file, load_external_data=False)
    change(model.graph)
    (out / variant.file).write_bytes(model.SerializeToString())
    variant = dataclasses.replace(variant, files=file_records(out, list(variant.files)))
    dataclasses.replace(manifest, variants={"model": variant}).write(out)
    return out


def unbound(graph: onnx.GraphProto) -> None:
    """The matrix of layer 0 starts at zero in every call."""
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == "past_recurrent.0":
                node.input[i] = "from_zero"
    graph.initializer.append(numpy_helper.from_array(np.float32(0), "zero"))
    graph.node.insert(0, helper.make_node("Mul", ["past_recurrent.0", "zero"], ["from_zero"]))


def passed_through(graph: onnx.GraphProto) -> None:
    """The normaliser of layer 1 comes out as it went in."""
    for node in graph.node:
        for i, name in enumerate(node.output):
            if name == "present_normalizer.1":
                node.output[i] = "lost"
    source, target = ["past_normalizer.1"], ["present_normalizer.1"]
    graph.node.append(helper.make_node("Identity", source, target))


def shared(graph: onnx.GraphProto) -> None:
    """Rows of the logits read from one another."""
    for node in graph.node:
        for i, name in enumerate(node.output):
            if name == "logits":
                node.output[i] = "own"
    graph.initializer.append(numpy_helper.from_array(np.array([0]), "batch_axis"))
    graph.node.append(helper.make_node("ReduceMean", ["own", "batch_axis"], ["mean"]))
    graph.node.append(helper.make_node("Sub", ["own", "mean"], ["logits"]))


def probe(folder: Path) -> Any:
    """The probe alone, as ``verify`` calls it."""
    opened = edgelin.load(folder, threads=1)
    random = np.random.default_rng(0)
    steps = random_steps(opened.manifest, folder, max(LENGTHS), random)
    states = [random_state(opened.manifest, folder, random) for _ in range(2)]
    return sensitivity(opened, steps, *states, 1e-4)


def test_a_sound_graph(bundle: Path) -> None:
    found = probe(bundle)
    names = {"conv.0", "recurrent.0", "recurrent.1", "normalizer.1"}
    assert set(found.read) == set(found.written) == names
    assert min(*found.read.values(), *found.written.values()) > 1e-3
    assert found.bleed == 0 and found.passed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unbound, "model has states WITHOUT EFFECT: recurrent.0 moves nothing"),
        (passed_through, "model has states WITHOUT EFFECT: nothing moves normalizer.1"),
        (shared, "model: a row moves others by"),
    ],
)
def test_a_damaged_graph(bundle: Path, tmp_path: Path, change: Any, message: str) -> None:
    found = probe(damage(bundle, tmp_path / "damaged", change))
    assert not found.passed and str(found).startswith(message)


def test_verify_refuses_it_and_the_report_says_so(bundle: Path, tmp_path: Path) -> None:
    """Also where chunks and steps forget alike: chunks of one."""
    folder = damage(bundle, tmp_path / "damaged", unbound)
    manifest = Manifest.read(folder)
    golden = json.loads((folder / "golden.json").read_text())
    golden["tolerance"]["model"] = {"logits": 1e9, "states": 1e9}
    (folder / "golden.json").write_text(json.dumps(golden))
    files = file_records(folder, list(manifest.files))
    dataclasses.replace(manifest, chunk=1, files=files).write(folder)
    result = verify(folder)
    assert all(comparison.passed for comparison in result.comparisons)
    assert result.failure() == "model has states WITHOUT EFFECT: recurrent.0 moves nothing"
    done = CliRunner().invoke(main, ["verify", str(folder), "--record"])
    assert done.exit_code == 1 and "recurrent.0 moves nothing" in done.stderr
    assert json.loads((folder / "report.json").read_text())["parity"]["passed"] is False
    assert "FAILED: model has states WITHOUT EFFECT" in (folder / "report.md").read_text()


def test_the_report_keeps_the_last_result(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bundle, folder)
    before = (folder / "report.md").read_text()
    for _ in range(2):
        done = CliRunner().invoke(main, ["verify", str(folder), "--record"])
        assert done.exit_code == 0, done.output
    page = (folder / "report.md").read_text()
    assert page.startswith(before) and page.count("## Parity") == 1
    assert "- model random calls beside its steps: at most" in page
    parity = json.loads((folder / "report.json").read_text())["parity"]
    assert parity["passed"] and not parity["beside_checkpoint"]
    tensors = parity["comparisons"][0]["tensors"]
    assert {"logits", "recurrent.0"} <= set(tensors) and max(tensors.values()) < 1e-5
    edgelin.load(folder)  # the manifest knows the new files


def test_random_calls_add_up() -> None:
    random, seen = np.random.default_rng(0), set()
    for _ in range(50):
        calls = random_calls(random, 130, 64)
        assert sum(calls) == 130 and min(calls) >= 1
        seen |= set(calls)
    assert {1, 2, 3} <= seen and max(seen) > 32
