"""The example of best of n chooses what a loop that reads the prompt n times chooses."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import edgelin

FILE = Path(__file__).parents[1] / "examples" / "best_of_n.py"


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("best_of_n", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["best_of_n"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["best_of_n"]
    return module


def test_the_likeliest_of_n(tiny: Any) -> None:
    bundle, n, count = edgelin.load(tiny.path, threads=1), 5, 12
    best = _example().best_of(bundle, "The old", n, count, seed=3)
    scores = {}
    for seed in range(3, 3 + n):
        stream = bundle.stream()
        text = "".join(stream.generate("The old", max_tokens=count, seed=seed)) + stream.flush()
        ids = [*stream._recent]  # of the prompt and of the text
        logits = tiny.reference(ids)[0]
        start = len(bundle.text.encode("The old"))
        total = 0.0
        for at in range(start, len(ids)):
            row = [float(x) for x in logits[at - 1]]
            total += row[ids[at]] - math.log(sum(math.exp(x) for x in row))
        scores[text] = total / (len(ids) - start)
    assert len(scores) > 1
    assert best.text == max(scores, key=lambda text: scores[text])
    np.testing.assert_allclose(best.score, max(scores.values()), rtol=1e-4)
    assert best.stream.position == start + count


def test_the_script(tiny: Any) -> None:
    command = [sys.executable, str(FILE), str(tiny.path), "The old", "--n", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("The old") and "nat a token" in done.stdout
