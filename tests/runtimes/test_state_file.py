"""A saved stream goes on bit for bit; damaged and foreign files are refused in one line."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes import state_file
from edgelin.runtimes.session import Bundle


@pytest.fixture(scope="module")
def bundle(tiny: Any) -> Bundle:
    return edgelin.load(tiny.path, threads=1)


@pytest.fixture
def saved(bundle: Bundle, tmp_path: Path) -> Path:
    stream = bundle.stream()
    stream.feed(list(range(1, 70)))
    stream.save(tmp_path / "s.state")
    return tmp_path / "s.state"


def test_logits_go_on_bit_for_bit(bundle: Bundle, saved: Path) -> None:
    whole = bundle.stream()
    last = whole.feed(list(range(1, 70)))
    loaded = bundle.stream()
    loaded.load(saved)
    assert loaded.position == 69
    assert loaded.logits is not None and loaded.logits[0].tobytes() == last.tobytes()
    for ids in ([5], [6, 7, 8], list(range(20))):
        assert loaded.feed(ids).tobytes() == whole.feed(ids).tobytes()


def test_no_token_is_read_again(
    bundle: Bundle, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = bundle.stream()
    monkeypatch.setattr(stream._buffers, "run", lambda *a, **k: pytest.fail("the model was called"))
    stream.load(saved)


def test_generation_goes_on_anywhere(bundle: Bundle, tmp_path: Path) -> None:
    """Also in the middle of a character, of a stop string, and of a penalty window."""
    options: dict[str, Any] = {"seed": 4, "repetition_penalty": 1.3, "top_k": 0, "stop": ("qXq",)}
    stream = bundle.stream()
    whole = "".join(stream.generate("Köln", max_tokens=30, **options)) + stream.flush()
    pending = 0
    for cut in range(30):
        first = bundle.stream()
        text = "".join(first.generate("Köln", max_tokens=cut, **options))
        first.save(tmp_path / "s")
        second = bundle.stream()
        second.load(tmp_path / "s")
        pending += bool(second._tail.pending)
        text += "".join(second.generate(max_tokens=30 - cut, **options)) + second.flush()
        assert text == whole
    assert pending > 0


def test_stop_string_across_the_file(bundle: Bundle, tmp_path: Path) -> None:
    stream = bundle.stream()
    stream.feed([1])
    stream._tail.held, stream._tail.pending = "EN", b"\xc3"
    stream.save(tmp_path / "s")
    stream.flush()
    stream.load(tmp_path / "s")
    assert (stream._tail.held, stream._tail.pending) == ("EN", b"\xc3")


def test_batches(bundle: Bundle, tmp_path: Path) -> None:
    stream = bundle.stream(batch=3)
    stream.feed(np.arange(1, 31).reshape(3, 10))
    stream.save(tmp_path / "s")
    other = bundle.stream(batch=3)
    other.load(tmp_path / "s")
    ids = np.array([[1], [2], [3]])
    assert other.feed(ids).tobytes() == stream.feed(ids).tobytes()
    with pytest.raises(EdgelinError, match=r"tensor recurrent.0 is float32 \[3, 6, 10\]"):
        bundle.stream().load(tmp_path / "s")


def test_other_model_is_refused(build: Callable[..., Any], saved: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "other", seed=1, model_hash="22" * 32)
    stream = edgelin.load(other.path, threads=1).stream()
    with pytest.raises(EdgelinError, match="saved by another model"):
        stream.load(saved)
    assert stream.position == 0 and stream.logits is None


def test_other_variant_is_a_warning(
    tiny: Any, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        edgelin.load(tiny.path, variant="model_q8", threads=1).stream().load(saved)
    assert "saved by variant model and goes on with model_q8" in caplog.text


def test_truncated_and_damaged_files(bundle: Bundle, saved: Path) -> None:
    content = saved.read_bytes()
    stream = bundle.stream()
    for size in [0, 4, 8, 100, len(content) // 2, len(content) - 1]:
        saved.write_bytes(content[:size])
        _refused(stream, saved)
    for position in [len(content) - 5, len(content) // 2]:
        damaged = bytearray(content)
        damaged[position] ^= 1
        saved.write_bytes(damaged)
        _refused(stream, saved)
    saved.write_bytes(content)
    stream.load(saved)


def _refused(stream: Any, path: Path) -> None:
    with pytest.raises(EdgelinError, match="damaged") as caught:
        stream.load(path)
    assert "\n" not in str(caught.value)


def test_other_files(bundle: Bundle, tmp_path: Path) -> None:
    stream = bundle.stream()
    with pytest.raises(EdgelinError, match="there is no state file"):
        stream.load(tmp_path / "nothing")
    with pytest.raises(EdgelinError, match="damaged or no state file"):
        stream.load(tmp_path)
    safetensors.numpy.save_file({"a": np.zeros(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(EdgelinError, match="no edgelin state file of format 1"):
        stream.load(tmp_path / "weights.safetensors")


def test_a_failed_save_keeps_the_old_file(
    bundle: Bundle, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = saved.read_bytes()
    stream = bundle.stream()
    stream.feed([1])

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_file.os, "fsync", full)
    with pytest.raises(EdgelinError, match="cannot be written: No space left on device"):
        stream.save(saved)
    assert saved.read_bytes() == content
    assert [path.name for path in saved.parent.iterdir()] == ["s.state"]


def test_an_empty_stream_is_not_saved(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(EdgelinError, match="has read nothing yet"):
        bundle.stream().save(tmp_path / "s")


def test_any_safetensors_reader_can_read_it(saved: Path) -> None:
    tensors = safetensors.numpy.load_file(saved)
    assert sorted(tensors) == ["logits", "position", "recurrent.0"]
    assert tensors["position"].tolist() == [69]


def _rewrite(path: Path, sign: bool, tensors: dict[str, Any], **changes: str) -> None:
    """Change metadata and tensors of a state file, with a hash that fits or the old one."""
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = {**file.metadata(), **changes}
    tensors = {**safetensors.numpy.load_file(path), **tensors}
    if sign:
        metadata["sha256"] = state_file._hash(metadata, tensors)
    path.write_bytes(safetensors.numpy.save(tensors, metadata))


ODD = {
    "position": ["-5", "0", "70", str(2**70), str(2**63), "1_0", "x", "9" * 5000],
    "recent": ["[99999]", "[-1]", "[1]", "{}", "[" * 100_000, str([1.5] * 64), str([300] * 64),
               "[" + "true, " * 63 + "true]"],
    "text": ["[]", "{}", '{"pending": "zz", "held": ""}', '{"pending": "", "held": 3}',
             '{"pending": "41", "held": ""}', '{"pending": "ff", "held": ""}',
             r'{"pending": "", "held": "\ud800"}'],
}  # fmt: skip


@pytest.mark.parametrize("sign", [False, True])
@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in ODD.items() for value in values],
    ids=lambda text: text[:20],
)
def test_odd_metadata(bundle: Bundle, saved: Path, sign: bool, key: str, value: str) -> None:
    _rewrite(saved, sign, {}, **{key: value})
    _refused(bundle.stream(), saved)


def test_all_metadata_is_hashed(bundle: Bundle, saved: Path) -> None:
    content = saved.read_bytes()
    for change in (
        {"recent": str([1] * 64)}, {"variant": "model_q8"}, {"more": "x"},
        {"text": '{"pending": "", "held": "x"}'},
    ):  # fmt: skip
        saved.write_bytes(content)
        _rewrite(saved, False, {}, **change)
        _refused(bundle.stream(), saved)
        _rewrite(saved, True, {})
        bundle.stream().load(saved)


@pytest.mark.parametrize("value", [-7, 68, 70, 2**62])
def test_odd_position_tensor(bundle: Bundle, saved: Path, value: int) -> None:
    _rewrite(saved, True, {"position": np.array([value])})
    _refused(bundle.stream(), saved)


@pytest.mark.parametrize("name", ["", "folder", "no/s", "a\0b", "n" * 300, "pipe"])
def test_a_target_that_cannot_be_written(bundle: Bundle, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    stream = bundle.stream()
    stream.feed([1])
    with pytest.raises(EdgelinError, match="cannot be written: ") as caught:
        stream.save(tmp_path / name if name else "")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]
