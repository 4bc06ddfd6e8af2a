"""The exported ONNX graphs against the golden vectors, which Triton kernels wrote on a GPU.

This is how a machine without a GPU sees that kernels and device graphs are one model, over 2,048
tokens of real text. Limits are of max|x - y| / max|y|, per position of the logits and per state.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import edgelin
from edgelin.export.bundle import export_checkpoint
from edgelin.runtimes.distribution import divergence

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
CHECKPOINT = ROOT / "examples" / "demo" / "checkpoint"
REMAKE = (
    "make the golden vectors again, on a machine with a CUDA GPU: "
    "python tests/gpu/golden.py examples/demo/checkpoint --out tests/golden"
)

FLOAT32 = 1e-3  # float32 kernels on a GPU beside float32 graphs on a CPU
BF16 = 3e-2  # 8 bits of mantissa, through all layers
QUANTISED = {  # least top-1 agreement with the GPU, most mean KL (nat) from the float graph
    "model_q8": (0.98, 0.01),
    "model_q4": (0.92, 0.06),
}


@cache
def _script() -> ModuleType:
    """The module that makes the vectors, for its choice of positions, samples and files."""
    spec = importlib.util.spec_from_file_location("golden", ROOT / "tests" / "gpu" / "golden.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _made() -> dict[str, Any]:
    path = GOLDEN / "golden.json"
    assert path.is_file(), f"{path} is missing; {REMAKE}"
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    path = GOLDEN / "golden.npz"
    assert path.is_file(), f"{path} is missing; {REMAKE}"
    with np.load(path) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in all three variants."""
    out = tmp_path_factory.mktemp("golden") / "bundle"
    export_checkpoint(CHECKPOINT, out, quantise=("none", "int8", "int4"))
    return out


class Replay:
    """What a variant says about the golden text: logits [T, vocab] and the states at its end."""

    def __init__(self, bundle: Path, variant: str, ids: np.ndarray) -> None:
        stream = edgelin.load(bundle, variant=variant).stream()
        # Steps over the first chunk borders and at the end, chunks between them.
        first, last = 192, len(ids) - 64
        pieces = [stream.feed([token], all_logits=True) for token in ids[:first]]
        pieces.append(stream.feed(ids[first:last], all_logits=True))
        pieces += [stream.feed([token], all_logits=True) for token in ids[last:]]
        self.logits = np.concatenate(pieces)
        self.states = stream.states()


@pytest.fixture(scope="module")
def float_replay(bundle: Path, golden: dict[str, np.ndarray]) -> Replay:
    return Replay(bundle, "model", golden["ids"])


def _errors(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """max|x - y| / max|y| along the last axis."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    return np.abs(x - y).max(-1) / np.abs(y).max(-1)


@pytest.mark.parametrize("what", ["kernels", "checkpoint"])
def test_vectors_belong_to_these_files(what: str) -> None:
    folder = {"kernels": ROOT, "checkpoint": CHECKPOINT}[what]
    if what == "kernels":
        names = _script().kernel_files(_made()["kernel_calls"])
    else:
        names = _script().checkpoint_files(CHECKPOINT)
    assert _script().hashes(folder, names) == _made()[what], f"{what} changed; {REMAKE}"


def test_text_and_tokens_belong_together(golden: dict[str, np.ndarray]) -> None:
    text = GOLDEN / "text.txt"
    assert hashlib.sha256(text.read_bytes()).hexdigest() == _made()["text"], REMAKE
    assert _script().read_ids(CHECKPOINT, text).tolist() == golden["ids"].tolist()
    assert len(golden["ids"]) == 2048


def test_kernels_ran_on_a_gpu() -> None:
    made = _made()
    assert made["gpu"] and made["triton"]
    assert made["kernel_calls"] and all(made["kernel_calls"].values())


def test_float_logits(golden: dict[str, np.ndarray], float_replay: Replay) -> None:
    errors = _errors(float_replay.logits[golden["positions"]], golden["logits"])
    assert dict(zip(golden["positions"].tolist(), errors > FLOAT32, strict=True)) == {
        position: False for position in golden["positions"].tolist()
    }, errors


def test_float_states(golden: dict[str, np.ndarray], float_replay: Replay) -> None:
    values = sum(array.size for array in float_replay.states.values())
    for name, array in float_replay.states.items():
        kept = array.reshape(-1)[_script().sample(array.size, values)]
        assert _errors(kept, golden[f"state/{name}"]) <= FLOAT32, name


def test_float_most_probable_tokens(golden: dict[str, np.ndarray], float_replay: Replay) -> None:
    """Other than at near ties, the same token at all 2,048 positions."""
    top1 = float_replay.logits.argmax(-1)
    differ = np.flatnonzero(top1 != golden["top1"])
    rows = float_replay.logits[differ]
    gaps = rows.max(-1) - np.take_along_axis(rows, golden["top1"][differ, None], -1)[:, 0]
    assert (gaps <= FLOAT32 * np.abs(rows).max(-1)).all()


def test_bf16_logits(golden: dict[str, np.ndarray], float_replay: Replay) -> None:
    errors = _errors(golden["logits_bf16"], float_replay.logits[golden["positions"]])
    assert errors.max() <= BF16, dict(zip(golden["positions"].tolist(), errors, strict=True))


@pytest.mark.parametrize("variant", QUANTISED)
def test_quantised_variants(
    variant: str, bundle: Path, golden: dict[str, np.ndarray], float_replay: Replay
) -> None:
    least_top1, most_kl = QUANTISED[variant]
    logits = Replay(bundle, variant, golden["ids"]).logits
    kl = divergence(float_replay.logits, logits).mean()
    top1 = (logits.argmax(-1) == golden["top1"]).mean()
    assert top1 >= least_top1, f"top-1 {top1:.4f}, KL {kl:.4f}"
    assert kl <= most_kl, f"top-1 {top1:.4f}, KL {kl:.4f}"
