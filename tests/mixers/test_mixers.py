"""Claims that hold for every mixer, each against a float64 numpy loop over tokens.

A loop maps (mixer, x, state, position) to (y, state) and shares no code with the mixer: rotations
are complex products, attention is a softmax over a list of all tokens it may see.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgelin import mixers
from edgelin.errors import EdgelinError
from edgelin.recurrences import CHUNK

HIDDEN, EPS = 20, 1e-6
Arrays = dict[str, np.ndarray]
LINEAR = {"num_heads": 2, "key_dim": 6, "value_dim": 10}
ATTENTION = {"type": "attention", "num_heads": 4, "num_kv_heads": 2, "head_dim": 6}

CASES: dict[str, dict[str, Any]] = {
    "linear_attention": {"type": "linear_attention", **LINEAR},
    "retention": {"type": "retention", **LINEAR},
    "gla": {"type": "gla", **LINEAR, "decay_rank": 4},
    "deltanet": {"type": "deltanet", **LINEAR},
    "gated_deltanet": {"type": "gated_deltanet", **LINEAR, "conv_size": 3},
    "attention, window 7": {**ATTENTION, "window": 7},
    "attention, window 64": {**ATTENTION, "window": 64},
    "attention, window 100": {**ATTENTION, "window": 100, "num_kv_heads": 4},
}
OWN_TESTS = {"ssm"}  # tests/mixers/test_ssm.py makes the same claims with its own loop


def build(case: str) -> Any:
    """A mixer with reproducible weights."""
    torch.manual_seed(7)
    return mixers.build(CASES[case], HIDDEN, 3, EPS, where="model.mixers.m")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal float64 numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def filled_state(mixer: Any, batch: int) -> dict[str, Tensor]:
    """A state that is not zero, float64; a normaliser is positive."""
    state = {s.name: 0.3 * numbers(batch, *s.shape, seed=1) for s in mixer.state_specs()}
    return {k: v.abs() + 1 if k.startswith("normalizer") else v for k, v in state.items()}


def as_float32(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state as a model carries it."""
    return {name: tensor.float() for name, tensor in state.items()}


def in_pieces(
    mixer: nn.Module, x: Tensor, state: dict[str, Tensor], position: Tensor, cuts: list[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run piece by piece with the state carried over."""
    outputs = []
    for piece in x.split(cuts, dim=1):
        y, state = mixer(piece, state, position)
        position = position + piece.shape[1]
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


# --- the loops -----------------------------------------------------------------------------------


def matrix(mixer: Any, name: str) -> np.ndarray:
    """A parameter as float64."""
    array: np.ndarray = dict(mixer.named_parameters())[name].detach().double().numpy()
    return array


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def heads_of(x: np.ndarray, heads: int) -> np.ndarray:
    return x.reshape(*x.shape[:-1], heads, -1)


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


def linear_attention(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c = m.config
    q, k, v = np.split(
        x @ matrix(m, "qkv_proj.weight").T, np.cumsum([c.num_heads * c.key_dim] * 2), axis=-1
    )
    q, k = (np.where(a > 0, a + 1, np.exp(a)) for a in (q, k))
    q, k, v = (heads_of(a, c.num_heads) for a in (q, k, v))
    one = np.ones((*x.shape[:2], c.num_heads, 1))
    o, s = memory(q, k, v, one, state["recurrent.3"])
    den, z = memory(q, k, one, one, state["normalizer.3"][..., None])
    y = (o / (den + 1e-6)).reshape(*x.shape[:2], -1) @ matrix(m, "out_proj.weight").T
    return y, {"recurrent.3": s, "normalizer.3": z[..., 0]}


def retention(m: Any, x: np.ndarray, state: Arrays, position: np.ndarray) -> Any:
    c = m.config
    sizes = [c.num_heads * c.key_dim] * 2 + [c.num_heads * c.value_dim]
    parts = np.split(x @ matrix(m, "qkv_gate_proj.weight").T, np.cumsum(sizes), axis=-1)
    q, k, v, gate = (heads_of(a, c.num_heads) for a in parts)
    tokens = position[:, None] + np.arange(x.shape[1])
    theta = 10000.0 ** -np.linspace(0, 1, c.key_dim // 2)
    q, k = turned(q, tokens, theta), turned(k, tokens, theta)
    gamma = 1 - 2.0 ** (-5 - np.arange(c.num_heads))
    decay = np.broadcast_to(gamma[:, None], (*x.shape[:2], c.num_heads, 1))
    o, s = memory(q / c.key_dim**0.5, k, v, decay, state["recurrent.3"])
    return gated_output(m, o, gate), {"recurrent.3": s}


def gla(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c = m.config
    sizes = [c.num_heads * c.key_dim] * 2 + [c.num_heads * c.value_dim]
    parts = np.split(x @ matrix(m, "qkv_gate_proj.weight").T, np.cumsum(sizes), axis=-1)
    q, k, v, gate = (heads_of(a, c.num_heads) for a in parts)
    low = x @ matrix(m, "decay_in_proj.weight").T
    low = low @ matrix(m, "decay_out_proj.weight").T + matrix(m, "decay_out_proj.bias")
    decay = heads_of(sigmoid(low) ** (1 / 16), c.num_heads)
    o, s = memory(q / c.key_dim**0.5, k, v, decay, state["recurrent.3"])
    return gated_output(m, o, gate), {"recurrent.3": s}


def delta_net(m: Any, x: np.ndarray, state: Arrays, _: np.ndarray) -> Any:
    c = m.config
    keys, values = c.num_heads * c.key_dim, c.num_heads * c.value_dim
    both = x @ matrix(m, "qkv_gate_proj.weight").T
    past = np.concatenate([state["conv.3"].transpose(0, 2, 1), both[..., :-values]], axis=1)
    taps = matrix(m, "conv_weight")
    qkv = sum(past[:, i : i + x.shape[1]] * taps[:, i] for i in range(c.conv_size))
    qkv = qkv * sigmoid(qkv)
    parts = (*np.split(qkv, [keys, 2 * keys], axis=-1), both[..., -values:])
    q, k, v, gate = (heads_of(a, c.num_heads) for a in parts)
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    gates = x @ matrix(m, "beta_decay_proj.weight").T
    beta, decay = sigmoid(gates[..., : c.num_heads]), np.ones((*x.shape[:2], c.num_heads))
    if m.decays:
        step = np.log1p(np.exp(gates[..., c.num_heads :] + matrix(m, "dt_bias")))
        decay = np.exp(-np.exp(matrix(m, "A_log")) * step)
    o, s = memory(q / c.key_dim**0.5, k, v, decay[..., None], state["recurrent.3"], beta=beta)
    tail = past[:, x.shape[1] :].transpose(0, 2, 1)
    return gated_output(m, o, gate), {"conv.3": tail, "recurrent.3": s}


def attention(m: Any, x: np.ndarray, state: Arrays, position: np.ndarray) -> Any:
    c = m.config
    qkv = heads_of(x @ matrix(m, "qkv_proj.weight").T, c.num_heads + 2 * c.num_kv_heads)
    tokens = position[:, None] + np.arange(x.shape[1])
    theta = c.rope_theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    q, k, v = np.split(qkv, np.cumsum([c.num_heads, c.num_kv_heads]), axis=2)
    q, k = turned(q, tokens, theta), turned(k, tokens, theta)
    key, value = state["key.3"].copy(), state["value.3"].copy()
    outputs = np.zeros((*x.shape[:2], c.num_heads, c.head_dim))
    for b, start in enumerate(position):
        ring = range(max(0, start - c.window), start)
        seen_k = [key[b, :, p % c.window] for p in ring]
        seen_v = [value[b, :, p % c.window] for p in ring]
        for t in range(x.shape[1]):
            seen_k.append(k[b, t])
            seen_v.append(v[b, t])
            for h in range(c.num_heads):
                own = h // (c.num_heads // c.num_kv_heads)
                keys = np.stack(seen_k[-c.window :])[:, own]
                scores = np.exp(keys @ q[b, t, h] / c.head_dim**0.5)
                values = np.stack(seen_v[-c.window :])[:, own]
                outputs[b, t, h] = scores @ values / scores.sum()
            slot = (start + t) % c.window
            key[b, :, slot], value[b, :, slot] = k[b, t], v[b, t]
    y = outputs.reshape(*x.shape[:2], -1) @ matrix(m, "out_proj.weight").T
    return y, {"key.3": key, "value.3": value}


LOOPS: dict[str, Callable[..., Any]] = {
    "linear_attention": linear_attention,
    "retention": retention,
    "gla": gla,
    "deltanet": delta_net,
    "gated_deltanet": delta_net,
    "attention": attention,
}


def truth(case: str, x: Tensor, state: dict[str, Tensor], position: Tensor) -> Any:
    """The loop's outputs and state for a case."""
    loop = LOOPS[CASES[case]["type"]]
    arrays = {name: tensor.double().numpy() for name, tensor in state.items()}
    return loop(build(case), x.numpy(), arrays, position.numpy())


def check(got: tuple[Tensor, dict[str, Tensor]], expected: Any, tolerance: float) -> None:
    """Outputs and every state agree, relative to the largest entry."""
    np.testing.assert_allclose(
        got[0].detach(), expected[0], rtol=0, atol=tolerance * np.abs(expected[0]).max()
    )
    assert set(got[1]) == set(expected[1])
    for name, array in expected[1].items():
        np.testing.assert_allclose(
            got[1][name].detach(), array, rtol=0, atol=tolerance * np.abs(array).max()
        )


# --- the claims ----------------------------------------------------------------------------------


def test_every_mixer_has_a_case() -> None:
    names = {m.name for m in pkgutil.iter_modules(mixers.__path__)}
    assert {table["type"] for table in CASES.values()} | OWN_TESTS == names
    assert set(LOOPS) | OWN_TESTS == names


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch, time", [(1, 1), (3, 63), (1, 64), (3, 65), (1, 130)])
def test_one_call_is_the_loop(case: str, batch: int, time: int) -> None:
    mixer = build(case)
    x, state = numbers(batch, time, HIDDEN, seed=2), filled_state(mixer, batch)
    position = torch.tensor([0, 3, 1_000_000][-batch:])
    expected = truth(case, x, state, position)
    check(mixer(x.float(), as_float32(state), position), expected, 2e-5)
    check(mixer.double()(x, state, position), expected, 1e-9)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cuts", [[1] * 130, [5, 64, 1, 60], [65, 65], [1, 129]], ids=str)
def test_pieces_are_the_loop(case: str, cuts: list[int]) -> None:
    mixer = build(case)
    x, state = numbers(2, 130, HIDDEN, seed=3), filled_state(mixer, 2)
    position = torch.tensor([2, 150])
    expected = truth(case, x, state, position)
    check(in_pieces(mixer, x.float(), as_float32(state), position, cuts), expected, 2e-5)


@pytest.mark.parametrize("case", CASES)
def test_an_output_depends_on_no_later_token(case: str) -> None:
    mixer = build(case)
    x, position = numbers(1, 130, HIDDEN).float(), torch.tensor([0])
    state = as_float32(filled_state(mixer, 1))
    changed = x.clone()
    changed[:, 70:] += 1
    before, after = (mixer(a, state, position)[0] for a in (x, changed))
    torch.testing.assert_close(before[:, :70], after[:, :70], rtol=0, atol=1e-6)
    assert (before[:, 70:] - after[:, 70:]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_states_are_results_not_changed_arguments(case: str) -> None:
    mixer = build(case)
    state, position = as_float32(filled_state(mixer, 2)), torch.tensor([4, 4])
    copies = {name: tensor.clone() for name, tensor in state.items()}
    for time in (1, 65):
        _, after = mixer(numbers(2, time, HIDDEN).float(), state, position)
        assert list(after) == [spec.name for spec in mixer.state_specs()]
        for name, tensor in state.items():
            assert torch.equal(tensor, copies[name])
            assert after[name].shape == tensor.shape
            assert after[name].dtype == torch.float32
    assert position.tolist() == [4, 4]


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_and_state_gets_a_gradient(case: str) -> None:
    mixer = build(case)
    state = {k: v.requires_grad_() for k, v in as_float32(filled_state(mixer, 2)).items()}
    y, after = mixer(numbers(2, 70, HIDDEN).float(), state, torch.tensor([50, 50]))
    (y.square().sum() + sum(s.sum() for s in after.values())).backward()
    for name, tensor in [*mixer.named_parameters(), *state.items()]:
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all() and tensor.grad.abs().max() > 0, name


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_autocast_stays_near_float32(case: str) -> None:
    mixer = build(case)
    x, position = numbers(2, 70, HIDDEN).float(), torch.tensor([0, 9])
    state = as_float32(filled_state(mixer, 2))
    y, after = mixer(x, state, position)
    with torch.autocast("cpu", torch.bfloat16):
        low, low_after = mixer(x, state, position)
    assert (low.float() - y).abs().max() < 0.05 * y.abs().max()
    assert all(tensor.dtype == torch.float32 for tensor in low_after.values())
    for name, tensor in after.items():
        assert (low_after[name] - tensor).abs().max() < 0.05 * tensor.abs().max(), name


@pytest.mark.parametrize("case", [c for c in CASES if c != "attention, window 7"])
def test_traces_with_dynamic_batch_and_time(case: str) -> None:
    mixer = build(case)
    batch, time = torch.export.Dim("batch", max=64), torch.export.Dim("time", min=1, max=CHUNK)
    state = as_float32(filled_state(mixer, 2))
    program = torch.export.export(
        mixer,
        (numbers(2, 3, HIDDEN).float(), state, torch.tensor([0, 0])),
        dynamic_shapes=({0: batch, 1: time}, {k: {0: batch} for k in state}, {0: batch}),
    ).module()
    for rows, tokens in [(1, 1), (3, 64), (2, 7)]:
        x = numbers(rows, tokens, HIDDEN, seed=5)
        position = torch.arange(rows) * 99
        state = filled_state(mixer, rows)
        expected = truth(case, x, state, position)
        check(program(x.float(), as_float32(state), position), expected, 2e-5)


# --- special to one mixer ------------------------------------------------------------------------


def test_attention_refuses_to_trace_a_window_below_a_chunk() -> None:
    mixer = build("attention, window 7")
    state = as_float32(filled_state(mixer, 1))
    with pytest.raises(EdgelinError, match=r"window of 7 can't be exported.*64 or more"):
        torch.export.export(mixer, (numbers(1, 3, HIDDEN).float(), state, torch.tensor([0])))


def test_attention_ignores_slots_that_no_token_has_written() -> None:
    mixer = build("attention, window 64")
    x, position = numbers(1, 90, HIDDEN).float(), torch.tensor([0])
    empty = {name: torch.zeros_like(t) for name, t in filled_state(mixer, 1).items()}
    junk = {name: torch.full_like(t, 7.0) for name, t in empty.items()}
    for cuts in ([90], [30, 60]):
        y = [in_pieces(mixer, x, as_float32(s), position, cuts)[0] for s in (empty, junk)]
        torch.testing.assert_close(*y, rtol=0, atol=0)


@pytest.mark.parametrize(
    "case, change, message",
    [
        ("attention, window 7", {"num_kv_heads": 3}, "num_heads is 4, no multiple of .* = 3"),
        ("attention, window 7", {"head_dim": 5}, "head_dim is 5; rotary position needs an even"),
        ("attention, window 7", {"window": 0}, "window is 0; give at least 1"),
        ("retention", {"key_dim": 5}, "key_dim is 5; rotary position needs an even"),
        ("gated_deltanet", {"conv_size": 1}, "conv_size is 1; give at least 2"),
        ("gla", {"decay_rank": 0}, "decay_rank is 0; give at least 1"),
        ("linear_attention", {"num_heads": 0}, "num_heads is 0; give at least 1"),
        ("gla", {"heads": 2}, "model.mixers.m has an unknown key 'heads'"),
    ],
)
def test_wrong_sizes_are_refused(case: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(EdgelinError, match=message):
        mixers.build({**CASES[case], **change}, HIDDEN, 0, EPS, where="model.mixers.m")


def test_unknown_and_missing_types_are_refused() -> None:
    with pytest.raises(EdgelinError, match=r"'gdn' is not known; use one of .*gated_deltanet"):
        mixers.load("gdn")
    with pytest.raises(EdgelinError, match=r"'no\.such\.module' is not known"):
        mixers.load("no.such.module")
    with pytest.raises(EdgelinError, match=r"model\.mixers\.m lacks the key 'type'"):
        mixers.build({}, HIDDEN, 0, EPS, where="model.mixers.m")
