"""The other side where no published class runs on a CPU: float64 numpy from published equations.

A model here is a dictionary of weights under the names that are on disk, and a function of them.
The numbers share nothing with edgelin.
"""

from __future__ import annotations

import copy
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

from edgelin.model import SequenceModel

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
        self._logits, self.rename = logits, rename

    def __call__(self, tokens: Tensor, use_cache: bool = False) -> Any:
        """Logits of one pass over everything."""
        return SimpleNamespace(logits=torch.from_numpy(self._logits(self.weights, tokens.numpy())))

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
        """Write the folder that a user would have; from now on the weights are the rounded ones."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in self.weights.items():
            self.weights[name] = torch.from_numpy(array).to(dtype).double().numpy()
        renamed = self.rename(self.weights)
        stored = {n: torch.tensor(a).to(dtype).contiguous() for n, a in renamed.items()}
        if self.config is None:
            torch.save(stored, folder / "model.pth")
        else:
            (folder / "config.json").write_text(json.dumps(self.config))
            save_file(stored, folder / "model.safetensors")
        oracle.tokenizer(folder)
        return folder


@torch.no_grad()
def check(theirs: Published, folder: Path) -> SequenceModel:
    """Compare as the other families are, and in float64, where only folded weights are rounded."""
    ours = oracle.check_torch(theirs, folder)
    tokens = oracle.ids(3, 70)
    exact = copy.deepcopy(ours).double()(tokens)[0]
    oracle.near(exact, theirs(tokens).logits, 1e-5, "in float64")
    return ours


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


def rms_norm(x: np.ndarray, weight: np.ndarray | float, eps: float) -> np.ndarray:
    """Over the last axis."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def memory(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: Any, beta: np.ndarray | None = None
) -> np.ndarray:
    """fla's recurrent kernels, queries divided by sqrt(K): gla, retention, delta, gated and kda.

    q, k `[B, T, H, K]`, v `[B, T, H, V]`, log decay g broadcast against k, beta `[B, T, H]`.
    """
    decay, outputs = np.exp(np.broadcast_to(g, k.shape)), []
    s = np.zeros((*k[:, 0].shape, v.shape[-1]))
    for t in range(q.shape[1]):
        s = s * decay[:, t, ..., None]
        write = v[:, t]
        if beta is not None:
            write = beta[:, t, :, None] * (write - (s * k[:, t, ..., None]).sum(-2))
        s = s + k[:, t, ..., None] * write[..., None, :]
        outputs.append((s * q[:, t, ..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return np.stack(outputs, axis=1)


def conv(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """silu of the causal depthwise convolution, `[B, T, C]`."""
    taps = w[f"{name}.weight"][:, 0]
    padded = np.concatenate([np.zeros((len(x), taps.shape[1] - 1, x.shape[2])), x], axis=1)
    return silu(sum(padded[:, i : i + x.shape[1]] * taps[:, i] for i in range(taps.shape[1])))


def rotated(x: np.ndarray, theta: float = 10000.0) -> np.ndarray:
    """RoPE of `[B, T, H, D]`, halves as pairs."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            first * np.sin(angle) + second * np.cos(angle),
        ],
        axis=-1,
    )


def unit(x: np.ndarray) -> np.ndarray:
    """fla's l2norm."""
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


__all__ = [
    "Published",
    "check",
    "conv",
    "drawn",
    "layer_norm",
    "memory",
    "rms_norm",
    "rotated",
    "shifted",
    "sigmoid",
    "silu",
    "unit",
]
