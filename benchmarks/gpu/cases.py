"""The kernels that are measured: inputs, our call, the peer's call, float64 truth and the bar.

Every row has heads x value width = 2,048 and is measured forward and backward over 32,768 tokens,
as 8 sequences of 4,096 and as one of 32,768; some rows as packed sequences of 64 to 4,096 as well.
Values are bfloat16 and drawn as layers make them: keys of the delta rules have unit length, decays
are log sigmoid / 16 (GLA) or -A dt (Mamba-2), RWKV-7's lie in (-0.61, 0). A decay a key is bfloat16
for flash-linear-attention (fla), as its layers hand it over, and float32 for ours, which asks for
that: the same numbers, twice the bytes.

A bar is the time in ms that ours should reach, on the GPU for 8 sequences and by the clock for one,
by fla's times on an H200 and by the bytes that have to be moved.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from edgelin.recurrences.delta import delta
from edgelin.recurrences.delta.reference import reference as delta_reference
from edgelin.recurrences.diagonal import diagonal
from edgelin.recurrences.diagonal.reference import forward as diagonal_reference
from edgelin.recurrences.dplr import dplr
from edgelin.recurrences.dplr.reference import reference as dplr_reference
from edgelin.recurrences.linear import linear
from edgelin.recurrences.linear.reference import forward as linear_reference

Inputs = dict[str, Tensor]
Call = Callable[[Inputs], tuple[Tensor, ...]]
EPS = 1e-6  # of the normaliser
RWKV_FASTEST = -0.6065306597126334  # -exp(-1/2)
STATES = ("state", "normalizer")
ENDS = "cu_seqlens"


@dataclass(frozen=True)
class Sizes:
    """Rows, tokens, heads and widths of a call; ``ends``: of sequences packed into its one row."""

    batch: int
    time: int
    heads: int
    key: int
    value: int
    ends: tuple[int, ...] = ()


class Draw:
    """Random inputs of one call.

    Args:
        sizes: Their sizes.
        device: Where to make them.
        gates: Dtype of a decay a key.
    """

    def __init__(self, sizes: Sizes, device: str, gates: torch.dtype) -> None:
        self.sizes, self.device, self.gates = sizes, device, gates
        self.generator = torch.Generator(device).manual_seed(0)
        self.rows = (sizes.batch, sizes.time, sizes.heads)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal, float32."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Uniform, float32."""
        unit = torch.rand(shape, generator=self.generator, device=self.device)
        return low + (high - low) * unit

    def qkv(self, *, unit: bool = False, positive: bool = False) -> Inputs:
        """Queries, keys and values."""
        q, k = (self.normal(*self.rows, self.sizes.key) for _ in range(2))
        if unit:
            q, k = (F.normalize(x, dim=-1) for x in (q, k))
        if positive:
            q, k = (F.elu(x) + 1 for x in (q, k))
        v = self.normal(*self.rows, self.sizes.value)
        return {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()}

    def log_sigmoid(self, *width: int, temperature: float = 16) -> Tensor:
        """Log decays of GLA, a head or a key."""
        return self._gate(F.logsigmoid(self.normal(*self.rows, *width)) / temperature)

    def step(self, *width: int) -> Tensor:
        """Log decays -A dt of Mamba-2: A in 1 to 16 a head, dt about 0.001 to 0.1."""
        rate = self.uniform(1, 16, self.sizes.heads, *[1] * len(width))
        dt = self.uniform(-6.9, -2.3, *width or (self.sizes.heads,)).exp()
        jitter = F.softplus(self.normal(*self.rows, *width))
        return self._gate((-rate * dt * jitter).clamp(min=-5))

    def rwkv(self) -> Inputs:
        """RWKV-7's, with a and b of a direction of unit length that is removed in part."""
        g = self._gate(RWKV_FASTEST * self.normal(*self.rows, self.sizes.key).sigmoid())
        direction = F.normalize(self.normal(*self.rows, self.sizes.key), dim=-1)
        share = self.normal(*self.rows, self.sizes.key).sigmoid()
        pair = {"a": -direction.bfloat16(), "b": (direction * share).bfloat16()}
        return {**self.qkv(), **pair, "g": g}

    def channels(self) -> Inputs:
        """One number a channel and its forget gate, as in HGRN."""
        width = self.sizes.value
        x = self.normal(*self.rows, width).bfloat16()
        return {"x": x[:, :, 0], "g": self.log_sigmoid(width, temperature=1)[:, :, 0]}

    def groups(self) -> Inputs:
        """Mamba-2's, one group of queries and keys for all heads."""
        inputs = self.qkv()
        shared = {name: inputs[name][:, :, :1].contiguous() for name in "qk"}
        return {**inputs, **shared, "g": self.step()}

    def beta(self) -> Tensor:
        """Writing strengths."""
        return self.normal(*self.rows).sigmoid().bfloat16()

    def _gate(self, g: Tensor) -> Tensor:
        """A decay a head is float32; one a key has the values of bfloat16 in any dtype."""
        return g if g.dim() == 3 else g.bfloat16().to(self.gates)


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
        heads: H.
        key: K.
        value: V.
        draw: Makes the inputs without states.
        calls: Forward by who runs it: ``ours``, ``fla`` or ``sdpa``. Gives o and the last states;
            without states among its inputs, fla's gives o only.
        reference: The same, token by token in the dtype of its inputs.
        bars: ms with 8 sequences of 4,096 (GPU) and with one of 32,768 (wall).
        normalized: Whether a normaliser is among the states.
        channels: Whether the state is a number for each of V channels, without heads.
    """

    heads: int
    key: int
    value: int
    draw: Callable[[Draw], Inputs]
    calls: dict[str, Call]
    reference: Call
    bars: tuple[float, float] | None = None
    normalized: bool = False
    channels: bool = False

    def inputs(
        self, who: str, sizes: Sizes, device: str, *, states: bool, random: bool = False
    ) -> Inputs:
        """Inputs of one call; ``states`` adds the initial ones, zero unless ``random``."""
        draw = Draw(sizes, device, torch.bfloat16 if who == "fla" else torch.float32)
        inputs = self.draw(draw)
        batch = sizes.batch
        if sizes.ends:  # ours reads them on the CPU, fla on the GPU
            inputs[ENDS] = torch.tensor(sizes.ends, device=device if who == "fla" else "cpu")
            batch = len(sizes.ends) - 1
        if not states or "sdpa" in self.calls:
            return inputs
        heads, key = sizes.heads, sizes.key
        shape = (batch, sizes.value, 1) if self.channels else (batch, heads, key, sizes.value)
        inputs["state"] = draw.normal(*shape) * random
        if self.normalized:
            inputs["normalizer"] = draw.normal(batch, heads, key).abs() * random
        return inputs


def packed_ends(time: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Ends of sequences of random lengths, the last one as long as there is room: the same ones
    at every call."""
    draw, ends = random.Random(0), [0]
    while ends[-1] < time:
        ends.append(min(time, ends[-1] + draw.randint(shortest, longest)))
    return tuple(ends)


def _scale(x: Inputs) -> float:
    return float(x["q"].shape[-1] ** -0.5)


def _ours_linear(x: Inputs) -> tuple[Tensor, ...]:
    z = x.get("normalizer")
    arguments = x["q"], x["k"], x["v"], x.get("g"), x["state"]
    return linear(*arguments, scale=_scale(x), normalizer=z, eps=EPS, cu_seqlens=x.get(ENDS))


def _true_linear(x: Inputs) -> tuple[Tensor, ...]:
    q, k, g, scale = x["q"], x["k"], x.get("g"), _scale(x)
    o, state = linear_reference(q, k, x["v"], g, x["state"], scale)
    if "normalizer" not in x:
        return o, state
    ones = torch.ones_like(k[..., :1])
    sums, z = linear_reference(q, k, ones, g, x["normalizer"][..., None], scale)
    return o / (sums + EPS), state, z[..., 0]


def _with(change: Callable[[Inputs], Inputs], call: Call) -> Call:
    """The call with inputs added or changed."""
    return lambda x: call({**x, **change(x)})


def _retention_decay(x: Inputs) -> Inputs:
    """log(1 - 2^(-5 - h)) for every token."""
    heads = torch.arange(x["q"].shape[2], device=x["q"].device, dtype=torch.float64)
    g = torch.log1p(-torch.exp2(-5 - heads)).to(torch.promote_types(x["q"].dtype, torch.float32))
    return {"g": g.expand(*x["q"].shape[:3])}


def _shared(x: Inputs) -> Inputs:
    """SSD's one group of queries and keys, for every head."""
    return {name: x[name].expand(-1, -1, x["v"].shape[2], -1) for name in "qk"}


def _ours_delta(x: Inputs) -> tuple[Tensor, ...]:
    arguments = x["q"], x["k"], x["v"], x["beta"], x.get("g"), x["state"]
    return delta(*arguments, scale=_scale(x), cu_seqlens=x.get(ENDS))


def _true_delta(x: Inputs) -> tuple[Tensor, ...]:
    arguments = x["q"], x["k"], x["v"], x["beta"], x.get("g"), x["state"]
    return delta_reference(*arguments, scale=_scale(x))


def _dplr(form: Callable[..., tuple[Tensor, ...]]) -> Call:
    def call(x: Inputs) -> tuple[Tensor, ...]:
        ends = {ENDS: x[ENDS]} if ENDS in x else {}
        return form(*(x[name] for name in ("q", "k", "v", "a", "b", "g", "state")), **ends)

    return call


def _diagonal(form: Callable[..., tuple[Tensor, ...]]) -> Call:
    """h_t = exp(g_t) h_{t-1} + x_t: input and output weights of one."""

    def call(x: Inputs) -> tuple[Tensor, ...]:
        one = torch.ones(x["x"].shape[-1], 1, dtype=x["state"].dtype, device=x["x"].device)
        return form(x["x"], one, one, x["g"].unsqueeze(-1), None, x["state"])

    return call


def _softmax(x: Inputs) -> tuple[Tensor, ...]:
    """Causal softmax attention by PyTorch; on a GPU through cuDNN, its fastest backend."""
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    backend = SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2),)


def _true_softmax(x: Inputs) -> tuple[Tensor, ...]:
    scores = torch.einsum("bthk,bshk->bhts", x["q"], x["k"]) * _scale(x)
    hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (torch.einsum("bhts,bshv->bthv", weights, x["v"]),)


def _fla(module: str, function: str, names: str = "q k v", **fixed: Any) -> Call:
    """A function of ``fla.ops``; ``names`` are its inputs, ``theirs=ours`` where they differ."""
    pairs = [name.rpartition("=")[::2] for name in names.split()]

    def call(x: Inputs) -> tuple[Tensor, ...]:
        run = getattr(importlib.import_module(f"fla.ops.{module}"), function)
        given = {theirs or ours: x[ours] for theirs, ours in pairs}
        given |= {ENDS: x[ENDS]} if ENDS in x else {}
        initial = x.get("state")
        o, state = run(
            **given, **fixed, initial_state=initial, output_final_state=initial is not None
        )
        return (o,) if initial is None else (o, state)

    return call


def _fla_normalized(x: Inputs) -> tuple[Tensor, ...]:
    run = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    states = (x["state"], x["normalizer"][:, None]) if "state" in x else None
    o, after = run(
        x["q"], x["k"], x["v"], initial_state=states, output_final_state=states is not None
    )
    return (o,) if states is None else (o, after[0], after[1][:, 0])


def _fla_channels(x: Inputs) -> tuple[Tensor, ...]:
    run = importlib.import_module("fla.ops.hgrn").chunk_hgrn
    initial = x["state"][..., 0] if "state" in x else None
    o, state = run(x["x"], x["g"], initial, initial is not None)
    return (o,) if initial is None else (o, state[..., None])


def _linear(width: int, draw: Callable[[Draw], Inputs], fla: Call, bar: float) -> Case:
    """A case of the linear recurrence with 2,048 / width heads."""
    calls = {"ours": _ours_linear, "fla": fla}
    return Case(2048 // width, width, width, draw, calls, _true_linear, (bar, bar))


def _retention(width: int, bar: float) -> Case:
    fla = _fla("retention", "chunk_retention")
    calls = {"ours": _with(_retention_decay, _ours_linear), "fla": fla}
    truth = _with(_retention_decay, _true_linear)
    return Case(2048 // width, width, width, Draw.qkv, calls, truth, (bar, bar))


def _delta(draw: Callable[[Draw], Inputs], fla: Call, bars: tuple[float, float]) -> Case:
    return Case(16, 128, 128, draw, {"ours": _ours_delta, "fla": fla}, _true_delta, bars)


def _rwkv() -> Case:
    fla = _fla(
        "rwkv7", "chunk_rwkv7", "r=q w=g k v a b", scale=1.0, safe_gate=True,
        lower_bound=RWKV_FASTEST, chunk_size=64,
    )  # fmt: skip
    calls = {"ours": _dplr(dplr), "fla": fla}
    return Case(32, 64, 64, Draw.rwkv, calls, _dplr(dplr_reference), (3.5, 3.5))


def _ssd() -> Case:
    fla = _with(_shared, _fla("simple_gla", "chunk_simple_gla", "q k v g"))
    calls = {"ours": _with(_shared, _ours_linear), "fla": fla}
    truth = _with(_shared, _true_linear)
    return Case(32, 128, 64, Draw.groups, calls, truth, (0.8, 0.8))


def _normalized() -> Case:
    calls: dict[str, Call] = {"ours": _ours_linear, "fla": _fla_normalized}
    draw = lambda d: d.qkv(positive=True)  # noqa: E731
    return Case(16, 128, 128, draw, calls, _true_linear, (1.0, 1.0), normalized=True)


def _channels() -> Case:
    calls = {"ours": _diagonal(diagonal), "fla": _fla_channels}
    truth = _diagonal(diagonal_reference)
    return Case(1, 1, 2048, Draw.channels, calls, truth, (0.42, 0.42), channels=True)


def _attention(width: int) -> Case:
    return Case(2048 // width, width, width, Draw.qkv, {"sdpa": _softmax}, _true_softmax)


def _gla(width: int) -> Case:
    fla = _fla("gla", "chunk_gla", "q k v g")
    return _linear(width, lambda d: {**d.qkv(), "g": d.log_sigmoid(d.sizes.key)}, fla, 2.0)


def _wide(draw: Callable[[Draw], Inputs]) -> Case:
    """As the models of ``model.py`` have it: values twice as wide as keys."""
    return Case(8, 128, 256, draw, {"ours": _ours_linear}, _true_linear)


def _scalar(width: int, bar: float) -> Case:
    fla = _fla("simple_gla", "chunk_simple_gla", "q k v g")
    return _linear(width, lambda d: {**d.qkv(), "g": d.log_sigmoid()}, fla, bar)


_UNGATED = _fla("linear_attn", "chunk_linear_attn", normalize=False)
CASES = {
    "linear-128": _linear(128, Draw.qkv, _UNGATED, 0.8),
    "linear-64": _linear(64, Draw.qkv, _UNGATED, 0.55),
    "retention-128": _retention(128, 0.8),
    "retention-64": _retention(64, 0.55),
    "scalar-128": _scalar(128, 0.8),
    "scalar-64": _scalar(64, 0.55),
    "normalized-128": _normalized(),
    "ssd": _ssd(),
    "gla-128": _gla(128),
    "gla-64": _gla(64),
    "scalar-128x256": _wide(lambda d: {**d.qkv(), "g": d.log_sigmoid()}),
    "gla-128x256": _wide(lambda d: {**d.qkv(), "g": d.log_sigmoid(d.sizes.key)}),
    "delta-128": _delta(
        lambda d: {**d.qkv(unit=True), "beta": d.beta()},
        _fla("delta_rule", "chunk_delta_rule", "q k v beta"),
        (1.6, 2.2),
    ),
    "gated-delta-128": _delta(
        lambda d: {**d.qkv(unit=True), "beta": d.beta(), "g": d.step()},
        _fla("gated_delta_rule", "chunk_gated_delta_rule", "q k v g beta"),
        (1.8, 2.2),
    ),
    "kda-128": _delta(
        lambda d: {**d.qkv(unit=True), "beta": d.beta(), "g": d.step(d.sizes.key)},
        _fla("kda", "chunk_kda", "q k v g beta", safe_gate=True),
        (3.0, 3.0),
    ),
    "rwkv7-64": _rwkv(),
    "diagonal": _channels(),
    "softmax-128": _attention(128),
    "softmax-64": _attention(64),
}
