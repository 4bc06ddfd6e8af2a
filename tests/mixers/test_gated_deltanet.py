"""Options of the mixer ``gated_deltanet``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from export_models import session

from edgelin import mixers
from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.export import passes
from edgelin.export.profiles import PROFILES
from edgelin.export.trace import trace
from edgelin.model import SequenceModel

SIZES = {"type": "gated_deltanet", "num_heads": 4, "key_dim": 6, "value_dim": 10}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_key_heads": 3}, "num_heads is 4, no multiple of num_key_heads = 3; give a multiple"),
        ({"num_key_heads": 0}, "num_key_heads is 0; give at least 1"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0; it must be above 0 and below 1"),
    ],
)
def test_wrong_sizes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        mixers.build({**SIZES, **change}, 20, 0, 1e-6, where="model.mixers.m")


def test_grouped_keys_have_fewer_parameters_and_a_narrower_convolution() -> None:
    mixer: Any = mixers.build({**SIZES, "num_key_heads": 2}, 20, 0, 1e-6, where="model.mixers.m")
    assert mixer.conv_weight.shape == (2 * 2 * 6 + 4 * 10, 4)
    assert [spec.shape for spec in mixer.state_specs()] == [(64, 3), (4, 6, 10)]


@pytest.mark.parametrize("profile, repeats", [("fused", 0), ("onnx", 2), ("plain", 2)])
def test_only_the_standard_operators_need_keys_repeated(profile: str, repeats: int) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=50,
        hidden_size=20,
        intermediate_size=8,
        layers=("m",),
        mixers={"m": {**SIZES, "num_key_heads": 2, "allow_neg_eigval": True}},
    )
    model = SequenceModel(config).eval().requires_grad_(False)
    model.embedding.weight.normal_()
    graph = trace(model)
    passes.lower(graph, PROFILES[profile])
    passes.finish(graph, PROFILES[profile])
    gathers = [n for n in graph.graph if n.op_type == "Gather" and n.inputs[1].shape == (4,)]
    assert len(gathers) == repeats
    ids = torch.randint(0, 50, (2, 40))
    state = {s.input_name: np.zeros((2, *s.shape), np.float32) for s in model.state_specs()}
    feeds = {"input_ids": ids.numpy(), "num_logits_to_keep": np.array(0), **state}
    logits = session(graph).run(None, feeds)[0]
    np.testing.assert_allclose(logits, model(ids)[0], atol=1e-5)
