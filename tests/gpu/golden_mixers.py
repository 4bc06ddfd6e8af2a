"""Write golden vectors of every mixer: outputs and states that a GPU made in parallel form.

    PYTHONPATH=. python tests/gpu/golden_mixers.py --out tests/golden

``tests/mixers/test_golden.py`` replays the inputs on a CPU, a piece and then single steps. Written
is ``mixers.npz``: an array of values that spread over each tensor, in float32 and in bfloat16, by
case of ``tests/mixers/loops``. Weights and inputs come from seeds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "mixers")]

from loops import CASES  # noqa: E402 (tests are no package)
from test_gpu_mixers import arguments, build, run, shared_with  # noqa: E402

__all__ = ["arguments", "build", "sampled", "shared_with"]  # what the replay takes from here
VALUES = 200  # of a tensor
STRIDE = 9973  # a prime: samples fall on all rows and columns


def sampled(tensor: Any) -> np.ndarray:
    """Values that spread over a tensor."""
    array = tensor.detach().double().cpu().numpy().reshape(-1)
    chosen: np.ndarray = array[np.arange(min(VALUES, array.size)) * STRIDE % array.size]
    return chosen.astype(np.float32)


def vectors(case: str) -> dict[str, np.ndarray]:
    """Samples of one mixer's output and states in both precisions."""
    mixer = build(case).cuda()
    given = arguments(mixer, torch.float32, "cuda")
    names = ["y", *(spec.name for spec in mixer.state_specs())]
    found = {}
    for kind in ("float32", "bfloat16"):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=kind == "bfloat16"):
            results = run(mixer, given)
        for name, result in zip(names, results, strict=True):
            found[f"{case}/{kind}/{name}"] = sampled(result)
    return found


def main() -> None:
    """All cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments_ = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    arrays: dict[str, np.ndarray] = {}
    for case in CASES:
        arrays.update(vectors(case))
    broken = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if broken:
        raise SystemExit(f"not finite, nothing written: {', '.join(broken)}")
    np.savez_compressed(arguments_.out / "mixers.npz", **arrays)
    print(f"{len(CASES)} mixers, {len(arrays)} tensors")


if __name__ == "__main__":
    main()
