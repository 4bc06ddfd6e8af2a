"""What is wrong with a bundle, an option or a state file ends every runner's command line with one
line and a code that is not 0. Files have right sizes and hashes, so that only their content is odd.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from other_runners import GOLDEN, TEXT_ONLY, built, run
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from edgelin.runtimes.canonical_json import canonical_json

FUSED = GOLDEN / "fused" / "bundle"
GRAPH, STATE = "onnx/model.onnx", GOLDEN / "fused" / "model.state"

Change = Callable[[dict[str, Any]], object]


def _bundle(folder: Path, change: Change, **files: bytes) -> Path:
    """A copy of the golden bundle with other files, a changed manifest and its digest."""
    shutil.copytree(FUSED, folder)
    path = folder / "edgelin.json"
    manifest = json.loads(path.read_bytes())
    for key, content in files.items():
        name = {"graph": GRAPH, "golden": "golden.json", "tokenizer": "tokenizer.json"}[key]
        (folder / name).write_bytes(content)
        records = manifest["files"] if name in manifest["files"] else None
        records = manifest["variants"]["model"]["files"] if records is None else records
        records[name] = {"sha256": sha256(content).hexdigest(), "bytes": len(content)}
    change(manifest)
    del manifest["digest"]
    manifest["digest"] = sha256(canonical_json(manifest).encode()).hexdigest()
    path.write_text(json.dumps(manifest))
    return folder


def _refused(name: str, bundle: Path, *options: str) -> str:
    """The one line that a runner says to a bundle and options that it must refuse."""
    chosen = [] if "--variant" in options else ["--variant", "model"]
    rest = ["--max-tokens", "2", "--temperature", "0", *chosen]
    begin = [] if "--load-state" in options else ["--load-state", str(STATE)]
    done = run([*built()[name](bundle), *rest, *begin, *options])
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1 and len(lines) == 1, f"{name}: {done.returncode} {done.stderr}"
    return lines[0]


BUNDLES: dict[str, tuple[Change, dict[str, bytes]]] = {
    "no states": (lambda m: m.pop("states"), {}),
    "a state fewer": (lambda m: m["states"].pop(), {}),
    "another shape": (lambda m: m["states"][0]["shape"].append(2), {}),
    "no input": (lambda m: m.update(input=None), {}),
    "variants as a list": (lambda m: m.update(variants=[]), {}),
    "a graph without record": (lambda m: m["variants"]["model"]["files"].clear(), {}),
    "a file outside": (lambda m: m["files"].update({"../x": m["files"]["golden.json"]}), {}),
    "another format": (lambda m: m.update(format=2), {}),
    "a newer onnxruntime": (lambda m: m.update(min_onnxruntime="9.0.0"), {}),
    "another export's graph": (
        lambda m: None,
        {"graph": (GOLDEN / "plain" / "bundle" / GRAPH).read_bytes()},
    ),
    "no graph": (lambda m: None, {"graph": b"no graph"}),
    "an empty golden stream": (lambda m: None, {"golden": b"{}"}),
    "half a golden stream": (lambda m: None, {"golden": b"[1"}),
}


@pytest.mark.parametrize("what", BUNDLES)
def test_odd_bundle(what: str, tmp_path: Path) -> None:
    change, files = BUNDLES[what]
    bundle = _bundle(tmp_path / "bundle", change, **files)
    for name in built():
        _refused(name, bundle)


def test_golden_stream_that_points_outside(tmp_path: Path) -> None:
    golden = json.loads((FUSED / "golden.json").read_bytes())
    golden["pieces"][0]["top"]["ids"][0] = 10**12
    bundle = _bundle(tmp_path / "one", lambda m: None, golden=json.dumps(golden).encode())
    golden = json.loads((FUSED / "golden.json").read_bytes())
    golden["states"]["recurrent.0"]["samples"][0][0] = 10**12
    other = _bundle(tmp_path / "two", lambda m: None, golden=json.dumps(golden).encode())
    for name in built():
        _refused(name, bundle)
        _refused(name, other)


def test_odd_tokenizer(tmp_path: Path) -> None:
    larger = json.loads((FUSED / "tokenizer.json").read_bytes())
    larger["model"]["vocab"]["zzz"] = 999
    for number, content in enumerate((b"{}", b"no json", json.dumps(larger).encode())):
        bundle = _bundle(tmp_path / str(number), lambda m: None, tokenizer=content)
        for name in built().keys() & set(TEXT_ONLY):
            _refused(name, bundle)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-tokens", "x"), ("--max-tokens", "1.5"), ("--temperature", "x"), ("--seed", "x"),
        ("--seed", "18446744073709551616"), ("--threads", "1.5"), ("--threads", "100000"),
        ("--variant", "zzz"),
    ],
)  # fmt: skip
def test_odd_option(option: str, value: str) -> None:
    for name in built():
        assert value in _refused(name, FUSED, option, value)


def test_unknown_option() -> None:
    for name in built():
        assert "--max-token" in _refused(name, FUSED, "--max-token", "3")


def test_state_that_cannot_be_written(tmp_path: Path) -> None:
    for name in built():
        for path in (tmp_path, tmp_path / "none" / "a.state"):
            assert "; give a file" in _refused(name, FUSED, "--save-state", str(path))
        assert list(tmp_path.iterdir()) == []


def test_odd_state_file(tmp_path: Path) -> None:
    """Metadata of another kind, with a right hash; single bytes are each runner's own test."""
    with safe_open(STATE, "numpy") as opened:
        metadata = opened.metadata()
    tensors = load_file(STATE)
    changes = [
        {"position": "0"}, {"position": "x"}, {"position": str(2**63)}, {"edgelin_state": "2"},
        {"recent": "[1]"}, {"recent": json.dumps([300] * 64)}, {"recent": '["a"]'},
        {"model_hash": "0" * 64},
    ]  # fmt: skip
    for number, change in enumerate(changes):
        changed = {**metadata, **change}
        del changed["sha256"]
        head = "".join(f"{key}\0{changed[key]}\0" for key in sorted(changed)).encode()
        parts = [tensors[key].tobytes() for key in sorted(tensors)]
        changed["sha256"] = sha256(b"".join([head, *parts])).hexdigest()
        path = tmp_path / f"{number}.state"
        save_file(tensors, path, changed)
        for name in built():
            _refused(name, FUSED, "--load-state", str(path))
    for name in built():
        _refused(name, FUSED, "--load-state", str(tmp_path / "none.state"))
        _refused(name, FUSED, "--load-state", str(tmp_path))
