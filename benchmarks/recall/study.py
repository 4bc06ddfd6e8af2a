"""Trains small models on recall and copying: what does each mechanism hold in a state of one size?

Every model is two layers of the mechanism, 128 wide. To the embedding of a token comes that of the
token before it, turned by a matrix, for all mechanisms alike: what is tested is the memory, not how
a layer finds its neighbour. At equal state size S every layer keeps S numbers: heads x key width x
value width of a matrix, or slots x (key + value) of a window. The hybrid is one layer of the gated
delta rule and one window of 64 tokens. Softmax attention over the whole sequence keeps all that it
reads and is the yardstick.

One run is a (task, mechanism, state size, learning rate); its scores are appended to a file of JSON
lines, and runs that are there already are left out, so that a stopped study goes on.

    python benchmarks/recall/study.py --out results.jsonl --workers 12
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import time
from pathlib import Path
from typing import Any

import tasks
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.config import ModelConfig
from edgelin.model import SequenceModel

HIDDEN, HEADS = 128, 4
STATES = (1024, 4096, 16384)
RATES = (1e-3,)
MATRICES = {
    "linear attention (elu + 1)": {"type": "linear_attention"},
    "retention": {"type": "retention"},
    "gla": {"type": "gla"},
    "gated delta": {"type": "gated_deltanet"},
    "mamba-2": {"type": "mamba2"},
}
HYBRID, SOFTMAX = "hybrid", "softmax"


def window(size: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """An attention mixer over the last ``size`` tokens."""
    heads = max(kv_heads, HIDDEN // head_dim)
    return {
        "type": "attention",
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "window": size,
    }


def mixers(mechanism: str, state: int) -> list[dict[str, Any]]:
    """The tables of the two layers under test, ``state`` numbers each."""
    width = math.isqrt(state // HEADS)
    matrix = {"num_heads": HEADS, "key_dim": width, "value_dim": width}
    if mechanism == SOFTMAX:
        return [window(tasks.LENGTH, HEADS, HIDDEN // HEADS)] * 2
    if mechanism == HYBRID:
        channels = state // (2 * 64)  # of the keys, and of the values, of 64 slots
        kv_heads = max(1, channels // 32)
        local = window(64, kv_heads, channels // kv_heads)
        return [{**MATRICES["gated delta"], **matrix}, local]
    if mechanism == "mamba-2":
        sizes = {"num_heads": HEADS, "state_size": width, "head_dim": width}
        return [{**MATRICES[mechanism], **sizes}] * 2
    return [{**MATRICES[mechanism], **matrix}] * 2


def build(mechanism: str, state: int) -> SequenceModel:
    """The model of a run, with reproducible weights."""
    torch.manual_seed(0)
    first, second = mixers(mechanism, state)
    config = ModelConfig(
        vocab_size=tasks.VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        layers=("first", "second"),
        mixers={"first": first, "second": second},
        tie_word_embeddings=False,
    )
    model = SequenceModel(config)
    model.embedding = Bigrams()
    return model


class Bigrams(nn.Module):
    """E(token) + P E(token before it); the first token follows a pad."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tasks.VOCABULARY, HIDDEN)
        self.before = nn.Linear(HIDDEN, HIDDEN, bias=False)
        nn.init.orthogonal_(self.before.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ``[B, T]`` to ``[B, T, HIDDEN]``."""
        before = F.pad(ids, (1, 0))[:, :-1]
        summed: Tensor = self.tokens(ids) + self.before(self.tokens(before))
        return summed


def train(run: dict[str, Any], device: str, steps: int, batch: int) -> dict[str, Any]:
    """Train and score one run."""
    started = time.perf_counter()
    task, generator = run["task"], torch.Generator(device).manual_seed(1)
    model = build(run["mechanism"], run["state"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), run["rate"], weight_decay=0.1)
    shape = torch.optim.lr_scheduler.OneCycleLR(optimizer, run["rate"], total_steps=steps)
    sizes = tasks.SIZES[task]
    for _ in range(steps):
        parts = [tasks.draw(task, size, batch // len(sizes), generator) for size in sizes]
        tokens, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits, _ = model(tokens)
        loss = mean_loss(logits, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shape.step()
    accuracy = {size: score(model, task, size, device) for size in sizes}
    return {
        **run,
        "parameters": model.num_parameters(),
        "loss": float(loss.detach()),
        "accuracy": accuracy,
        "seconds": round(time.perf_counter() - started, 1),
    }


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in which every row counts the same, however many answers it asks for."""
    losses = F.cross_entropy(logits.mT, targets, ignore_index=-1, reduction="none")
    return (losses.sum(1) / (targets >= 0).sum(1)).mean()


@torch.no_grad()
def score(model: SequenceModel, task: str, size: int, device: str) -> float:
    """Share of right answers on 1,024 rows that no run trains on."""
    generator, right, asked = torch.Generator(device).manual_seed(2), 0, 0
    for _ in range(8):
        tokens, targets = tasks.draw(task, size, 128, generator)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits, _ = model.eval()(tokens)
        wanted = targets >= 0
        right += int((logits.argmax(-1) == targets)[wanted].sum())
        asked += int(wanted.sum())
    model.train()
    return right / asked


def runs() -> list[dict[str, Any]]:
    """All runs; those that say most come first."""
    found = [
        {"task": task, "mechanism": mechanism, "state": state, "rate": rate}
        for rate, state, task, mechanism in itertools.product(
            RATES, (4096, 1024, 16384), tasks.SIZES, (*MATRICES, HYBRID, SOFTMAX)
        )
        if mechanism != SOFTMAX or state == STATES[0]  # its state does not depend on S
    ]
    return sorted(found, key=lambda run: run["mechanism"] != SOFTMAX)


def worker(queue: Any, out: Path, lock: Any, device: str, steps: int, batch: int) -> None:
    """Take runs until none is left."""
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
    while (run := queue.get()) is not None:
        result = train(run, device.split(":")[0], steps, batch)
        with lock, out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--workers", type=int, default=1, help="processes, shared out to the GPUs")
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--batch", type=int, default=80)
    options = parser.parse_args()
    done = []
    if options.out.exists():
        lines = options.out.read_text(encoding="utf-8").splitlines()
        done = [[json.loads(line)[key] for key in ("task", "mechanism", "state", "rate")]
                for line in lines]  # fmt: skip
    missing = [run for run in runs() if list(run.values()) not in done]
    gpus = torch.cuda.device_count()
    context = multiprocessing.get_context("spawn")
    queue, lock = context.Queue(), context.Lock()
    for run in [*missing, *[None] * options.workers]:
        queue.put(run)
    processes = []
    for i in range(options.workers):
        device = f"cuda:{i % gpus}" if gpus else "cpu"
        arguments = (queue, options.out, lock, device, options.steps, options.batch)
        processes.append(context.Process(target=worker, args=arguments))
        processes[-1].start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
