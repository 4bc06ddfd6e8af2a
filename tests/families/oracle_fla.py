"""The other side where no published class runs on a CPU: float64 numpy from published equations.

A model here is a dictionary of weights under the names that are on disk, and a function of them.
Nothing is shared with edgelin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracle
import torch
from safetensors.torch import save_file
from torch import Tensor

Weights = dict[str, np.ndarray]


class Published:
    """A model with the call of transformers' classes.

    Args:
        weights: Name to array.
        config: ``config.json``; None: a ``.pth`` file has none.
        logits: Maps weights and tokens `[B, T]` to logits.
        rename: Gives the tensors of the file, where their names and shapes are others.
    """

    def __init__(
        self,
        weights: Weights,
        config: dict[str, Any] | None,
        logits: Callable[[Weights, np.ndarray], np.ndarray],
        rename: Callable[[Weights], Weights] = dict,
    ) -> None:
        self.weights, self.config = weights, config
        self._logits, self._rename = logits, rename

    def __call__(self, tokens: Tensor, use_cache: bool = False) -> Any:
        """Logits of one pass over everything."""
        return SimpleNamespace(logits=torch.from_numpy(self._logits(self.weights, tokens.numpy())))

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
        """Write the folder that a user would have; from now on the weights are the rounded ones."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in self.weights.items():
            self.weights[name] = torch.from_numpy(array).to(dtype).double().numpy()
        renamed = self._rename(self.weights)
        stored = {n: torch.tensor(a).to(dtype).contiguous() for n, a in renamed.items()}
        if self.config is None:
            torch.save(stored, folder / "model.pth")
        else:
            (folder / "config.json").write_text(json.dumps(self.config))
            save_file(stored, folder / "model.safetensors")
        oracle.tokenizer(folder)
        return folder


def drawn(shapes: Mapping[str, tuple[int, ...]], centres: Mapping[str, float]) -> Weights:
    """Random weights: matrices keep activations of about one, vectors lie around a centre.

    Args:
        shapes: Name to shape.
        centres: Regular expression of names to the mean of a tensor of any shape.
    """
    generator = np.random.default_rng(3)
    weights = {}
    for name, shape in shapes.items():
        noise = generator.standard_normal(shape)
        found = [centre for pattern, centre in centres.items() if re.search(pattern, name)]
        matrix = len(shape) >= 2 and 1 not in shape and not found
        weights[name] = noise * shape[-1] ** -0.5 if matrix else 0.2 * noise + sum(found[:1])
    return weights


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def layer_norm(
    x: np.ndarray, weight: np.ndarray | float, bias: np.ndarray | float, eps: float
) -> np.ndarray:
    """Over the last axis."""
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight + bias


def shifted(x: np.ndarray) -> np.ndarray:
    """The token before each, zeros before the first."""
    return np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


__all__ = ["Published", "drawn", "layer_norm", "shifted", "sigmoid"]
