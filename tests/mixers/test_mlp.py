"""What is special to the MLP as a mixer; the rest is in test_mixers.py."""

from __future__ import annotations

import pytest

from edgelin import mixers
from edgelin.config import ModelConfig
from edgelin.errors import EdgelinError
from edgelin.export.trace import trace
from edgelin.model import SequenceModel

MLP = {"type": "mlp", "intermediate_size": 9}


def test_an_unknown_activation_is_refused() -> None:
    table = {**MLP, "activation": "relu"}
    with pytest.raises(EdgelinError, match=r"activation is 'relu'; allowed: silu, gelu, .*relu2"):
        mixers.build(table, 20, 0, 1e-6, where="model.mixers.m")


def test_a_model_of_nothing_else_is_not_exported() -> None:
    config = ModelConfig(
        vocab_size=50, hidden_size=20, intermediate_size=0, layers=("m",), mixers={"m": MLP}
    )
    with pytest.raises(EdgelinError, match="no layer of the model has a state"):
        trace(SequenceModel(config).eval())
