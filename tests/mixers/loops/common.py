"""What the loops share: weights as float64 arrays, and pieces of mixers in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

HIDDEN, EPS = 20, 1e-6
LAYER = 3  # of every mixer under test: its states are called recurrent.3 and so on
LINEAR = {"num_heads": 2, "key_dim": 6, "value_dim": 10}
Arrays = dict[str, np.ndarray]


def matrix(mixer: Any, name: str) -> np.ndarray:
    """A parameter as float64."""
    array: np.ndarray = dict(mixer.named_parameters())[name].detach().double().numpy()
    return array


def linear(mixer: Any, name: str, x: np.ndarray) -> np.ndarray:
    """A projection, with its bias if it has one."""
    y = x @ matrix(mixer, f"{name}.weight").T
    parameters = dict(mixer.named_parameters())
    return y + matrix(mixer, f"{name}.bias") if f"{name}.bias" in parameters else y


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def heads_of(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:-1], heads, -1)


def convolved(mixer: Any, x: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Short convolution of `[B, T, C]` after the inputs in the state, and the last inputs."""
    past, taps = np.concatenate([state.transpose(0, 2, 1), x], axis=1), matrix(mixer, "conv_weight")
    y = sum(past[:, i : i + x.shape[1]] * taps[:, i] for i in range(taps.shape[1]))
    if getattr(mixer, "conv_bias", None) is not None:
        y = y + matrix(mixer, "conv_bias")
    return y, past[:, x.shape[1] :].transpose(0, 2, 1)


def turned(x: np.ndarray, tokens: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """`[B, T, H, D]` with pairs (i, i + D/2) as complex numbers turned by their angles."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    z = z * np.exp(1j * tokens[:, :, None, None] * frequencies)
    return np.concatenate([z.real, z.imag], axis=-1)


def gated_output(mixer: Any, o: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """out_proj(RMSNorm(o) * silu(gate)), o and gate `[B, T, H, V]`."""
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + EPS) * matrix(mixer, "norm.norm.weight")
    o = o * gate * sigmoid(gate)
    return o.reshape(*o.shape[:2], -1) @ matrix(mixer, "out_proj.weight").T


def memory(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, state: np.ndarray, **delta: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Matrix memory, token by token; decay `[B, T, H, K or 1]`, beta of the delta rule if given."""
    s, outputs = state.copy(), []
    for t in range(q.shape[1]):
        s = decay[:, t, :, :, None] * s
        write = v[:, t]
        if delta:
            read = np.einsum("bhkv,bhk->bhv", s, k[:, t])
            write = delta["beta"][:, t, :, None] * (write - read)
        s = s + np.einsum("bhk,bhv->bhkv", k[:, t], write)
        outputs.append(np.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return np.stack(outputs, axis=1), s
