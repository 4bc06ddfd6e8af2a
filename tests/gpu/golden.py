"""Write the golden vectors: what the Triton kernels make of a fixed text, on this machine's GPU.

    python tests/gpu/golden.py examples/demo/checkpoint --out tests/golden

``tests/test_golden.py`` replays the text through the exported ONNX graphs, on machines without a
GPU. Written are ``golden.npz`` (arrays) and ``golden.json`` (how they were made). From a checkout,
without an installed package: ``PYTHONPATH=. python ...``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from edgelin import checkpoint as checkpoints

ROOT = Path(__file__).parents[2]
TOKENS = 2048
# Beginning, both sides of chunk and power-of-two borders, middle, end.
POSITIONS = [0, 1, 2, 31, 32, 62, 63, 64, 65, 66, 127, 128, 129, 130, 255, 256, 511, 512, 1022]
POSITIONS += [1023, 1024, 1535, 2046, 2047]
STATE_VALUES = 40_000  # of all states together; more are sampled
STRIDE = 9973  # a prime: samples fall on all rows and columns


def main() -> None:
    """Run the checkpoint twice and write the two files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("golden vectors come from a CUDA GPU; this machine has none")

    ids = read_ids(arguments.checkpoint, arguments.out / "text.txt")
    arrays, counts = run(arguments.checkpoint, ids)
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise SystemExit(f"{name} is not finite: nothing written")
    made = {
        "checkpoint": hashes(arguments.checkpoint, checkpoint_files(arguments.checkpoint)),
        "kernels": hashes(ROOT, kernel_files(counts)),
        "kernel_calls": counts,
        "text": hashes(arguments.out, ["text.txt"])["text.txt"],
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
    }
    np.savez_compressed(arguments.out / "golden.npz", **arrays)
    (arguments.out / "golden.json").write_text(json.dumps(made, indent=2) + "\n")
    size = (arguments.out / "golden.npz").stat().st_size
    print(f"golden.npz: {size} bytes; kernel calls {counts}; bf16 beside float32 at most", end=" ")
    print(f"{deviation(arrays):.1e}, same top-1 at {agreement(arrays):.1%} of positions")


def run(checkpoint: Path, ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The arrays of both precisions, and how often each recurrence's kernel ran."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    model, _ = checkpoints.load(checkpoint, device="cuda")
    tokens = torch.from_numpy(ids)[None].cuda()
    with torch.no_grad(), counting_kernels() as counts:
        logits, state = model(tokens)
        with torch.autocast("cuda", torch.bfloat16):  # as the trainer runs it
            low, _ = model(tokens)
    if not counts or not all(counts.values()):
        raise SystemExit(f"a Triton kernel did not run: {dict(counts)}")
    arrays = {
        "ids": ids.astype(np.int32),
        "positions": np.array(POSITIONS, np.int32),
        "logits": logits[0, POSITIONS].cpu().numpy(),
        "logits_bf16": low[0, POSITIONS].float().cpu().numpy().astype(np.float16),
        "top1": logits[0].argmax(-1).cpu().numpy().astype(np.int32),
        "top1_bf16": low[0].argmax(-1).cpu().numpy().astype(np.int32),
    }
    values = sum(tensor.numel() for tensor in state.values())
    for name, tensor in state.items():
        array = tensor.cpu().numpy().reshape(-1)
        arrays[f"state/{name}"] = array[sample(array.size, values)]
    return arrays, dict(counts)


@contextmanager
def counting_kernels() -> Iterator[Counter[str]]:
    """Counts the calls of every recurrence's ``kernel.forward`` whose operator runs meanwhile."""
    counts: Counter[str] = Counter()
    originals = {}

    def counted(name: str, forward: Any) -> Any:
        def call(*args: Any) -> Any:
            if not all(x.is_cuda for x in args if isinstance(x, torch.Tensor)):
                raise SystemExit(f"{name}: a tensor is not on the GPU")
            counts[name] += 1
            return forward(*args)

        return call

    for path in sorted((ROOT / "edgelin" / "recurrences").glob("*/kernel.py")):
        module = importlib.import_module(f"edgelin.recurrences.{path.parent.name}.kernel")
        originals[module] = module.forward
        module.forward = counted(path.parent.name, module.forward)
    try:
        yield counts
    finally:
        for module, forward in originals.items():
            module.forward = forward


def read_ids(checkpoint: Path, text: Path) -> np.ndarray:
    """The first tokens of the text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    if len(ids) < TOKENS:
        raise SystemExit(f"{text} has {len(ids)} tokens; at least {TOKENS} are needed")
    return np.array(ids[:TOKENS], np.int64)


def sample(size: int, all_sizes: int) -> np.ndarray:
    """Which values of a flattened state are kept: all, or a share that spreads over it."""
    if all_sizes <= STATE_VALUES or size < 64:
        return np.arange(size)
    count = max(64, size * STATE_VALUES // all_sizes)
    return np.arange(count) * STRIDE % size


def checkpoint_files(checkpoint: Path) -> list[str]:
    """Names of the files that decide what a checkpoint computes."""
    weights = (path.name for path in checkpoints.weight_files(checkpoint))
    return ["config.json", *weights, "tokenizer.json"]


def kernel_files(recurrences: Iterable[str]) -> list[str]:
    """The files whose change makes the golden vectors old, relative to the checkout.

    These are the forward kernels of the recurrences that ran; the vectors hold no gradients.
    """
    found = (
        path
        for name in recurrences
        for path in (ROOT / "edgelin" / "recurrences" / name).glob("kernel*.py")
        if not path.name.startswith("kernel_backward")
    )
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def hashes(folder: Path, names: Any) -> dict[str, str]:
    """sha256 of files by name."""
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def deviation(arrays: dict[str, np.ndarray]) -> float:
    """Largest max|x - y| / max|y| of the bf16 logits over the positions."""
    x, y = arrays["logits_bf16"].astype(np.float64), arrays["logits"].astype(np.float64)
    return float((np.abs(x - y).max(-1) / np.abs(y).max(-1)).max())


def agreement(arrays: dict[str, np.ndarray]) -> float:
    """Share of positions where both precisions have the same most probable token."""
    return float((arrays["top1"] == arrays["top1_bf16"]).mean())


if __name__ == "__main__":
    main()
