"""The benchmarks of decoding on a CPU, without their timings: sizes, graphs, rounds, results."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from export_models import make_model

from edgelin.export import passes, store
from edgelin.export.profiles import PROFILES
from edgelin.export.quantise.nodes import quantise
from edgelin.export.quantise.recipe import RECIPES
from edgelin.export.trace import trace
from edgelin.model import SequenceModel
from edgelin.runtimes.session import open_session

FOLDER = Path(__file__).parents[1] / "benchmarks" / "edge"
NAMES = ("bandwidth", "figures", "graphs", "llama", "models", "peers", "rounds", "run", "table")


@pytest.fixture(scope="module")
def edge() -> Iterator[Any]:
    """The modules of the folder, which import each other by their bare names."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small int4 graph with its data file."""
    traced = trace(make_model(("gla", "gdn"), tied=False))
    passes.lower(traced, PROFILES["fused"])
    recipe = RECIPES["int4"]
    assert recipe is not None
    quantise(traced, recipe)
    passes.finish(traced, PROFILES["fused"])
    path = tmp_path_factory.mktemp("graph") / "model_q4.onnx"
    store.save(traced, path)
    return path


@pytest.mark.parametrize(("name", "least", "most"), [("gla", 340e6, 380e6), ("small", 4.9e6, 5e6)])
def test_models_have_the_stated_sizes(edge: Any, name: str, least: float, most: float) -> None:
    with torch.device("meta"):
        count = SequenceModel(edge.models.CONFIGS[name]).num_parameters()
    assert least < count < most


def test_the_other_side_has_as_many_weights(edge: Any) -> None:
    """GGUF tensors beside our parameters: a layer of attention in the place of one of ours."""
    with torch.device("meta"):
        ours = SequenceModel(edge.models.CONFIGS["gated-delta"])
    sizes = [p.numel() for p in ours.parameters() if p.dim() == 2]
    theirs = [array.size for _, array in edge.llama._tensors() if array.ndim == 2]
    assert math.isclose(sum(theirs), sum(sizes), rel_tol=0.01)


def test_matrices_alone_are_the_same_products(edge: Any, graph: Path) -> None:
    """Every matrix once, over the same data file, with the numbers that the codes stand for."""
    alone = graph.with_name("alone.onnx")
    edge.graphs.matrices_alone(graph, alone)
    counts = edge.graphs.node_counts(alone)
    assert counts == {"MatMulNBits": edge.graphs.node_counts(graph)["MatMulNBits"]}
    session = open_session(alone, 1)
    random = np.random.default_rng(0)
    feeds = {i.name: random.standard_normal(i.shape, np.float32) for i in session.get_inputs()}
    products = session.run(None, feeds)
    model = onnx.load(str(alone))
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    for node, product in zip(model.graph.node, products, strict=True):
        weight = _dequantised(node, arrays)
        wanted = feeds[node.input[0]][0, 0].astype(np.float64) @ weight.T
        np.testing.assert_allclose(product[0, 0], wanted, atol=0.05 * np.abs(wanted).max())


def _dequantised(node: onnx.NodeProto, arrays: dict[str, Any]) -> Any:
    """The matrix `[N, K]` of a MatMulNBits node, by the operator's definition."""
    sizes = {a.name: a.i for a in node.attribute}
    codes, scales = arrays[node.input[1]], arrays[node.input[2]].astype(np.float64)
    n, blocks = codes.shape[:2]
    scales = scales.reshape(n, blocks, 1)
    zero: Any = 1 << (sizes["bits"] - 1)
    if sizes["bits"] == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(n, blocks, -1)
        if len(node.input) > 3:
            packed = arrays[node.input[3]].reshape(n, -1)
            zero = np.stack([packed & 15, packed >> 4], axis=-1).reshape(n, -1)[:, :blocks, None]
    return ((codes - np.float64(zero)) * scales).reshape(n, -1)[:, : sizes["K"]]


def test_weight_bytes_leave_the_embedding_out(edge: Any, graph: Path) -> None:
    model = onnx.load(str(graph))
    sizes = {t.name: onnx.numpy_helper.to_array(t).nbytes for t in model.graph.initializer}
    table = sum(size for name, size in sizes.items() if name.startswith("embedding"))
    assert table > 0
    assert edge.graphs.weight_bytes(graph) == sum(sizes.values()) - table


def test_rounds_turn_the_order_round(edge: Any) -> None:
    calls = []

    def side(name: str, value: float) -> Any:
        return lambda: calls.append(name) or value

    rows = edge.rounds.paired([side("a", 3.0), side("b", 2.0)], rounds=3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert rows == [[3.0, 2.0]] * 3
    assert edge.rounds.median_ratio([[1, 2], [9, 3], [4, 4]]) == 1


def test_priority_is_given_back(edge: Any) -> None:
    before = os.sched_getscheduler(0)
    with edge.rounds.undisturbed(1) as granted:
        assert (os.sched_getscheduler(0) == os.SCHED_RR) == granted
    assert os.sched_getscheduler(0) == before
    with edge.rounds.undisturbed(0) as granted:
        assert not granted


@pytest.mark.parametrize(
    ("at_most", "value", "reached"),
    [(False, 0.951, True), (False, 0.94, False), (True, 1.05, True), (True, 1.06, False)],
)
def test_bars_allow_five_percent(edge: Any, at_most: bool, value: float, reached: bool) -> None:
    figure = edge.figures.Figure("text", 1.0, lambda place: None, at_most)
    assert figure.reached(value) == reached


def test_read_probe_reads(edge: Any) -> None:
    if edge.bandwidth.compiler() is None:
        pytest.skip("there is no C compiler")
    for threads in (1, 3):
        assert 0.1 < edge.bandwidth.Probe(threads, megabytes=8).gigabytes_per_s() < 1e4


def test_results_are_appended(edge: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    found = edge.figures.Found(2.0, [[4.0, 2.0], [6.0, 3.0]], ["ours", "peer"], {"nodes": 5})
    figures = {"double": edge.figures.Figure("twice", 1.9, lambda place: found)}
    monkeypatch.setattr(edge.run, "FIGURES", figures)
    out = tmp_path / "deep" / "results.jsonl"
    for _ in range(2):
        assert edge.run.measure("double", None, out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 2
    assert lines[0]["value"] == 2.0 and lines[0]["reached"] and lines[0]["rounds"][1] == [6.0, 3.0]
    assert {"machine", "versions", "date", "load_average"} <= set(lines[0])
    page = edge.table.page(lines)
    sides = "ours: 5 (4 to 6)<br>peer: 2.5 (2 to 3)<br>5 nodes in the graph"
    assert page.count(f"| twice | >= 1.9 | 2 | {sides} |") == 1
    assert lines[0]["machine"] in page
    printed = capsys.readouterr().out
    assert "twice: 2 (bar >= 1.9: reached)" in printed
    assert "peer: 3 (2 to 3)" in printed


def test_a_figure_without_its_peer_says_so(edge: Any, tmp_path: Path, capsys: Any) -> None:
    place = edge.figures.Place(edge.models.Store(tmp_path), None)
    assert not edge.run.measure("int4-llama-2", place, tmp_path / "results.jsonl")
    assert "--llama" in capsys.readouterr().err
    missing = edge.figures.Place(edge.models.Store(tmp_path), tmp_path)
    assert not edge.run.measure("int8-prefill", missing, tmp_path / "results.jsonl")
    assert "llama-bench is missing" in capsys.readouterr().err
    assert not (tmp_path / "results.jsonl").exists()
