"""Whatever happens to a state file, loading it gives the exact state or one clear line.

The file is taken apart and put together here byte by byte, as the safetensors format says: eight
bytes with the length of the header, the header as JSON, the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes import state_codec
from edgelin.runtimes.session import Bundle
from edgelin.runtimes.stream import Stream

CODES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I8": 1, "U8": 1, "I32": 4, "BOOL": 1}


@pytest.fixture(scope="module")
def bundle(tiny: Any) -> Bundle:
    return edgelin.load(tiny.path, threads=1)


@pytest.fixture(params=state_codec.DTYPES)
def saved(
    request: pytest.FixtureRequest, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A file of each kind; the rows of this model are short for scales."""
    monkeypatch.setattr(state_codec, "SHORT", 8)
    stream = bundle.stream()
    stream.feed(list(range(1, 70)))
    stream._tail.held, stream._tail.pending = "EN", b"\xc3"
    stream.save(tmp_path / "s.state", dtype=request.param)
    return tmp_path / "s.state"


def _content(stream: Stream) -> Any:
    assert stream.outputs is not None
    states = [array.tobytes() for array in stream.states().values()]
    tail = (stream._tail.pending, stream._tail.held)
    return stream.position, states, stream.outputs.tobytes(), [*stream._recent], tail


def _try(bundle: Bundle, path: Path, exact: Any) -> str | None:
    """The error of loading a file; None where it gave the exact state."""
    stream = bundle.stream()
    before = (stream.position, stream.outputs, [a.tobytes() for a in stream.states().values()])
    try:
        stream.load(path)
    except EdgelinError as error:
        assert "\n" not in str(error) and len(str(error)) < 700
        after = [a.tobytes() for a in stream.states().values()]
        assert (stream.position, stream.outputs, after) == before
        return str(error)
    assert _content(stream) == exact
    return None


def _exact(bundle: Bundle, path: Path) -> Any:
    stream = bundle.stream()
    stream.load(path)
    return _content(stream)


def _parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a file."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def _write(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _sign(header: dict[str, Any], data: bytes) -> dict[str, Any]:
    """The header with the hash that fits, as runtimes/README.md says it."""
    metadata = {k: v for k, v in header["__metadata__"].items() if k != "sha256"}
    total = hashlib.sha256()
    for key in sorted(metadata):
        total.update(key.encode() + b"\0" + metadata[key].encode() + b"\0")
    for name in sorted(header.keys() - {"__metadata__"}):
        start, end = header[name]["data_offsets"]
        total.update(data[start:end])
    return {**header, "__metadata__": {**metadata, "sha256": total.hexdigest()}}


def _build(metadata: dict[str, str], tensors: dict[str, tuple[str, list[int], bytes]]) -> Any:
    """Header and data of a file with a hash that fits."""
    header: dict[str, Any] = {"__metadata__": metadata}
    data = b""
    for name, (code, shape, raw) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [len(data), len(data + raw)]}
        data += raw
    return _sign(header, data), data


def _tensors(path: Path) -> tuple[dict[str, str], dict[str, tuple[str, list[int], bytes]]]:
    """Inverse of :func:`_build`."""
    header, data = _parts(path)
    metadata = header.pop("__metadata__")
    return metadata, {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def test_the_file_put_together_here_is_the_same_state(bundle: Bundle, saved: Path) -> None:
    exact = _exact(bundle, saved)
    _write(saved, *_build(*_tensors(saved)))
    assert _try(bundle, saved, exact) is None


def test_truncated(bundle: Bundle, saved: Path) -> None:
    """In the length, anywhere in the header, around its end, in every tensor, and too long."""
    exact, content = _exact(bundle, saved), saved.read_bytes()
    end = len(content) - len(_parts(saved)[1])
    sizes = {*range(20), *range(end - 9, end + 9), *range(0, len(content), 11), len(content) - 1}
    for size in sorted(sizes):
        saved.write_bytes(content[:size])
        assert _try(bundle, saved, exact) is not None, size
    saved.write_bytes(content + b"\0")
    assert _try(bundle, saved, exact) is not None


def test_bits_flip(bundle: Bundle, saved: Path) -> None:
    """All of the length, and one in every few bytes, others in every kind of file."""
    exact, content = _exact(bundle, saved), saved.read_bytes()
    bits = np.random.default_rng(0).integers(0, 8, len(content))
    flips = [(at, bit) for at in range(8) for bit in range(8)]
    flips += [(at, int(bits[at])) for at in range(len(content) % 7, len(content), 7)]
    good = 0
    for at, bit in flips:
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        saved.write_bytes(damaged)
        good += _try(bundle, saved, exact) is None
    assert good <= 3  # white space that pads the header, if anything


def test_random_bytes_in_random_places(bundle: Bundle, saved: Path) -> None:
    exact, content = _exact(bundle, saved), saved.read_bytes()
    random = np.random.default_rng(1)
    for _ in range(150):
        damaged = bytearray(content)
        start = int(random.integers(0, len(content)))
        count = int(random.integers(1, 64))
        damaged[start : start + count] = random.bytes(int(random.integers(0, 64)))
        saved.write_bytes(damaged)
        _try(bundle, saved, exact)
        saved.write_bytes(random.bytes(count))
        assert _try(bundle, saved, exact) is not None


Change = Callable[[dict[str, tuple[str, list[int], bytes]]], None]


def _set(name: str, code: str, shape: list[int], raw: bytes | None = None) -> Change:
    size = int(np.prod(shape)) * CODES[code]
    return lambda tensors: tensors.update({name: (code, shape, raw or bytes(size))})


def _floats(name: str, value: float) -> Change:
    """One wrong number in a tensor, whatever it is stored as."""

    def change(tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
        code, shape, raw = tensors[name]
        if code == "I8":
            name_, kind = f"{name}.scale", np.float32
            code, shape, raw = tensors[name_]
        else:
            name_, kind = name, {"F32": np.float32, "F16": np.float16}[code]
        array = np.frombuffer(raw, kind).copy()
        array[len(array) // 2] = value
        tensors[name_] = (code, shape, array.tobytes())

    return change


SIGNED: dict[str, tuple[Change, str]] = {
    "another shape": (_set("recurrent.0", "F32", [1, 6, 11]), r"\[1, 6, 10\] is needed"),
    "turned": (_set("recurrent.0", "F32", [1, 10, 6]), r"\[1, 6, 10\] is needed"),
    "no batch axis": (_set("recurrent.0", "F32", [6, 10]), "is needed"),
    "no axes": (_set("recurrent.0", "F32", []), "is needed"),
    "nothing": (_set("recurrent.0", "F32", [1, 6, 0]), "is needed"),
    "another batch": (_set("recurrent.0", "F32", [2, 6, 10]), "another batch size or damaged"),
    "float64": (_set("recurrent.0", "F64", [1, 6, 10]), "float64 .* float32"),
    "bfloat16": (_set("recurrent.0", "BF16", [1, 6, 10]), "a tensor is BF16"),
    "int32": (_set("recurrent.0", "I32", [1, 6, 10]), "int32 .* float32"),
    "uint8": (_set("recurrent.0", "U8", [1, 6, 10]), "a tensor is U8"),
    "bool": (_set("recurrent.0", "BOOL", [1, 6, 10]), "a tensor is BOOL"),
    "int64": (_set("recurrent.0", "I64", [1, 6, 10]), "int64 .* float32"),
    "float position": (_set("position", "F32", [1]), "float32 .* int64"),
    "int8 position": (_set("position", "I8", [1]), "int8 .* int64"),
    "half answers": (_set("logits", "F16", [1, 300]), "float16 .* float32"),
    "NaN": (_floats("recurrent.0", np.nan), "recurrent.0 is not finite"),
    "infinity": (_floats("recurrent.0", -np.inf), "recurrent.0 is not finite"),
    "NaN in answers": (_floats("logits", np.nan), "logits is not finite"),
    "another position": (_set("position", "I64", [1], struct.pack("<q", 68)), "positions disagree"),
    "no state": (
        lambda tensors: tensors.pop("recurrent.0") and None,
        "0 is missing|hold",
    ),
    "no answers": (lambda tensors: tensors.pop("logits") and None, "tensor logits is missing"),
    "one more": (_set("recurrent.1", "F32", [1, 6, 10]), "holds 'recurrent.1', which this model"),
    "an odd name": (_set("a\nb", "F32", [1]), r"holds 'a\\nb', which this model"),
    "a stray scale": (_set("position.scale", "F32", [1]), "holds 'position.scale', which this"),
}


@pytest.mark.parametrize("name", SIGNED)
def test_wrong_tensors_with_the_right_hash(bundle: Bundle, saved: Path, name: str) -> None:
    change, message = SIGNED[name]
    metadata, tensors = _tensors(saved)
    change(tensors)
    if "recurrent.0.scale" in tensors and tensors.get("recurrent.0", ("I8",))[0] != "I8":
        del tensors["recurrent.0.scale"]
    _write(saved, *_build(metadata, tensors))
    error = _try(bundle, saved, None)
    assert error is not None
    assert re.search(message, error), error


@pytest.mark.parametrize(
    "scale",
    [None, ("F32", [1, 6]), ("F32", [1, 1, 1]), ("F16", [1, 6, 1]), ("F32", [1, 6, 10])],
    ids=str,
)
def test_scales_that_do_not_fit(bundle: Bundle, saved: Path, scale: Any) -> None:
    metadata, tensors = _tensors(saved)
    tensors["recurrent.0"] = ("I8", [1, 6, 10], bytes(60))
    tensors.pop("recurrent.0.scale", None)
    if scale is not None:
        _set("recurrent.0.scale", *scale)(tensors)
    _write(saved, *_build(metadata, tensors))
    error = _try(bundle, saved, None)
    assert error is not None and "tensor recurrent.0 is int8 [1, 6, 10], float32" in error


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_scales_that_are_no_sizes(bundle: Bundle, saved: Path, value: float) -> None:
    metadata, tensors = _tensors(saved)
    tensors["recurrent.0"] = ("I8", [1, 6, 10], bytes([0, 127] * 30))
    tensors["recurrent.0.scale"] = ("F32", [1, 6, 1], np.full(6, value, np.float32).tobytes())
    _write(saved, *_build(metadata, tensors))
    assert "recurrent.0 is not finite" in (_try(bundle, saved, None) or "")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("edgelin_state", "2", r"has format '2'; this edgelin .* reads format 1"),
        ("edgelin_state", "1\n", r"has format '1\\n'"),
        ("edgelin_state", "", "has format ''"),
        ("model_hash", "22" * 32, "saved by another model"),
        ("model_hash", "a\nb", "odd metadata"),
        ("variant", "x\ny", "odd metadata"),
        ("position", "68", "positions disagree"),
    ],
)
def test_metadata_with_the_right_hash(
    bundle: Bundle, saved: Path, key: str, value: str, message: str
) -> None:
    metadata, tensors = _tensors(saved)
    _write(saved, *_build({**metadata, key: value}, tensors))
    error = _try(bundle, saved, None)
    assert error is not None and re.search(message, error), error


@pytest.mark.parametrize("key", ["edgelin_state", "model_hash", "variant", "position", "recent"])
def test_metadata_that_is_missing(bundle: Bundle, saved: Path, key: str) -> None:
    metadata, tensors = _tensors(saved)
    del metadata[key]
    _write(saved, *_build(metadata, tensors))
    assert _try(bundle, saved, None) is not None


def test_headers(bundle: Bundle, saved: Path) -> None:
    exact, (header, data) = _exact(bundle, saved), _parts(saved)
    text = json.dumps(header).encode()
    entry = header["recurrent.0"]
    start, end = entry["data_offsets"]
    odd: dict[str, Any] = {
        "empty": b"", "no object": b"[]", "null": b"null", "no JSON": b"{" * 50,
        "bytes": b"\xff" * 9,
        "nested": b'{"a":' * 100_000, "more text": text + b"{}", "a zero": text + b"\0",
        "metadata of numbers": {**header, "__metadata__": {"edgelin_state": 1}},
        "metadata of lists": {**header, "__metadata__": []},
        "no metadata": {k: v for k, v in header.items() if k != "__metadata__"},
        "overlap": {**header, "recurrent.0": {**entry, "data_offsets": [0, end - start]}},
        "backwards": {**header, "recurrent.0": {**entry, "data_offsets": [end, start]}},
        "beyond": {**header, "recurrent.0": {**entry, "data_offsets": [start, 2**62]}},
        "negative": {**header, "recurrent.0": {**entry, "data_offsets": [-4, end]}},
        "huge shape": {**header, "recurrent.0": {**entry, "shape": [2**40, 2**40]}},
        "negative shape": {**header, "recurrent.0": {**entry, "shape": [1, -6, -10]}},
        "unknown dtype": {**header, "recurrent.0": {**entry, "dtype": "X7"}},
        "no dtype": {**header, "recurrent.0": {"shape": [1], "data_offsets": [start, end]}},
        "a number for a tensor": {**header, "recurrent.0": 3},
        "many tensors": {**header, **{f"t{i}": {**entry, "shape": [0]} for i in range(20_000)}},
    }  # fmt: skip
    for name, given in odd.items():
        _write(saved, given, data)
        assert _try(bundle, saved, exact) is not None, name
    _write(saved, text + b" " * 3_000_000, data)  # allowed: the header may be padded
    assert _try(bundle, saved, exact) is None


@pytest.mark.parametrize("size", [2**63 - 1, 2**64 - 1, 2**40, 100_000_001, 0])
def test_sizes_of_the_header(bundle: Bundle, saved: Path, size: int) -> None:
    content = saved.read_bytes()
    saved.write_bytes(struct.pack("<Q", size) + content[8:])
    assert _try(bundle, saved, None) is not None
    if size == 100_000_001:  # and a file that has as much, in holes
        os.truncate(saved, size + 8)
        assert _try(bundle, saved, None) is not None


@pytest.mark.skipif(os.name != "posix", reason="needs pipes and devices")
def test_what_is_no_file(bundle: Bundle, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link", Path("/dev/zero"), Path("a\0b")):
        assert _try(bundle, path, None) is not None
    assert _try(bundle, tmp_path / ("n" * 300), None) is not None
