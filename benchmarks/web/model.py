"""Export the model of 7 million weights, random ones, that ``make bench-web`` decodes with.

python benchmarks/web/model.py build/bench-web
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from edgelin import checkpoint, tokenizer
from edgelin.config import ModelConfig
from edgelin.export.bundle import export_checkpoint
from edgelin.model import SequenceModel

_MIXER = {"type": "gated_deltanet", "num_heads": 4, "key_dim": 64, "value_dim": 64}
_CONFIG = ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    layers=("gated_deltanet",) * 6,
    mixers={"gated_deltanet": _MIXER},
    tie_word_embeddings=False,
)


def main() -> None:
    """Write the bundle, unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    if out.exists():
        return
    torch.manual_seed(0)
    model = SequenceModel(_CONFIG).eval()
    words = tokenizer.train(["a small text of a few words " * 30], 300)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "checkpoint"
        checkpoint.save(source, model, words.to_str())
        export_checkpoint(source, out, quantise=("none", "int4", "portable"))
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{weights:,} weights in {out}")


if __name__ == "__main__":
    main()
