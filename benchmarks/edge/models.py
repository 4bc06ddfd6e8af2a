"""The models with random weights that are measured, and their bundles.

``gla`` and ``gated-delta`` have 24 layers, 1,024 wide, and 350M weights in matrices; ``small`` has
5M. ``gated-delta`` has the sizes of the GGUF file that llama.cpp runs (:mod:`llama`), and
``qwen3.5`` and ``mamba2`` are models that transformers runs, imported from its own checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from edgelin import checkpoint, tokenizer
from edgelin.config import ModelConfig
from edgelin.export.bundle import export_checkpoint
from edgelin.files import staging
from edgelin.model import SequenceModel

# Names of variants, and which ones the bundle of a model holds.
FLOAT, INT8, INT4, FAST = "model", "model_q8", "model_q4", "model_q4_fast"
_QUANTISE = {FLOAT: "none", INT8: "int8", INT4: "int4", FAST: "int4-fast"}
VARIANTS = {
    "gla": (FLOAT, FAST),
    "gated-delta": (INT8, INT4, FAST),
    "small": (FAST,),
    "mamba2": (FAST,),
    "qwen3.5": (FAST,),
}
LARGE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "layers": ("mix",) * 24,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "gla": ModelConfig(
        **LARGE, mixers={"mix": {"type": "gla", "num_heads": 4, "key_dim": 128, "value_dim": 256}}
    ),
    "gated-delta": ModelConfig(
        **LARGE,
        mixers={
            "mix": {
                "type": "gated_deltanet",
                "num_heads": 8,
                "num_key_heads": 4,
                "key_dim": 128,
                "value_dim": 128,
            }
        },
    ),
    "small": ModelConfig(
        vocab_size=264,
        hidden_size=256,
        intermediate_size=704,
        layers=("mix",) * 6,
        mixers={"mix": {"type": "gla", "num_heads": 4, "key_dim": 32, "value_dim": 64}},
    ),
}
# What transformers makes of these runs its own PyTorch code: there are no kernels for a CPU.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "Mamba2",
        {
            "vocab_size": 32_000,
            "hidden_size": 1024,
            "num_hidden_layers": 48,
            "num_heads": 32,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5": (
        "Qwen3_5Text",
        {
            "vocab_size": 32_000,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
}


class Store:
    """Checkpoints and bundles in a folder, made on first use.

    Args:
        folder: Where they are kept; nothing in it is ever made again, so remove it after a change
            of the exporter.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def bundle(self, name: str) -> Path:
        """The bundle of a model with all its variants."""
        out = self.folder / f"{name}-bundle"
        if not out.is_dir():
            variants = tuple(_QUANTISE[variant] for variant in VARIANTS[name])
            export_checkpoint(self.checkpoint(name), out, quantise=variants)
        return out

    def graph(self, name: str, variant: str) -> Path:
        """The graph file of a variant."""
        return self.bundle(name) / "onnx" / f"{variant}.onnx"

    def checkpoint(self, name: str) -> Path:
        """The folder that the bundles of a model are made from."""
        out = self.folder / name
        if out.is_dir():
            return out
        torch.manual_seed(0)
        with staging(out) as part:
            if name in PUBLISHED:
                published(name).save_pretrained(part)
            else:
                checkpoint.save(part, SequenceModel(CONFIGS[name]), None)
            (part / "tokenizer.json").write_text(_words(), encoding="utf-8")
            part.rename(out)
        return out


def published(name: str) -> Any:
    """A model of transformers with random weights, in evaluation mode."""
    import transformers

    kind, sizes = PUBLISHED[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    cls = "Qwen3_5ForCausalLM" if kind == "Qwen3_5Text" else f"{kind}ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, cls)(config).eval()
    with torch.no_grad():  # without training, so many layers of full weight are chaotic
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("out_proj.weight", "down_proj.weight")):
                parameter.div_((2 * config.num_hidden_layers) ** 0.5)
    return model


def _words() -> str:
    """A small tokenizer: what is measured reads ids."""
    return tokenizer.train(["a few words, and a few words more\n" * 20], 264).to_str()
