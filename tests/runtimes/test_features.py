"""Streams of features: values, checks before a call, state files, the reader of data sets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes import evaluate_features, feature_file, measure, state_file
from edgelin.runtimes.manifest import Manifest
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.signature import Features, Output, Tokens

SIZE = 5


@pytest.fixture(scope="module")
def bundle(sensor: Any) -> Bundle:
    return edgelin.load(sensor.path, threads=1)


def _steps(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, SIZE)).astype(np.float32)


@pytest.mark.parametrize("pieces", [[1], [30], [8, 8], [1, 7, 9, 1, 64]])
def test_outputs_are_those_of_the_loop(bundle: Bundle, sensor: Any, pieces: list[int]) -> None:
    x = _steps(sum(pieces))
    outputs, state = sensor.reference(x)
    stream, found = bundle.stream(), []
    for end, length in zip(np.cumsum(pieces), pieces, strict=True):
        found.append(stream.feed(x[end - length : end], all_outputs=True))
    np.testing.assert_allclose(np.concatenate(found), outputs, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(stream.states()["recurrent.0"][0], state, rtol=1e-4, atol=1e-4)
    assert stream.position == len(x)
    assert stream.outputs is not None and stream.outputs[0].tobytes() == found[-1][-1].tobytes()


def test_shapes_and_types(bundle: Bundle) -> None:
    x = _steps(12)
    last = bundle.stream().feed(x)
    assert last.shape == (3,) and last.dtype == np.float32
    assert bundle.stream().feed(x[None]).tolist() == [last.tolist()]
    assert bundle.stream().feed(x.astype(np.float64).tolist()).tolist() == last.tolist()
    assert bundle.stream().feed(x[None], all_outputs=True).shape == (1, 12, 3)
    rows = bundle.stream(batch=2).feed(np.stack([x, -x]))
    assert rows.shape == (2, 3)
    np.testing.assert_allclose(rows[0], last, rtol=1e-5)
    whole = bundle.stream().feed(np.round(x * 9).astype(np.int16))
    assert whole.tolist() == bundle.stream().feed(np.round(x * 9)).tolist()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            np.zeros(SIZE),
            r"features have shape \[5\]; \[time, 5\] or \[1, time, 5\] with time >= 1",
        ),
        (np.zeros((3, 4)), r"shape \[3, 4\]"),
        (np.zeros((0, SIZE)), r"shape \[0, 5\]"),
        (np.zeros((2, 3, SIZE)), r"shape \[2, 3, 5\]"),
        (3, r"shape \[\]"),
        ("text", r"shape \[\]"),
        ([[1.0, 2.0], [3.0]], "no array of numbers"),
        ([["1"] * SIZE], "real numbers are needed"),
        (np.ones((1, SIZE), bool), "features are bool; real numbers are needed"),
        (np.ones((1, SIZE), complex), "features are complex128"),
        ([[None] * SIZE], "features are object"),
        ([[0, 0, 0, 0, 0], [0, 0, 0, np.nan, 0]], "feature 3 at step 1 is nan; finite float32"),
        ([[0, 0, -np.inf, 0, 0]], "feature 2 at step 0 is -inf"),
        ([[0, 0, 1e300, 0, 0]], "feature 2 at step 0 is inf"),
    ],
)
def test_wrong_features_change_nothing(bundle: Bundle, values: Any, message: str) -> None:
    stream = bundle.stream()
    stream.feed(_steps(3))
    before = {name: value.tobytes() for name, value in stream.states().items()}
    with pytest.raises(EdgelinError, match=message) as caught:
        stream.feed(values)
    assert "\n" not in str(caught.value)
    assert {name: value.tobytes() for name, value in stream.states().items()} == before
    assert stream.position == 3


def test_a_row_of_a_batch_is_named(bundle: Bundle) -> None:
    x = np.zeros((2, 4, SIZE))
    x[1, 2, 0] = np.nan
    with pytest.raises(EdgelinError, match="feature 0 at step 2 of row 1 is nan"):
        bundle.stream(batch=2).feed(x)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("length", [1, 2, 20])
def test_outputs_that_overflow_do_not_poison_the_state(
    bundle: Bundle, in_place: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "in_place", in_place)
    stream = bundle.stream()
    stream.feed(_steps(3))
    twin = stream.fork()
    with pytest.raises(EdgelinError, match="outputs are not finite after position 3"):
        stream.feed(np.full((length, SIZE), 1e38))
    if length == 1:  # a single step isn't copied first
        with pytest.raises(EdgelinError, match="its state is lost; reset the stream or load one"):
            stream.feed(_steps(1))
        stream.reset()
        assert stream.feed(_steps(4)).tobytes() == bundle.stream().feed(_steps(4)).tobytes()
    else:
        assert stream.feed(_steps(4)).tobytes() == twin.feed(_steps(4)).tobytes()
        assert stream.position == 7


def test_text_is_refused(bundle: Bundle) -> None:
    with pytest.raises(EdgelinError, match="reads features and writes no text; use feed"):
        bundle.stream().generate("a")
    with pytest.raises(EdgelinError, match="reads features, not text; give it --features"):
        _ = bundle.text


def test_a_stream_goes_on_bit_for_bit(bundle: Bundle, tmp_path: Path) -> None:
    x, more = _steps(70), _steps(9, seed=1)
    stream = bundle.stream()
    last = stream.feed(x)
    stream.save(tmp_path / "s")
    loaded = bundle.stream()
    loaded.load(tmp_path / "s")
    assert loaded.position == 70 and loaded.outputs is not None
    assert loaded.outputs[0].tobytes() == last.tobytes()
    wanted = stream.fork().feed(more).tobytes()
    assert loaded.feed(more).tobytes() == wanted == stream.feed(more).tobytes()
    with safetensors.safe_open(tmp_path / "s", framework="numpy") as file:
        assert sorted(file.keys()) == ["outputs", "position", "recurrent.0"]
        assert sorted(file.metadata()) == [
            "edgelin_state", "model_hash", "position", "sha256", "variant",
        ]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"recent": "[]"}, {"text": '{"pending": "", "held": ""}'},
     {"recent": "[1, 2, 0]", "text": '{"pending": "", "held": ""}'}],
)  # fmt: skip
def test_a_state_with_text_is_damaged(
    bundle: Bundle, tmp_path: Path, changes: dict[str, str]
) -> None:
    path, stream = tmp_path / "s", bundle.stream()
    stream.feed(_steps(3))
    stream.save(path)
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = {**file.metadata(), **changes}
    tensors = safetensors.numpy.load_file(path)
    metadata["sha256"] = state_file._hash(metadata, tensors)
    path.write_bytes(safetensors.numpy.save(tensors, metadata))
    with pytest.raises(EdgelinError, match="is damaged") as caught:
        stream.load(path)
    assert "\n" not in str(caught.value)


def test_the_manifest_says_what_is_read_and_answered(sensor: Any, meter: Any) -> None:
    manifest = Manifest.read(sensor.path)
    io = manifest.io_part()
    assert io["input"] == {
        "name": "features", "kind": "features", "dtype": "float32", "shape": ["batch", "time", 5],
        "feature_size": 5,
    }  # fmt: skip
    assert io["output"] == {
        "name": "outputs", "dtype": "float32", "shape": ["batch", "kept", 3], "size": 3,
        "head": "step", "task": "classification", "labels": ["walk", "sit down", "läuft"],
    }  # fmt: skip
    assert manifest.as_dict()["tokenizer"] is None
    assert Manifest.from_dict(manifest.as_dict()) == manifest
    output = Manifest.read(meter.path).output
    assert output == Output(2, "outputs", "sequence", "regression")
    assert not output.is_distribution


@pytest.mark.parametrize(
    "key",
    ["input.kind", "input.feature_size", "output.size", "output.head", "output.task",
     "output.labels", "tokenizer"],
)  # fmt: skip
def test_values_of_other_types_are_refused(sensor: Any, key: str) -> None:
    from edgelin.runtimes.manifest import digest

    values = (None, True, -3, 0, 0.5, {}, "garbage", ["x"], [1, 2, 3], {"x": 1}, "\udc80")
    for value in values:
        if key == "tokenizer" and value is None:
            continue
        content = json.loads((sensor.path / "edgelin.json").read_text())
        *parents, last = key.split(".")
        place = content
        for parent in parents:
            place = place[parent]
        place[last] = value
        if value != "\udc80":
            content["digest"] = digest(content)
        with pytest.raises(EdgelinError) as caught:
            Manifest.from_dict(content)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_tokenizer_and_kind_belong_together(sensor: Any, tiny: Any) -> None:
    text = Manifest.read(tiny.path)
    wrong = [
        dataclasses.replace(Manifest.read(sensor.path), tokenizer=text.tokenizer),
        dataclasses.replace(text, tokenizer=None),
    ]
    for manifest in wrong:
        with pytest.raises(EdgelinError, match="tokenizer does not fit an input of"):
            Manifest.from_dict(manifest.as_dict())


def _save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def _answers(sensor: Any, x: Any, lengths: list[int]) -> Any:
    """Outputs of the float64 loop, every sequence from the start."""
    return [sensor.reference(part)[0] for part in np.split(x, np.cumsum(lengths)[:-1])]


def test_accuracy_of_steps(bundle: Bundle, sensor: Any, tmp_path: Path) -> None:
    lengths, x = [9, 1, 20], _steps(30)
    best = np.concatenate(_answers(sensor, x, lengths)).argmax(-1)
    y = best.copy()
    y[:6] = (y[:6] + 1) % 3
    y[-10:] = -1
    path = _save(tmp_path / "d.npz", x=x, lengths=lengths, y=y)
    found = evaluate_features.evaluate(bundle, path, against=bundle)
    assert (found.sequences, found.answers) == (3, 20)
    assert found.accuracy == found.against_accuracy == pytest.approx(14 / 20)
    assert found.kl_nat == 0 and found.agreement == 1


def test_error_of_sequences(meter: Any, tmp_path: Path) -> None:
    lengths, x = [9, 1, 20], _steps(30)
    last = np.stack([rows[-1] for rows in _answers(meter, x, lengths)])
    path = _save(
        tmp_path / "d.npz", x=x, lengths=lengths, y=(last + np.array([0.5, 0])).astype(np.float32)
    )
    bundle = edgelin.load(meter.path, threads=1)
    found = evaluate_features.evaluate(bundle, path, against=bundle)
    assert (found.sequences, found.answers) == (3, 3)
    assert found.mean_squared_error == pytest.approx(0.125, rel=1e-4)
    assert found.accuracy is None and found.kl_nat is None and found.relative_error == 0


def test_bundles_of_different_answers_are_not_compared(
    bundle: Bundle, meter: Any, tiny: Any, tmp_path: Path
) -> None:
    path = _save(tmp_path / "d.npz", x=_steps(3), lengths=[3], y=[0, 0, 0])
    with pytest.raises(EdgelinError, match="read or answer different things"):
        evaluate_features.evaluate(bundle, path, against=edgelin.load(meter.path))
    with pytest.raises(EdgelinError, match="reads text, not features"):
        evaluate_features.evaluate(edgelin.load(tiny.path), path)


GOOD: dict[str, Any] = {"x": _steps(4), "lengths": [3, 1], "y": [0, 1, -1, 2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "lacks"),
        ({"lengths": None}, "lacks"),
        ({"y": None}, "lacks"),
        ({"lengths": [3, 2]}, "add up to 5"),
        ({"lengths": [4, 0]}, "0"),
        ({"lengths": [5, -1]}, "-1"),
        ({"lengths": [3.0, 1.0]}, "lengths"),
        ({"lengths": []}, "lengths"),
        ({"x": np.zeros((4, 3), np.float32)}, r"3"),
        ({"x": np.full((4, SIZE), np.nan, np.float32)}, "nan"),
        ({"y": [0, 1, 2]}, r"\[3\]"),
        ({"y": [0, 1, -1, 3]}, "is 3|class 3"),
        ({"y": [0, 1, -2, 2]}, "-2"),
        ({"y": [0.0, 1.0, 2.0, 2.0]}, "float64"),
        ({"y": [-1] * 4}, "-1 everywhere"),
    ],
)
def test_data_sets_that_do_not_fit(
    bundle: Bundle, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    arrays = {k: np.asarray(v) for k, v in {**GOOD, **change}.items() if v is not None}
    path = _save(tmp_path / "d.npz", **arrays)
    with pytest.raises(EdgelinError, match=message) as caught:
        evaluate_features.evaluate(bundle, path)
    assert "\n" not in str(caught.value) and "d.npz" in str(caught.value)


def test_files_that_are_none(bundle: Bundle, tmp_path: Path) -> None:
    path = _save(tmp_path / "d.npz", **GOOD)
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    objects = tmp_path / "o.npz"
    np.savez(objects, x=np.array([{}], dtype=object), lengths=[1], y=[0])
    single = tmp_path / "x.npy"
    np.save(single, _steps(3))
    for name, wrong in [("a", b""), ("b", b"x" * 50), ("c", content[:-30]), ("d", bytes(damaged))]:
        (tmp_path / name).write_bytes(wrong)
    for file in [*(tmp_path / n for n in "abcd"), objects, single, tmp_path, tmp_path / "none"]:
        with pytest.raises(EdgelinError) as caught:
            evaluate_features.evaluate(bundle, file)
        assert "\n" not in str(caught.value) and str(file) in str(caught.value)
        if file != single:
            with pytest.raises(EdgelinError):
                feature_file.read_steps(file)


def test_lines_of_numbers() -> None:
    lines = ["1,2, 3\n", "\n", "  4 5\t6\n", "7e-1,-8,9"]
    found = [row.tolist() for row in feature_file.parse_steps(lines, Features(3))]
    assert found == [[[1, 2, 3]], [[4, 5, 6]], [[np.float32(0.7), -8, 9]]]
    for line, message in (
        ("1 2", "line 2 of standard input: 2 numbers, 3 are needed"),
        ("1 2 x", "line 2 of standard input: 'x' is no number"),
        ("1 2 nan", "line 2 of standard input: feature 2 at step 0 is nan"),
    ):
        steps = feature_file.parse_steps(["1 2 3", line], Features(3))
        next(steps)
        with pytest.raises(EdgelinError, match=message):
            next(steps)


def test_bench_counts_steps(sensor: Any) -> None:
    found = measure.bench(sensor.path, tokens=64, threads=1, variant=None)
    assert found["unit"] == "step" and found["speed"][0]["decode_steps_per_s"] > 0


def test_random_steps_are_like_what_is_read() -> None:
    random = np.random.default_rng(0)
    ids = Tokens(7).random(random, 2, 50)
    assert ids.shape == (2, 50) and ids.min() >= 0 and ids.max() < 7
    x = Features(3).random(random, 2, 50)
    assert x.shape == (2, 50, 3) and x.dtype == np.float32
