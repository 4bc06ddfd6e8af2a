"""LFM2 with experts (``lfm2_moe``: 8B-A1B, 24B-A2B): LFM2, with experts behind most operators.

As LFM2 (:mod:`edgelin.families.lfm2`), but the first ``num_dense_layers`` alone have an MLP, of the
width that the config says. The router takes sigmoids, and a bias that counts in the choice only.
``routed_scaling_factor``, on what the experts add, is folded into their weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from edgelin.families.common import experts, scaled, sparse_layers
from edgelin.families.lfm2 import mlp, operators, weights
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("lfm2_moe",)


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    layers, tables = operators(fields)
    dense, count = fields.take("num_dense_layers", 2), fields.take("num_experts")
    moe = {
        "type": "moe",
        "num_experts": count,
        "experts_per_token": fields.take("num_experts_per_tok"),
        "intermediate_size": fields.take("moe_intermediate_size"),
        "router": "sigmoid",
        "norm_topk_prob": fields.take("norm_topk_prob", True),
        "expert_bias": fields.take("use_expert_bias", True),
    }
    sparse = [i >= dense for i in range(len(layers))]
    width, mlps, branches = sparse_layers(sparse, moe, fields.take("intermediate_size"))
    config = ModelConfig(
        hidden_size=fields.take("hidden_size"),
        intermediate_size=width,
        layers=layers,
        mixers={**tables, **branches},
        mlps=mlps,
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.first("tie_embedding", "tie_word_embeddings", default=True),
        rms_norm_eps=fields.take("norm_eps", 1e-5),
    )
    factor = fields.take("routed_scaling_factor", 1.0)

    def second(tensors: Tensors, layer: str, i: int) -> Iterator[tuple[str, Tensor]]:
        """Parameters of the experts of a layer, or of its MLP."""
        if not sparse[i]:
            yield from mlp(tensors, layer)
            return
        own = f"{layer}feed_forward."
        yield "router.weight", tensors(f"{own}gate.weight")
        if moe["expert_bias"]:
            yield "expert_bias", tensors(f"{own}expert_bias")
        for name, tensor in experts(tensors, f"{own}experts.", count, ("w1", "w3", "w2")):
            yield f"experts.{name}", scaled(tensor, factor) if name == "down_proj" else tensor

    return config, lambda tensors: weights(tensors, config, second)
