"""Models, sessions and states that the export tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from edgelin.config import ModelConfig
from edgelin.model import SequenceModel

VOCAB = 300
MIXERS: dict[str, dict[str, Any]] = {
    "gdn": {"type": "gated_deltanet", "num_heads": 2, "key_dim": 16, "value_dim": 24},
    "linear": {"type": "linear_attention", "num_heads": 2, "key_dim": 16, "value_dim": 24},
    "gla": {"type": "gla", "num_heads": 2, "key_dim": 16, "value_dim": 24},
    "retention": {"type": "retention", "num_heads": 2, "key_dim": 16, "value_dim": 24},
    "ssm": {"type": "ssm", "inner_size": 40, "state_size": 4},
    "attention": {
        "type": "attention",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "window": 64,
    },
}


def make_model(layers: tuple[str, ...], *, tied: bool = True, seed: int = 0) -> SequenceModel:
    """A small model with weights large enough that every layer matters."""
    torch.manual_seed(seed)
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        layers=layers,
        mixers={name: MIXERS[name] for name in layers},
        tie_word_embeddings=tied,
    )
    model = SequenceModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def session(graph: ir.Model) -> onnxruntime.InferenceSession:
    """Load a graph from memory."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(
        ir.serde.serialize_model(graph).SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )


def random_state(
    model: SequenceModel, batch: int, seed: int = 1
) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """A non-zero state by name; ``position`` differs from row to row."""
    random = np.random.default_rng(seed)
    return {
        spec.name: (0.5 * random.standard_normal((batch, *spec.shape))).astype(np.float32)
        if spec.dtype == "float32"
        else random.integers(100, 1000, (batch, *spec.shape))
        for spec in model.state_specs()
    }
