"""Bundles that were damaged or made to harm: the same answers as before, or one clear line.

(State files: test_state_file_fuzz.py.)
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import edgelin
from edgelin.errors import EdgelinError
from edgelin.runtimes.manifest import Manifest, Variant, file_records

IDS = [1, 17, 5, 200, 3, 3, 44, 8, 9, 250]
FILES = (
    "edgelin.json", "config.json", "tokenizer.json", "onnx/model.onnx", "onnx/model.onnx_data",
)  # fmt: skip


@pytest.fixture(scope="module")
def copy(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that every example damages and puts right again."""
    return Path(shutil.copytree(tiny.path, tmp_path_factory.mktemp("fuzz") / "copy"))


def answers(folder: Path) -> Any:
    """What a bundle says, or None and one line of why it does not."""
    try:
        bundle = edgelin.load(folder, threads=1)
        ids = bundle.text.encode("The quiet river")
        return ids, bundle.stream().feed(IDS, all_logits=True)
    except EdgelinError as error:
        assert "\n" not in str(error) and 20 < len(str(error)) < 700
        return None


def check(folder: Path, wanted: Any) -> bool:
    """Whether it answers; if so, every bit is right."""
    found = answers(folder)
    if found is not None:
        assert found[0] == wanted[0] and np.array_equal(found[1], wanted[1])
    return found is not None


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_a_bit_flips(tiny: Any, copy: Path, name: str, place: float, bit: int) -> None:
    wanted, path = answers(tiny.path), copy / name
    content = path.read_bytes()
    changed = bytearray(content)
    changed[int(place * len(content))] ^= 1 << bit
    try:
        path.write_bytes(changed)
        assert not check(copy, wanted)
    finally:
        path.write_bytes(content)
    assert check(copy, wanted)


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.binary(max_size=40))
def test_a_file_is_cut_or_goes_on(
    tiny: Any, copy: Path, name: str, place: float, more: bytes
) -> None:
    wanted, path = answers(tiny.path), copy / name
    content = path.read_bytes()
    try:
        path.write_bytes(content[: int(place * len(content))] + more)
        assert not check(copy, wanted)
        path.write_bytes(content + b"x" + more)
        check(copy, wanted)
        path.unlink()
        assert not check(copy, wanted)
    finally:
        path.write_bytes(content)


PARTS = st.sampled_from(
    ["..", ".", "", "a", "onnx", "C:", "c:x", "~", "\\", "..\\", "/", "\0", " "]
)


@given(st.lists(PARTS, min_size=1, max_size=5).map("/".join), st.sampled_from(["file", "data"]))
@example("C:/secret", "file")
@example("C:secret", "data")
@example("onnx/../../secret", "data")
@example("\\\\server\\share", "file")
def test_no_path_leads_out_of_the_folder(tiny: Any, path: str, where: str) -> None:
    """On any system, whether the file exists or not."""
    manifest = Manifest.read(tiny.path)
    record = manifest.files["config.json"]
    variant = manifest.variants["model"]
    if where == "file":
        changed = dataclasses.replace(manifest, files={**manifest.files, path: record})
    else:
        moved = Variant(path, {**variant.files, path: record}, None)
        changed = dataclasses.replace(manifest, variants={"model": moved})
    try:
        accepted = Manifest.from_dict(changed.as_dict())
    except EdgelinError as error:
        assert "\n" not in str(error)
        return
    names = [*accepted.files, *accepted.variants["model"].files]
    for kind, root in ((PurePosixPath, "/b/c"), (PureWindowsPath, "D:/b/c")):
        for name in names:
            joined = kind(root) / name
            assert joined.is_relative_to(kind(root)) and ".." not in joined.parts


@pytest.mark.parametrize("location", ["../../secret", "/etc/passwd", "../tokenizer.json"])
def test_a_graph_reads_no_weights_from_elsewhere(tiny: Any, tmp_path: Path, location: str) -> None:
    """Though the manifest vouches for the graph."""
    folder = Path(shutil.copytree(tiny.path, tmp_path / "bundle"))
    (tmp_path / "secret").write_bytes((folder / "onnx" / "model.onnx_data").read_bytes())
    manifest = Manifest.read(folder)
    variant = manifest.variants["model"]
    model = onnx.load(folder / variant.file, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    (folder / variant.file).write_bytes(model.SerializeToString())
    files = file_records(folder, list(variant.files))
    variants = {**manifest.variants, "model": Variant(variant.file, files, None)}
    dataclasses.replace(manifest, variants=variants).write(folder)
    assert answers(folder) is None
