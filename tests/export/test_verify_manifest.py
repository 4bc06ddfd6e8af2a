"""``verify --checkpoint`` holds what a bundle says of itself to its checkpoint and its graphs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgelin.errors import EdgelinError
from edgelin.export.bundle import export_checkpoint
from edgelin.export.verify.compare import verify
from edgelin.export.verify.manifest import check_contract
from edgelin.runtimes.canonical_json import digest
from edgelin.runtimes.manifest import Manifest, file_records


@pytest.fixture(scope="module")
def bundle(small_checkpoint: Path) -> Path:
    out = small_checkpoint.with_name("manifest_bundle")
    export_checkpoint(small_checkpoint, out, quantise=("int4",))
    return out


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def _sign(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest and make its digest and the hashes of the common files right again."""
    content = json.loads((folder / "edgelin.json").read_text())
    change(content)
    records = file_records(folder, content["files"])
    content["files"] = {name: dataclasses.asdict(record) for name, record in records.items()}
    content["digest"] = digest(content)
    (folder / "edgelin.json").write_text(json.dumps(content))


def test_an_export_passes(bundle: Path, small_checkpoint: Path) -> None:
    check_contract(Manifest.read(bundle), bundle, small_checkpoint, small_checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["input"].update(vocab_size=301), "input is not that of"),
        (lambda c: c["states"][0].update(shape=["batch", 7, 3]), "states is not that of"),
        (lambda c: c["states"][1].update(shape=["batch", 2, 16, 10**12]), "states is not that of"),
        (lambda c: c["states"].pop(0), "states is not that of"),
        (lambda c: c["tokenizer"].update(eos_token_id=7), "tokenizer is not that of"),
        (lambda c: c.update(opset=27), "opset is not that of"),
        (lambda c: c.update(max_time=10**9), "max_time is not that of"),
    ],
)
def test_another_contract_is_refused(
    copy: Path, small_checkpoint: Path, change: Any, message: str
) -> None:
    _sign(copy, change)
    with pytest.raises(EdgelinError, match=message) as error:
        verify(copy, small_checkpoint)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "config.json"])
def test_copied_files_are_the_checkpoints(copy: Path, small_checkpoint: Path, name: str) -> None:
    path = copy / name
    path.write_text(path.read_text() + "\n")
    _sign(copy, lambda content: None)
    with pytest.raises(EdgelinError, match=f"{name} is not that of {small_checkpoint}; export"):
        verify(copy, small_checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q["roles"].update(mlp="int8"), "has 4 bits, the manifest says int8;"),
        (lambda q: q["roles"].update(mixer="float"), "has 8 bits, the manifest says float;"),
        (lambda q: q.update(bits=8), "the fewest bits are 4, the manifest says otherwise"),
        (lambda q: q.update(accuracy_level=0), "accuracy_level is 4, the manifest says"),
    ],
)
def test_graphs_are_rounded_as_the_manifest_says(
    copy: Path, small_checkpoint: Path, change: Any, message: str
) -> None:
    _sign(copy, lambda c: change(c["variants"]["model_q4"]["quantisation"]))
    with pytest.raises(EdgelinError, match=message):
        verify(copy, small_checkpoint)


def test_a_graph_that_is_float_by_the_manifest_is_float(copy: Path, small_checkpoint: Path) -> None:
    _sign(copy, lambda c: c["variants"]["model_q4"].update(quantisation=None))
    with pytest.raises(EdgelinError, match=r"weight has 8 bits, the manifest says float;"):
        verify(copy, small_checkpoint)


def test_weights_behind_a_link_are_refused_in_one_line(copy: Path, tmp_path: Path) -> None:
    data = copy / "onnx" / "model_q4.onnx_data"
    os.replace(data, tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EdgelinError, match=r"onnx_data is a link to another folder, which onnx"):
        verify(copy)
