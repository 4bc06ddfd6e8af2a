"""RWKV-4 (``rwkv``): transformers' layout, and the authors' ``.pth`` files.

``rescale_every`` changes no number but by rounding: for float16, transformers halves the stream
after every so many layers, and divides what the layers add to it. It does so in place, so that a
model that it saves after use has the divided weights in its file, which nothing there tells: take
the published file.
"""

from __future__ import annotations

from typing import Any

from edgelin.families import rwkv_common as rwkv
from edgelin.families.reading import Fields, Tensors
from edgelin.model_config import ModelConfig

MODEL_TYPES = ("rwkv",)
_EPS = 1e-5
_SHORT = {"key": "k", "value": "v", "receptance": "r"}  # in names of the authors' shares


def describe(tensors: Tensors) -> dict[str, Any] | None:
    """The config of a ``.pth`` file of RWKV-4; None: it is of something else."""
    own = "blocks.0.att."
    later = tensors.has(f"{own}ln_x.weight")  # RWKV-5 has a norm of heads
    if later or not (tensors.has("emb.weight") and tensors.has(f"{own}time_first")):
        return None
    found = rwkv.describe(tensors)
    names = "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"
    width = tensors(f"{own}key.weight").shape[0]
    sizes = {name: found[name] for name in names}
    return {**sizes, "model_type": "rwkv", "attention_hidden_size": width}


def read(fields: Fields) -> tuple[ModelConfig, object]:
    """Sizes, and the function that yields our parameters."""
    hidden, count = fields.take("hidden_size"), fields.take("num_hidden_layers")
    fields.ignore("context_length", "rescale_every")
    fields.expect("layer_norm_epsilon", _EPS)  # transformers' last norm has this one in any case
    mixers = {
        "rwkv4": {"type": "rwkv4", "inner_size": fields.take("attention_hidden_size", hidden)},
        "ffn": {
            "type": "channel_mix",
            "intermediate_size": fields.take("intermediate_size", 4 * hidden),
            "receptance": True,
        },
    }
    config = ModelConfig(
        hidden_size=hidden,
        intermediate_size=0,
        layers=("rwkv4",) * count,
        mixers=mixers,
        mlps=("ffn",) * count,
        norm="layer",
        embedding_norm=True,
        vocab_size=fields.take("vocab_size"),
        tie_word_embeddings=fields.take("tie_word_embeddings", False),
        rms_norm_eps=_EPS,
    )
    return config, lambda tensors: rwkv.weights(tensors, config, _mixer, _channel_mix, bias=True)


def _mixer(tensors: Tensors, prefix: str, layer: int) -> rwkv.Parameters:
    """Parameters of a time mixing."""
    yield from _shares(tensors, prefix, "key", "value", "receptance")
    names = {"decay": "time_decay", "bonus": "time_first", "out_proj.weight": "output.weight"}
    names |= {f"{short}_proj.weight": f"{name}.weight" for name, short in _SHORT.items()}
    yield from rwkv.renamed(tensors, prefix, names)


def _channel_mix(tensors: Tensors, prefix: str) -> rwkv.Parameters:
    """Parameters of a channel mixing."""
    yield from _shares(tensors, prefix, "key", "receptance")
    names = {"up_proj": "key", "down_proj": "value", "gate_proj": "receptance"}
    weights = {f"{ours}.weight": f"{name}.weight" for ours, name in names.items()}
    yield from rwkv.renamed(tensors, prefix, weights)


def _shares(tensors: Tensors, prefix: str, *names: str) -> rwkv.Parameters:
    """Shares of the token before; the files have those of the token itself."""
    if rwkv.is_original(tensors):
        names = tuple(_SHORT[name] for name in names)
    yield "mix", 1 - rwkv.rows(tensors, prefix, *(f"time_mix_{name}" for name in names)).float()
