"""Training time of one layer against sequence length on a GPU: linear mixers and softmax attention.

Forward and backward of a mixer with its projections, 32,768 tokens a step in bfloat16, width 1,024
and 8 heads of 128, compiled by ``torch.compile`` as ``edgelin train`` does it. Softmax is PyTorch's
scaled_dot_product_attention (causal, its fastest backend) between the same projections. Prints a
table and writes ``OUT.json``.

    python benchmarks/crossover/training.py --out training
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin import mixers
from edgelin.files import replacing

TOKENS, HIDDEN, HEADS = 32768, 1024, 8
LENGTHS = (512, 1024, 2048, 4096, 8192, 32768)
SIZES = {"num_heads": HEADS, "key_dim": HIDDEN // HEADS, "value_dim": HIDDEN // HEADS}
MIXERS = {
    "linear attention": {"type": "linear_attention", **SIZES},
    "retention": {"type": "retention", **SIZES},
    "gla": {"type": "gla", **SIZES},
    "gated delta": {"type": "gated_deltanet", **SIZES},
}


class Softmax(nn.Module):
    """Causal softmax attention over the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def state_specs(self) -> list[Any]:
        """None: training starts from nothing."""
        return []

    def forward(self, x: Tensor, state: Any, position: Tensor) -> tuple[Tensor, Any]:
        """Mix ``[B, T, HIDDEN]``."""
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(o.transpose(1, 2).flatten(-2)), state


def milliseconds(mixer: nn.Module, length: int) -> float:
    """Median of 10 steps, by the GPU's clock."""
    x = torch.randn(TOKENS // length, length, HIDDEN, device="cuda", requires_grad=True)
    state = {s.name: torch.zeros(len(x), *s.sized(), device="cuda") for s in mixer.state_specs()}
    position = torch.zeros(len(x), dtype=torch.int64, device="cuda")
    torch._dynamo.reset()  # else every length counts as one more variant of the same code
    compiled = torch.compile(mixer, dynamic=False)
    times = []
    for step in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with torch.autocast("cuda", torch.bfloat16):
            y, _ = compiled(x, state, position)
        y.float().sum().backward()
        end.record()
        torch.cuda.synchronize()
        if step >= 3:  # kernels are compiled and caches warm
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("training"), help="name of the file")
    options = parser.parse_args()
    layers: dict[str, nn.Module] = {
        name: mixers.build(table, HIDDEN, 0, 1e-6, where="model.mixers.m")
        for name, table in MIXERS.items()
    }
    layers["softmax"] = Softmax()
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "tokens": TOKENS,
        "milliseconds": {},
    }
    print("T".rjust(18), *(f"{length:>8}" for length in LENGTHS))
    for name, layer in layers.items():
        times = [milliseconds(layer.cuda(), length) for length in LENGTHS]
        found["milliseconds"][name] = dict(zip(LENGTHS, times, strict=True))
        print(f"{name:>18}", *(f"{time:8.2f}" for time in times), flush=True)
    with replacing(options.out.with_suffix(".json")) as part:
        part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
