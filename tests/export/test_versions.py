"""One graph on old and new versions of onnxruntime: the versions that the profiles promise.

Each version lies in a folder of its own under ``build/onnxruntime`` (pip fills it once) and runs in
a process of its own. All have to give the numbers of the float64 model, and the same ones as the
installed version, as far as float kernels go.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import export_models
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from edgelin.export import golden, passes
from edgelin.export.profiles import PROFILES
from edgelin.export.quantise.nodes import quantise
from edgelin.export.quantise.recipe import RECIPES
from edgelin.export.reference import reference
from edgelin.export.trace import trace

pytestmark = pytest.mark.full

FOLDER = Path(__file__).parents[2] / "build" / "onnxruntime"
NEWEST = onnxruntime.__version__
LAYERS = ("gdn", "linear", "gla", "ssm", "attention")
# Profile and rounding -> versions. GatherBlockQuantized with 8 bits came with 1.23, MatMulNBits
# with 8 bits with 1.22: "rows" keeps the embedding float, as --role embedding=float does.
VERSIONS = {
    ("fused", "none"): ["1.25.1", NEWEST],
    ("fused", "int8"): ["1.25.1", NEWEST],
    ("fused", "int4"): ["1.25.1", NEWEST],
    ("plain", "none"): ["1.20.1", "1.22.1", "1.23.2", "1.25.1", NEWEST],
    ("plain", "int8 rows"): ["1.22.1", NEWEST],
    ("plain", "int4 rows"): ["1.20.1", "1.22.1", NEWEST],
    ("plain", "int8"): ["1.23.2", NEWEST],
    ("plain", "int4"): ["1.23.2", NEWEST],
    ("onnx", "none"): [NEWEST],
    ("onnx", "int8"): [NEWEST],
    ("onnx", "int4"): [NEWEST],
}
CELLS = [(*key, version) for key, versions in VERSIONS.items() for version in versions]
RUNNER = """
import json, sys
import numpy, onnxruntime
graph, given, out, version = sys.argv[1:]
assert onnxruntime.__version__ == version, onnxruntime.__version__
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.log_severity_level = 4
session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
given = dict(numpy.load(given))
names = json.loads(str(given.pop("names")))
states = {name: given[name] for name, _ in names}
found = []
for piece in json.loads(str(given["pieces"])):
    feeds = {"input_ids": numpy.array([piece]), "num_logits_to_keep": numpy.array(0), **states}
    logits, *after = session.run(["logits", *(output for _, output in names)], feeds)
    found.append(logits[0])
    states = {name: array for (name, _), array in zip(names, after)}
numpy.savez(out, logits=numpy.concatenate(found), **states)
"""


@dataclass
class Built:
    """A graph's file and what it should answer."""

    path: Path
    exact: golden.Stream
    noise: golden.Errors | None


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the graph of a profile and rounding, once each, all from one trace."""
    model = export_models.make_model(LAYERS)
    traced, folder = trace(model), tmp_path_factory.mktemp("versions")
    exact = reference(model)
    graphs: dict[tuple[str, str], Built] = {}

    def get(profile: str, rounding: str) -> Built:
        if (profile, rounding) in graphs:
            return graphs[profile, rounding]
        graph, width = traced.clone(), rounding.split()[0]
        passes.lower(graph, PROFILES[profile])
        wanted, noise = exact, None
        if (recipe := RECIPES[width]) is not None:
            rows = ["embedding=float", "head=float", f"mixer={width}"]
            roles = rows if "rows" in rounding else []
            outcome = quantise(graph, recipe.for_model(model.config, roles))
            wanted = reference(model, outcome.rounded)
            noisy = reference(model, outcome.rounded, rounded_activations=True)
            noise = golden.compare(wanted, noisy)
        passes.finish(graph, PROFILES[profile])
        path = folder / f"{profile}-{rounding.replace(' ', '-')}.onnx"
        path.write_bytes(ir.serde.serialize_model(graph).SerializeToString())
        graphs[profile, rounding] = Built(path, wanted, noise)
        return graphs[profile, rounding]

    get.specs = model.state_specs()  # type: ignore[attr-defined]
    return get


def installed(version: str) -> dict[str, str]:
    """The environment in which a version is imported; pip brings it if it is not there."""
    environment = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
    if version == NEWEST:
        return environment
    folder = FOLDER / f"{version}-{sys.version_info.major}.{sys.version_info.minor}"
    if not (folder / "onnxruntime").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*command, str(folder), f"onnxruntime=={version}"], check=True)
    return {**environment, "PYTHONPATH": str(folder)}


def run(built: Any, profile: str, rounding: str, version: str, folder: Path) -> golden.Stream:
    """The golden stream on a version."""
    found: Built = built(profile, rounding)
    names = [(spec.input_name, spec.output_name) for spec in built.specs]
    pieces = np.split(found.exact.inputs, np.cumsum(golden.PIECES)[:-1])
    given: dict[str, Any] = {s.input_name: np.zeros((1, *s.sized()), s.dtype) for s in built.specs}
    given["pieces"] = json.dumps([piece.tolist() for piece in pieces])
    np.savez(folder / "given.npz", names=json.dumps(names), **given)
    arguments = [found.path, folder / "given.npz", folder / "out.npz", version]
    command = [sys.executable, "-c", RUNNER, *map(str, arguments)]
    done = subprocess.run(command, env=installed(version), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(folder / "out.npz") as out:
        states = {spec.name: out[spec.input_name][0] for spec in built.specs}
        logits = out["logits"].astype(np.float64)
    return golden.Stream(found.exact.inputs, logits, states, True)


@pytest.mark.parametrize(("profile", "rounding", "version"), CELLS)
def test_numbers(built: Any, tmp_path: Path, profile: str, rounding: str, version: str) -> None:
    got = run(built, profile, rounding, version, tmp_path)
    found: Built = built(profile, rounding)
    errors, room = golden.compare(found.exact, got), 1e-4
    if found.noise is not None:
        room += 2 * max(found.noise.outputs, found.noise.states or 0)
    assert errors.finite and errors.outputs < room and (errors.states or 0) < room
    newest = run(built, profile, rounding, NEWEST, tmp_path)
    apart = golden.compare(newest, got)
    # Kernels that round activations to 8 bits are others from version to version.
    limit = room if found.noise is not None else 1e-5
    assert apart.outputs < limit and (apart.states or 0) < limit


def test_the_promised_versions_are_those_tested() -> None:
    """The oldest of the table is what the manifests say, patch releases aside."""
    for (profile, rounding), versions in VERSIONS.items():
        if "rows" in rounding:
            continue
        promised = PROFILES[profile].min_onnxruntime(quantised=rounding != "none")
        assert versions[0].split(".")[:2] == promised.split(".")[:2]
