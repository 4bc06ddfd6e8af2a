"""The manifest: what is written is read back, and anything else is refused in one line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes import session as sessions
from edgelin.runtimes.canonical_json import canonical_json, digest
from edgelin.runtimes.manifest import FILE_NAME, Manifest
from edgelin.runtimes.tokenizer_record import TokenizerRecord
from edgelin.state import StateSpec


def test_reads_what_it_wrote(tiny: Any, tmp_path: Path) -> None:
    manifest = Manifest.read(tiny.path)
    manifest.write(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == (tiny.path / FILE_NAME).read_bytes()
    assert Manifest.read(tmp_path) == manifest
    assert [p.name for p in tmp_path.iterdir()] == [FILE_NAME]


def test_io_part_is_what_the_plan_of_the_graphs_says(tiny: Any) -> None:
    io = Manifest.read(tiny.path).io_part()
    assert sorted(io) == [
        "format", "input", "max_time", "num_logits_to_keep", "output", "profile", "states",
    ]  # fmt: skip
    assert io["states"][0] == {
        "name": "recurrent.0", "input": "past_recurrent.0", "output": "present_recurrent.0",
        "kind": "recurrent", "layer": 0, "shape": ["batch", 6, 10], "layout": "batch key value",
        "dtype": "float32", "initial": 0.25,
    }  # fmt: skip


def test_a_growing_axis_is_read_back(tiny: Any) -> None:
    spec = StateSpec("key", 1, (2, "past", 8), "batch heads token channels")
    manifest = dataclasses.replace(Manifest.read(tiny.path), states=[spec])
    found = Manifest.from_dict(manifest.as_dict()).states[0]
    assert found == spec and found.as_dict()["shape"] == ["batch", 2, "past", 8]
    assert (found.growing_axis, found.num_bytes(5), found.bytes_per_step) == (2, 320, 64)


def test_canonical_json_is_rfc_8785() -> None:
    # The examples of RFC 8785, sections 3.2.2 to 3.2.4 (numbers, strings, order of keys).
    numbers = [
        333333333.33333329,
        1e30,
        4.50,
        2e-3,
        0.000000000000000000000000001,
        -0.0,
        1e-6,
        1e-7,
    ]
    assert canonical_json({"numbers": numbers}) == (
        '{"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27,0,0.000001,1e-7]}'
    )
    keys = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\u0080": 6, "\u00f6": 7}
    assert canonical_json(keys) == (
        '{"\\r":2,"1":4,"\u0080":6,"\u00f6":7,"\u20ac":1,"\U0001f600":5,"\ufb33":3}'
    )
    assert canonical_json([None, True, 'a"\\\n\x0f', 1]) == '[null,true,"a\\"\\\\\\n\\u000f",1]'


def test_digest_is_the_hash_of_the_canonical_json(tiny: Any) -> None:
    content = json.loads((tiny.path / FILE_NAME).read_text())
    # This manifest has only one number with a fraction, so json.dumps is canonical as well.
    stored = content.pop("digest")
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    text = text.replace('"initial":0.0,', '"initial":0,')
    assert hashlib.sha256(text.encode()).hexdigest() == stored


def test_any_changed_character_is_refused(tiny: Any, tmp_path: Path) -> None:
    original = (tiny.path / FILE_NAME).read_bytes()
    for position in range(0, len(original), 7):
        if original[position : position + 1].isspace():
            continue
        changed = bytearray(original)
        changed[position] ^= 1
        (tmp_path / FILE_NAME).write_bytes(changed)
        with pytest.raises(EdgelinError) as caught:
            Manifest.read(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "format None; this edgelin .* reads format 1"),
        (b'{"format": 2}', "format 2; this edgelin .* reads format 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(EdgelinError, match=message):
        Manifest.read(tmp_path)


def test_missing_bundle(tmp_path: Path) -> None:
    with pytest.raises(EdgelinError, match=r"no bundle: it has no edgelin.json \(no such folder\)"):
        Manifest.read(tmp_path / "nowhere")
    with pytest.raises(EdgelinError, match=r"no bundle: it has no edgelin\.json; give a folder"):
        Manifest.read(tmp_path)


def test_missing_key_is_named(tiny: Any) -> None:
    content = json.loads((tiny.path / FILE_NAME).read_text())
    del content["chunk"]
    content["digest"] = digest(content)
    with pytest.raises(EdgelinError, match="is not a valid manifest: KeyError 'chunk'"):
        Manifest.from_dict(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"profile": "fast"}, "profile is 'fast'; allowed: fused, plain, onnx"),
        ({"default_variant": "x"}, "default_variant 'x' is not among variants"),
        ({"chunk": 0}, "chunk is 0"),
        ({"chunk": 65, "max_time": 64}, "chunk is 65"),
        ({"tokenizer": TokenizerRecord("x.json", 0, {})}, "'x.json' is not among files"),
        (
            {"tokenizer": TokenizerRecord("tokenizer.json", 9999, {})},
            "special token 9999 is beyond",
        ),
        (
            {"tokenizer": TokenizerRecord("tokenizer.json", 0, {}, (0, 9999))},
            "special token 9999 is beyond",
        ),
        (
            {"tokenizer": TokenizerRecord("tokenizer.json", 0, {}, (), "x.jinja")},
            "'x.jinja' is not among files",
        ),
        ({"states": [StateSpec("a", 0, (1,), "")] * 2}, "two states have the same name"),
        ({"states": [StateSpec("a", 0, (1,), "", "float16")]}, "float16; allowed: float32, int64"),
        ({"states": [StateSpec("a", 0, ("past",), "", "int64")]}, "a.0 grows and is int64"),
        ({"states": [StateSpec("a", 0, ("past", "past"), "")]}, r"shape is .* or once \"past\""),
        ({"states": [StateSpec("a", 0, ("time", 2), "")]}, r"shape is .* or once \"past\""),
    ],
)
def test_contradictions_are_refused(tiny: Any, change: dict[str, Any], message: str) -> None:
    manifest = dataclasses.replace(Manifest.read(tiny.path), **change)
    with pytest.raises(EdgelinError, match=message):
        Manifest.from_dict(manifest.as_dict())


@pytest.mark.parametrize(
    "key",
    [
        "model_hash", "profile", "edgelin_version", "default_variant", "min_onnxruntime", "opset",
        "chunk", "num_logits_to_keep", "input", "input.name", "input.vocab_size", "output",
        "output.name", "states", "states.0", "states.0.kind", "states.0.layer", "states.0.shape",
        "states.0.name", "states.0.input", "states.0.dtype", "states.0.initial", "tokenizer",
        "tokenizer.file", "tokenizer.eos_token_id", "tokenizer.special_tokens",
        "tokenizer.eos_token_ids", "tokenizer.chat_template", "tokenizer.chat_tokens", "variants",
        "variants.model", "variants.model.file", "variants.model.files",
        "variants.model_q8.quantisation", "variants.model_q8.quantisation.bits",
        "variants.model_q8.quantisation.block_size", "files", "files.config.json",
    ],
)  # fmt: skip
def test_values_of_other_types_are_refused(tiny: Any, tmp_path: Path, key: str) -> None:
    """In one line, though the digest is right."""
    for value in (None, True, -3, 0.5, [], {}, "garbage", ["x"], {"x": 1}, float("nan"), "\udc80"):
        content = json.loads((tiny.path / FILE_NAME).read_text())
        *parents, last = key.split(".", 1) if key.startswith("files") else key.split(".")
        place = content
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place[parent]
        index = int(last) if isinstance(place, list) else last
        if isinstance(value, str) and isinstance(place[index], str):
            continue  # of the right type; what it means is for others to judge
        if value is None and key.endswith(("quantisation", "layer", "chat_template")):
            continue
        of_any_content = ("states", "special_tokens", "eos_token_ids", "chat_tokens")
        if key.endswith(of_any_content) and type(value) is type(place[index]):
            continue
        if key == "states.0.initial" and value in (-3, 0.5):
            continue
        place[index] = value
        if value != "\udc80":
            content["digest"] = digest(content)
        (tmp_path / FILE_NAME).write_text(json.dumps(content))
        with pytest.raises(EdgelinError) as caught:
            Manifest.read(tmp_path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("version", ["", "garbage", "1.x", "1." * 400, "9" * 5000])
def test_versions_that_are_none_are_refused(tiny: Any, version: str) -> None:
    manifest = dataclasses.replace(Manifest.read(tiny.path), min_onnxruntime=version)
    with pytest.raises(EdgelinError, match=r"min_onnxruntime is .*allowed: a version"):
        Manifest.from_dict(manifest.as_dict())


@pytest.mark.parametrize("depth", [900, 5000, 100_000])
def test_deep_json_is_refused(tmp_path: Path, depth: int) -> None:
    (tmp_path / FILE_NAME).write_text('{"format": 1, "x": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(EdgelinError) as caught:
        Manifest.read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["/etc/passwd", "../other.json", "onnx/../../x", "..\\x"])
def test_files_outside_the_bundle_are_refused(tiny: Any, path: str) -> None:
    manifest = Manifest.read(tiny.path)
    record = manifest.files["config.json"]
    bad = dataclasses.replace(manifest, files={path: record})
    with pytest.raises(EdgelinError, match="lies outside the bundle"):
        Manifest.from_dict(bad.as_dict())


@pytest.mark.parametrize("name", ["onnx/model.onnx", "onnx/model.onnx_data", "tokenizer.json"])
def test_damaged_files_are_found(damaged: Path, name: str) -> None:
    manifest = Manifest.read(damaged)
    manifest.check_files(damaged)
    content = bytearray((damaged / name).read_bytes())
    content[len(content) // 2] ^= 1
    (damaged / name).write_bytes(content)
    with pytest.raises(EdgelinError, match=f"{name} differs from its sha256"):
        manifest.check_files(damaged)
    (damaged / name).write_bytes(content[:-1])
    with pytest.raises(EdgelinError, match=f"{name} has .* bytes where the manifest says"):
        manifest.check_files(damaged)
    (damaged / name).unlink()
    with pytest.raises(EdgelinError, match=f"{name} is missing"):
        manifest.check_files(damaged)


def test_files_of_other_variants_may_be_missing(damaged: Path) -> None:
    (damaged / "onnx" / "model_q8.onnx").unlink()
    manifest = Manifest.read(damaged)
    manifest.check_files(damaged)
    with pytest.raises(EdgelinError, match=r"model_q8\.onnx is missing"):
        manifest.check_files(damaged, "model_q8")


def test_large_files_are_compared_by_size(damaged: Path) -> None:
    data = damaged / "onnx" / "model.onnx_data"
    content = bytearray(data.read_bytes())
    content[0] ^= 1
    data.write_bytes(content)
    Manifest.read(damaged).check_files(damaged, limit=1000)


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("at_once", [0, 1 << 20])
def test_a_damaged_file_is_told_whether_or_not_it_opens(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, opens: bool
) -> None:
    """Large files are hashed while the session opens."""
    monkeypatch.setattr(sessions, "_AT_ONCE", at_once)
    original, opened = sessions.open_session, []

    def open_session(*arguments: Any) -> Any:
        opened.append(arguments)
        if not opens:
            raise EdgelinError("onnxruntime cannot load it")
        return original(*arguments)

    monkeypatch.setattr(sessions, "open_session", open_session)
    data = damaged / "onnx" / "model.onnx_data"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(EdgelinError, match=r"model\.onnx_data differs from its sha256"):
        edgelin.load(damaged, threads=1)
    assert len(opened) == (at_once == 0)
