"""Log decays of gates that are all but shut: log sigmoid(-200) / 16 is -12.5, not log of 0.

A gate computed as log(sigmoid(x)) is -inf there in float32, and the clamp of log decays makes that
-90: no NaN, but what should be left of a large state is gone.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from loops import gla
from onnx_ir import serde

from edgelin.config import ModelConfig
from edgelin.export import passes, trace
from edgelin.export.profiles import PROFILES
from edgelin.model import SequenceModel

LOGITS = (-200.0, -120.0, -90.0, 0.0, 90.0, 200.0)
LARGE = 1e5


@pytest.fixture(scope="module")
def model() -> SequenceModel:
    """One layer of gated linear attention whose decays are those of ``LOGITS``, a key each."""
    torch.manual_seed(0)
    table = {"type": "gla", "num_heads": 1, "key_dim": len(LOGITS), "value_dim": 4}
    config = ModelConfig(
        vocab_size=50, hidden_size=16, intermediate_size=0, layers=("m",), mixers={"m": table}
    )
    made = SequenceModel(config).eval().requires_grad_(False)
    mixer = made.blocks[0].mixer
    mixer.decay_out_proj.weight.zero_()
    mixer.decay_out_proj.bias.copy_(torch.tensor(LOGITS))
    return made


def _wanted(model: SequenceModel, ids: np.ndarray) -> np.ndarray:
    """The state after some tokens, of a loop in float64."""
    block = model.blocks[0]
    x = block.mixer_norm(model.embedding(torch.from_numpy(ids))).double().numpy()
    shape = (len(ids), 1, len(LOGITS), 4)
    state = {"recurrent.3": np.full(shape, LARGE)}
    found: np.ndarray = gla.loop(block.mixer, x, state, np.zeros(len(ids)))[1]["recurrent.3"]
    return found


def _check(got: np.ndarray, wanted: np.ndarray) -> None:
    """Every key on its own scale."""
    error = np.abs(got - wanted).max((0, 1, 3)) / np.abs(wanted).max((0, 1, 3))
    assert error.max() < 1e-3, dict(zip(LOGITS, error.tolist(), strict=True))


@pytest.mark.parametrize("time", [1, 2])
def test_torch(model: SequenceModel, time: int) -> None:
    ids = np.arange(3 * time).reshape(3, time)
    state = {name: torch.full_like(s, LARGE) for name, s in model.initial_state(3).items()}
    found = model(torch.from_numpy(ids), state)[1]
    _check(next(iter(found.values())).numpy(), _wanted(model, ids))


@pytest.mark.parametrize("profile", ["fused", "plain"])
def test_graphs(model: SequenceModel, profile: str) -> None:
    graph = trace.trace(model)
    passes.lower(graph, PROFILES[profile])
    passes.finish(graph, PROFILES[profile])
    session = onnxruntime.InferenceSession(
        serde.serialize_model(graph).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    ids = np.arange(6).reshape(3, 2)
    (spec,) = model.state_specs()
    past = np.full((3, *spec.sized()), LARGE, np.float32)
    feeds = {"input_ids": ids, spec.input_name: past}
    (found,) = session.run([spec.output_name], feeds)
    _check(found, _wanted(model, ids))
