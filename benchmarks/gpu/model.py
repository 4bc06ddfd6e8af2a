"""Tokens a second of a whole training step: 134M models, eager, as one CUDA graph, and compiled.

12 layers, 768 wide, 32,000 words, embeddings not tied; forward, backward and fused AdamW. Weights
are bfloat16, or float32 under autocast with ``--weights float32``, as ``edgelin train`` keeps them.
``gla``, ``scalar`` (a decay a head, else the same), ``mamba2`` and ``gated_deltanet`` are ours;
``softmax`` is the same model around PyTorch's attention with rotary position (cuDNN); ``fla-gla``
is fla's own model, where fla is installed.

    python benchmarks/gpu/model.py --out results.jsonl --seconds 400
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import peer
import results
import torch
from results import Job
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from edgelin.config import ModelConfig
from edgelin.layers import GatedRMSNorm, at_least_float32, project_aligned, project_in_parts
from edgelin.model import SequenceModel
from edgelin.recurrences.linear import linear
from edgelin.train.loss import cross_entropy

KEYS = ("model", "shape", "mode", "weights")
SHAPES = ("16x2048", "4x8192", "1x32768", "1x2048")
MODES = ("eager", "graph", "compiled")  # compiled: by torch.compile, then as one CUDA graph
HEADS = {"num_heads": 3, "key_dim": 128, "value_dim": 256}
MIXERS: dict[str, dict[str, Any]] = {
    "gla": {"type": "gla", **HEADS},
    "scalar": {"type": "gla", **HEADS},  # replaced by ScalarDecay
    "mamba2": {"type": "mamba2", "num_heads": 16, "head_dim": 64, "state_size": 128},
    "gated_deltanet": {"type": "gated_deltanet", **HEADS, "num_heads": 4},
    "softmax": {"type": "gla", **HEADS},  # replaced by Softmax
}
FLA = "fla-gla"
MODELS = (*MIXERS, FLA)


class ScalarDecay(nn.Module):
    """Gated linear attention with a decay a head: o_t = S_t^T q_t, S_t = e^{g_t} S_{t-1} + k v^T.

    Args:
        hidden_size: Width of the stream.
        heads: H.
        key: K.
        value: V.
    """

    def __init__(self, hidden_size: int, heads: int, key: int, value: int) -> None:
        super().__init__()
        self.heads, self.key, self.value = heads, key, value
        self.sizes = [heads * key, heads * key, heads * value, heads * value]
        self.qkv_gate_proj = nn.Linear(hidden_size, sum(self.sizes), bias=False)
        self.decay_proj = nn.Linear(hidden_size, heads)
        self.norm = GatedRMSNorm(value, 1e-6)
        self.out_proj = nn.Linear(heads * value, hidden_size, bias=False)

    def state_specs(self) -> list[Any]:
        """None: training starts from nothing."""
        return []

    def forward(self, x: Tensor, state: Any, position: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix ``[B, T, hidden_size]``."""
        parts = project_in_parts(self.qkv_gate_proj, x, self.sizes)
        q, k, v, gate = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        g = F.softplus(-at_least_float32(project_aligned(self.decay_proj, x))) / -16
        start = torch.zeros(len(x), self.heads, self.key, self.value, device=x.device)
        o, _ = linear(q, k, v, g, start, scale=self.key**-0.5)
        return self.out_proj(self.norm(o, gate).flatten(-2)), {}


class Softmax(nn.Module):
    """Causal softmax attention with rotary position (Su et al. 2021, arXiv:2104.09864, eq. 34).

    Args:
        hidden_size: Width of the stream.
        heads: H.
        longest: Tokens that positions are made for.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, hidden_size: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        half = hidden_size // heads // 2
        frequencies = 10000.0 ** -(torch.arange(half) / half)
        angles = torch.arange(longest)[:, None, None] * torch.cat([frequencies] * 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def state_specs(self) -> list[Any]:
        """None: training starts from nothing."""
        return []

    def forward(self, x: Tensor, state: Any, position: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mix ``[B, T, hidden_size]``."""
        parts = project_in_parts(self.qkv_proj, x, [2 * x.shape[-1], x.shape[-1]])
        qk, v = (part.unflatten(2, (-1, x.shape[-1] // self.heads)) for part in parts)
        first, second = qk.chunk(2, dim=-1)
        cos, sin = (table[: x.shape[1]].to(qk.dtype) for table in (self.cos, self.sin))
        qk = qk * cos + torch.cat([-second, first], dim=-1) * sin
        q, k, v = (part.transpose(1, 2) for part in (*qk.chunk(2, dim=2), v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if x.is_cuda else SDPBackend.MATH):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(o.transpose(1, 2).flatten(-2)), {}


def build(name: str, longest: int, *, layers: int = 12, width: int = 768) -> nn.Module:
    """The model of a row, float32."""
    torch.manual_seed(0)
    if name == FLA:
        fla = importlib.import_module("fla.models")
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_heads": 3}
        model: nn.Module = fla.GLAForCausalLM(fla.GLAConfig(**sizes, vocab_size=32000))
        return model
    config = ModelConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        layers=("mix",) * layers,
        mixers={"mix": MIXERS[name]},
        tie_word_embeddings=False,
    )
    ours = SequenceModel(config)
    for block in ours.blocks:
        if name == "scalar":
            block.mixer = ScalarDecay(width, *HEADS.values())
        if name == "softmax":
            block.mixer = Softmax(width, width // 128, longest)
    return ours


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy."""
    if isinstance(model, SequenceModel):
        return our_loss(model, model.hidden, tokens, targets)
    loss: Tensor = model(input_ids=tokens, labels=targets, use_cache=False).loss
    return loss


def our_loss(
    model: SequenceModel, hidden_of: Callable[..., Any], tokens: Tensor, targets: Tensor,
    *, compiled: bool = False,
) -> Tensor:  # fmt: skip
    """The same, compiled as ``edgelin train`` does it."""
    hidden, _ = hidden_of(tokens, model.initial_state(len(tokens), tokens.device))
    return cross_entropy(hidden, model.head_weight, targets, compiled=compiled)


def step_of(
    name: str, batch: int, length: int, weights: str, *, compiled: bool = False
) -> tuple[Callable[[], None], int]:
    """A training step on the GPU, and the number of parameters."""
    kind = torch.bfloat16 if weights == "bfloat16" else torch.float32
    model = build(name, length).to("cuda", kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    tokens, targets = (torch.randint(32000, (batch, length), device="cuda") for _ in range(2))
    loss_now = partial(loss_of, model)
    if compiled:
        assert isinstance(model, SequenceModel)
        hidden_of = torch.compile(model.hidden, dynamic=False)
        loss_now = partial(our_loss, model, hidden_of, compiled=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        # the cache of casts would be filled outside a captured graph and emptied inside
        cast = torch.autocast("cuda", torch.bfloat16, weights == "float32", cache_enabled=False)
        with cast:
            loss = loss_now(tokens, targets)
        loss.backward()
        optimizer.step()

    return step, sum(p.numel() for p in model.parameters())


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The whole step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds(step: Callable[[], None]) -> float:
    """Mean seconds of a step, over about a second of them."""
    for _ in range(3):
        step()
    steps, spent = 5, 0.0
    while True:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        spent = time.perf_counter() - began
        if spent > 1 or steps > 1000:
            return spent / steps
        steps = int(steps * 1.2 / spent) + 1


def run(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """The numbers of one job."""
    if job[0] != FLA:
        return numbers(job)
    with peer.tuned(options.tuned, label(job)):
        return numbers(job)


def numbers(job: Job) -> dict[str, Any]:
    """Tokens a second and the most memory."""
    name, shape, mode, weights = job
    gc.collect()  # the model and the graph of the job before
    torch.cuda.empty_cache()
    batch, length = map(int, shape.split("x"))
    torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()  # else every model counts as one more variant of the same code
    step, parameters = step_of(name, batch, length, weights, compiled=mode == "compiled")
    if mode != "eager":
        step = captured(step)
    return {
        "tokens_s": batch * length / seconds(step),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "parameters": parameters,
    }


def warm_up(job: Job) -> None:
    """Call what a job calls, for its kernels."""
    name, shape, _, weights = job
    step, _ = step_of(name, 1 if shape.startswith("1x") else 2, 2048, weights)
    step()


def label(job: Job) -> str:
    """Under which fla's choices are kept."""
    return f"{job[0]} {job[1]} {job[3]}"


def main() -> None:
    """Run what is missing."""
    began = time.monotonic()
    parser = results.options(argparse.ArgumentParser(description=__doc__.split("\n", 1)[0]))
    parser.add_argument("--weights", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--shapes", default=",".join(SHAPES), help="with commas")
    parser.add_argument("--modes", default=",".join(MODES), help="with commas")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1,
                        help="processes that compile fla's kernels")  # fmt: skip
    options = parser.parse_args()
    results.need_gpu()
    names = [n for n in results.selected(options.only, MODELS) if n != FLA or peer.is_installed()]
    wanted = [
        (name, shape, mode, options.weights)
        for name in names
        for shape in options.shapes.split(",")
        for mode in options.modes.split(",")
        if (name, mode) != (FLA, "compiled")  # which fails there
    ]
    todo = results.missing(wanted, KEYS, results.read(options.out), again=options.again)
    theirs = list({label(job): (label(job), "", job) for job in todo if job[0] == FLA}.values())
    if theirs:
        peer.prepare()
        peer.compile_ahead(warm_up, theirs, options.tuned, options.workers)
    deadline = began + options.seconds
    results.work(todo, KEYS, lambda job: run(job, options), options.out, deadline)


if __name__ == "__main__":
    main()
