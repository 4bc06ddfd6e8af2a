"""Models, sessions and states that the export tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from edgelin.config import FeatureConfig, ModelConfig
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
    "full": {
        "type": "attention",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "window": 0,
        "qk_norm": True,
        "gate": True,
        "bias": True,
    },
}
PAST = 70  # tokens in a state that grows


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


def make_feature_model(
    layers: tuple[str, ...], *, size: int = 5, head: str = "step", task: str = "classification"
) -> SequenceModel:
    """The same of features, of which one never changes, with three outputs."""
    torch.manual_seed(0)
    config = ModelConfig(
        hidden_size=32,
        intermediate_size=48,
        layers=layers,
        mixers={name: MIXERS[name] for name in layers},
        features=FeatureConfig(size, 3, head, task),
    )
    model = SequenceModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "proj" in name:
                parameter.mul_(3)
        model.head.weight.mul_(50)
        mean, scale = model.get_buffer("embedding.mean"), model.get_buffer("embedding.scale")
        mean.copy_(10 * torch.randn(size))
        scale.copy_(torch.rand(size) + 0.1)
        scale[-1] = 0 if size > 1 else 1
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
        spec.name: (0.5 * random.standard_normal((batch, *spec.sized(PAST)))).astype(np.float32)
        if spec.dtype == "float32"
        else random.integers(100, 1000, (batch, *spec.sized(PAST)))
        for spec in model.state_specs()
    }
