"""Streams equal a float64 loop however the tokens are split, and survive bad input."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes import checks
from edgelin.runtimes import session as sessions
from edgelin.runtimes.manifest import FILE_NAME, Manifest, digest
from edgelin.runtimes.session import Bundle
from edgelin.state import StateSpec


@pytest.fixture(scope="module")
def bundle(tiny: Any) -> Bundle:
    return edgelin.load(tiny.path, threads=1)


def _ids(tiny: Any, count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, tiny.vocab_size, count)]


@pytest.mark.parametrize("time", [1, 7, 8, 9, 63, 64, 65, 130])
@pytest.mark.parametrize("in_place", [True, False])
def test_equals_the_reference(
    tiny: Any, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, time: int, in_place: bool
) -> None:
    monkeypatch.setattr(bundle, "in_place", in_place)
    ids = _ids(tiny, time, seed=time)
    logits, state = tiny.reference(ids)
    scale = np.abs(logits).max()

    stream = bundle.stream()
    np.testing.assert_allclose(stream.feed(ids, all_logits=True), logits, atol=2e-6 * scale)
    found = stream.states()
    np.testing.assert_allclose(found["recurrent.0"][0], state, atol=2e-6 * np.abs(state).max())
    assert found["position"].tolist() == [time] and stream.position == time

    last = bundle.stream().feed(ids)
    assert last.shape == (tiny.vocab_size,)
    np.testing.assert_allclose(last, logits[-1], atol=2e-6 * scale)

    steps = bundle.stream()
    one_by_one = np.stack([steps.feed([token]) for token in ids])
    np.testing.assert_allclose(one_by_one, logits, atol=2e-6 * scale)


def test_rows_of_a_batch_are_streams(tiny: Any, bundle: Bundle) -> None:
    rows = [_ids(tiny, 21, seed) for seed in range(3)]
    expected = np.stack([tiny.reference(row)[0] for row in rows])
    stream = bundle.stream(batch=3)
    first = stream.feed(np.array(rows)[:, :10], all_logits=True)
    last = stream.feed(np.array(rows)[:, 10:])
    assert first.shape == (3, 10, tiny.vocab_size) and last.shape == (3, tiny.vocab_size)
    np.testing.assert_allclose(first, expected[:, :10], atol=1e-4)
    np.testing.assert_allclose(last, expected[:, -1], atol=1e-4)


def test_two_dimensional_ids_give_two_dimensional_logits(tiny: Any, bundle: Bundle) -> None:
    assert bundle.stream().feed([[1, 2]]).shape == (1, tiny.vocab_size)
    assert bundle.stream().feed([[1, 2]], all_logits=True).shape == (1, 2, tiny.vocab_size)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -1], "token id -1 is out of range; the model knows 0 .. 299"),
        ([300], "token id 300 is out of range"),
        ([], r"shape \[0\]; \[time\] or \[1, time\] with time >= 1 is needed"),
        ([[1], [2]], r"shape \[2, 1\]"),
        ([1.5], "token ids are float64; integers are needed"),
    ],
)
def test_a_refused_feed_changes_nothing(
    tiny: Any, bundle: Bundle, ids: list[Any], message: str
) -> None:
    stream, twin = bundle.stream(), bundle.stream()
    for each in (stream, twin):
        each.feed([5, 6, 7])
    with pytest.raises(EdgelinError, match=message) as caught:
        stream.feed(ids)
    assert "\n" not in str(caught.value)
    assert stream.position == 3
    assert stream.feed([8]).tobytes() == twin.feed([8]).tobytes()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_failed_chunk_is_rolled_back(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    monkeypatch.setattr(bundle, "in_place", in_place)
    stream = bundle.stream()
    stream.feed([5, 6, 7])
    before = stream.states()
    run, calls = stream._buffers.run, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of\nmemory")
        return run(*args, **kwargs)

    monkeypatch.setattr(stream._buffers, "run", failing)
    with pytest.raises(EdgelinError, match="onnxruntime failed: out of memory"):
        stream.feed(list(range(30)))
    for name, array in stream.states().items():
        np.testing.assert_array_equal(array, before[name])
    twin = bundle.stream()
    twin.feed([5, 6, 7])
    assert stream.position == 3
    assert stream.feed([8]).tobytes() == twin.feed([8]).tobytes()


def test_an_interrupted_step_is_not_taken_for_whole(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = bundle.stream()
    stream.feed([5, 6, 7])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stream._buffers, "run", _interrupt)
        stream.feed([1])
    with pytest.raises(EdgelinError, match="interrupted and its state is lost"):
        stream.feed([1])
    stream.reset()
    assert stream.feed([1]).tobytes() == bundle.stream().feed([1]).tobytes()


def _interrupt(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


def test_fork_and_reset(bundle: Bundle) -> None:
    stream = bundle.stream()
    stream.feed([5, 6, 7])
    other = stream.fork()
    assert other.feed([9]).tobytes() == stream.feed([9]).tobytes()
    other.feed([10])
    assert (stream.position, other.position) == (4, 5)
    stream.reset()
    assert stream.position == 0 and stream.logits is None
    assert stream.feed([5]).tobytes() == bundle.stream().feed([5]).tobytes()


def test_returned_logits_belong_to_the_caller(bundle: Bundle) -> None:
    stream = bundle.stream()
    logits = stream.feed([5])
    kept = logits.copy()
    logits[:] = np.inf
    assert stream.logits is not None
    np.testing.assert_array_equal(stream.logits[0], kept)
    first = stream.feed([6], all_logits=True)
    copy = first.copy()
    stream.feed([7], all_logits=True)
    np.testing.assert_array_equal(first, copy)


def test_generate_continues_as_one(bundle: Bundle) -> None:
    whole = "".join(bundle.stream().generate("The old", max_tokens=40, seed=1))
    stream = bundle.stream()
    parts = ["".join(stream.generate("The old", max_tokens=11, seed=1))]
    parts += ["".join(stream.generate(max_tokens=29, seed=1))]
    assert "".join(parts) == whole


def test_generate_stops_at_the_end_token(tiny: Any, build: Callable[..., Any]) -> None:
    bundle = edgelin.load(tiny.path, threads=1)
    stream = bundle.stream()
    ids = bundle.text.encode("The old")
    stream.feed(ids)
    assert stream.logits is not None
    stream.logits[0, 0] = 1e6
    assert "".join(stream.generate(temperature=0)) == ""
    assert stream.position == len(ids)  # the end token is not fed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({}, "prompt is empty"),
        ({"prompt": "a", "top_p": 0}, "top_p is 0; allowed: above 0"),
        ({"prompt": "a", "topp": 0.5}, "topp"),
    ],
)
def test_generate_refuses(bundle: Bundle, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        bundle.stream().generate(**arguments)


def test_generate_needs_one_row(bundle: Bundle) -> None:
    with pytest.raises(EdgelinError, match="needs a stream of one row"):
        bundle.stream(batch=2).generate("a")


def test_the_tiny_graph_works_in_place(bundle: Bundle) -> None:
    assert bundle.in_place


def test_a_graph_that_reads_after_writing_does_not_run_in_place(tiny: Any, tmp_path: Path) -> None:
    """present_a = past_b, present_b = past_a + 1: in place, b would see the new a."""
    value = helper.make_tensor_value_info
    names = ["input_ids", "num_logits_to_keep", "past_a.0", "past_b.0"]
    inputs = [
        value(names[0], TensorProto.INT64, ["batch", "time"]),
        value(names[1], TensorProto.INT64, []),
        *(value(name, TensorProto.FLOAT, ["batch", 4]) for name in names[2:]),
    ]
    nodes = [
        helper.make_node("Mul", ["past_b.0", "one"], ["present_a.0"]),
        helper.make_node("Add", ["past_a.0", "one"], ["present_b.0"]),
        helper.make_node("ReduceSum", ["present_b.0", "axis"], ["sum"], keepdims=1),
        helper.make_node("Unsqueeze", ["sum", "axis"], ["row"]),
        helper.make_node("Expand", ["row", "shape"], ["logits"]),
    ]
    outputs = [
        value("logits", TensorProto.FLOAT, ["batch", "kept", 300]),
        *(value(name, TensorProto.FLOAT, ["batch", 4]) for name in ("present_a.0", "present_b.0")),
    ]
    constants = [
        helper.make_tensor("one", TensorProto.FLOAT, [], [1.5]),
        helper.make_tensor("axis", TensorProto.INT64, [1], [1]),
        helper.make_tensor("shape", TensorProto.INT64, [3], [1, 1, 300]),
    ]
    graph = helper.make_graph(nodes, "swap", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "swap.onnx")
    states = [StateSpec(kind, 0, (4,), "") for kind in ("a", "b")]
    manifest = dataclasses.replace(Manifest.read(tiny.path), states=states)
    session = sessions.open_session(tmp_path / "swap.onnx", 1)
    assert not sessions.in_place_works(session, manifest)


def test_too_old_onnxruntime_is_told(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.19.2")
    with pytest.raises(
        EdgelinError, match=r"needs onnxruntime >= 1.20.0, 1.19.2 is installed: pip"
    ):
        edgelin.load(tiny.path)


@pytest.mark.parametrize(
    ("installed", "needed", "good"),
    [("1.9.0", "1.20.0", False), ("1.25", "1.25.1", False), ("1.33.0.dev2026", "1.32.0", True)],
)
def test_versions_are_compared_as_numbers(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, installed: str, needed: str, good: bool
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", installed)
    manifest = Manifest.read(tiny.path)
    object.__setattr__(manifest, "min_onnxruntime", needed)
    assert (sessions.version_problem(manifest) is None) == good


def test_manifest_of_another_export_is_refused(damaged: Path) -> None:
    content = json.loads((damaged / FILE_NAME).read_text())
    content["states"][0]["initial"] = 0.5
    content["digest"] = digest(content)
    (damaged / FILE_NAME).write_text(json.dumps(content))
    with pytest.raises(EdgelinError, match="does not carry the contract"):
        edgelin.load(damaged)


def test_graph_that_onnxruntime_refuses(damaged: Path) -> None:
    (damaged / "x.onnx").write_bytes(b"no graph\n\n")
    with pytest.raises(EdgelinError, match=r"cannot load .*x\.onnx") as caught:
        sessions.open_session(damaged / "x.onnx", 1)
    assert "\n" not in str(caught.value)


def test_wrong_arguments(tiny: Any, bundle: Bundle) -> None:
    with pytest.raises(EdgelinError, match="no variant 'model_q3'; it has: model, model_q8"):
        edgelin.load(tiny.path, variant="model_q3")
    with pytest.raises(EdgelinError, match="threads is 0"):
        edgelin.load(tiny.path, threads=0)
    with pytest.raises(EdgelinError, match="batch is 0"):
        bundle.stream(batch=0)


def test_variant_is_taken(tiny: Any) -> None:
    assert edgelin.load(tiny.path).variant == "model"
    assert edgelin.load(tiny.path, variant="model_q8").variant == "model_q8"


def test_threads_follow_cores_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(sessions.psutil, "cpu_count", lambda logical: 6)
    monkeypatch.setattr(sessions.os, "sched_getaffinity", lambda pid: set(range(5)), raising=False)
    assert sessions.default_threads() == 5
    for quota, threads in [("max 100000", 5), ("350000 100000", 3), ("50000 100000", 1)]:
        (tmp_path / "cpu.max").write_text(quota)
        assert sessions.default_threads() == threads


@pytest.mark.parametrize(
    "ids",
    [[1, [2]], "ab", None, 3, [1.0], [True], ["1"], [2**70], [2**64 - 1], [None], [[[1]]], {}],
)
def test_odd_ids_are_refused_in_one_line(bundle: Bundle, ids: Any) -> None:
    stream = bundle.stream()
    with pytest.raises(EdgelinError) as caught:
        stream.feed(ids)
    assert "\n" not in str(caught.value)
    if ids is not None and ids != "ab":
        with pytest.raises(EdgelinError) as caught:
            stream.generate(ids)  # at the call, not at the first piece
        assert "\n" not in str(caught.value)
    assert stream.position == 0


@pytest.mark.parametrize("threads", ["2", 2.0, True, 0, -1, checks.MAX_THREADS + 1, 10**11, 2**70])
def test_odd_threads_are_refused(tiny: Any, threads: Any) -> None:
    with pytest.raises(EdgelinError, match=r"threads is .*allowed"):
        edgelin.load(tiny.path, threads=threads)


@pytest.mark.parametrize("batch", ["2", 2.0, True, 0, -1])
def test_odd_batches_are_refused(bundle: Bundle, batch: Any) -> None:
    with pytest.raises(EdgelinError, match=r"batch is .*allowed"):
        bundle.stream(batch=batch)


def test_a_text_with_a_surrogate_is_refused(bundle: Bundle) -> None:
    with pytest.raises(EdgelinError, match=r"surrogate U\+DCFF .* at character 1"):
        bundle.stream().generate("a\udcffb")
