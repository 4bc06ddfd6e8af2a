"""Packed sequences (``cu_seqlens``): each gives what its own float64 loop gives, alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from comparisons import error
from torch import Tensor
from torch.nn import functional as F

from edgelin.recurrences import packed
from edgelin.recurrences.conv import reference as conv_loop
from edgelin.recurrences.conv import short_convolution
from edgelin.recurrences.delta import delta
from edgelin.recurrences.delta.reference import reference as delta_loop
from edgelin.recurrences.diagonal import diagonal
from edgelin.recurrences.diagonal.reference import forward as diagonal_loop
from edgelin.recurrences.dplr import dplr
from edgelin.recurrences.dplr.reference import reference as dplr_loop
from edgelin.recurrences.linear import linear
from edgelin.recurrences.linear.reference import forward as linear_loop

Draw = Callable[..., Tensor]
Inputs = dict[str, Any]
H, K, V, SCALE = 2, 6, 5, 0.5
LENGTHS = [65, 0, 1, 130, 64, 63, 1, 64]
STATES = ("state", "normalizer")


def qkv(draw: Draw, time: int, count: int) -> Inputs:
    """Inputs of a matrix state, with keys of unit length."""
    k = F.normalize(draw(1, time, H, K), dim=-1)
    v, state = draw(1, time, H, V), draw(count, H, K, V)
    return {"q": draw(1, time, H, K), "k": k, "v": v, "state": state}


def gated(draw: Draw, time: int, count: int, *width: int) -> Inputs:
    """And a decay, a head or a key."""
    return qkv(draw, time, count) | {"g": -0.3 * draw(1, time, H, *width).abs()}


def written(make: Any, draw: Draw, time: int, count: int, *width: int) -> Inputs:
    """And a strength for the delta rule."""
    return make(draw, time, count, *width) | {"beta": draw(1, time, H).sigmoid()}


def generalised(draw: Draw, time: int, count: int) -> Inputs:
    """RWKV-7's."""
    a, b = (F.normalize(draw(1, time, H, K), dim=-1) for _ in range(2))
    return gated(draw, time, count, K) | {"a": a, "b": b}


def bonus(draw: Draw, time: int, count: int) -> Inputs:
    """RWKV-6's."""
    return gated(draw, time, count, K) | {"bonus": draw(H, K)}


def normalized(draw: Draw, time: int, count: int) -> Inputs:
    """Positive keys and queries and a normaliser."""
    made = gated(draw, time, count)
    positive = {name: made[name].abs() + 0.1 for name in "qk"}
    return made | positive | {"normalizer": draw(count, H, K).abs()}


def floored(draw: Draw, time: int, count: int) -> Inputs:
    """mLSTM's: keys of both signs."""
    floor = 1 + draw(1, time, H).abs()
    return gated(draw, time, count) | {"normalizer": draw(count, H, K), "floor": floor}


def channels(modes: str, *pair: int) -> Callable[..., Inputs]:
    """A diagonal state; ``modes`` of Λ, b and c: constant, shared by channels, or each."""

    def make(draw: Draw, time: int, count: int) -> Inputs:
        shapes = {"c": (3, 2), "s": (1, time, 1, 2), "e": (1, time, 3, 2)}
        made = {"x": draw(1, time, 3), "g": -0.3 * draw(*shapes[modes[0]]).abs()}
        if pair:
            made["theta"] = draw(*shapes[modes[0]])
        made |= {n: draw(*shapes[mode], *pair) for n, mode in zip("bc", modes[1:], strict=True)}
        return made | {"state": draw(count, 3, 2, *pair)}

    return make


def taps(draw: Draw, time: int, count: int) -> Inputs:
    """A short convolution."""
    constant = {"weight": draw(3, 4), "bias": draw(3)}
    return {"x": draw(1, time, 3), "state": draw(count, 3, 3)} | constant


def true_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    bonus: Tensor | None = None,
    normalizer: Tensor | None = None,
    floor: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, ...]:
    """The loop with what may be around it."""
    o, after = linear_loop(q, k, v, g, state, SCALE, bonus is not None)
    if bonus is not None:
        return o + SCALE * (q * bonus * k).sum(-1, keepdim=True) * v, after
    if normalizer is None:
        return o, after
    ones = torch.ones_like(v[..., :1])
    sums, z = linear_loop(q, k, ones, g, normalizer[..., None], SCALE)
    if floor is not None:
        sums = torch.maximum(sums.abs(), floor[..., None])
    return o / (sums + eps), after, z[..., 0]


OURS: dict[str, tuple[Any, Any]] = {
    "linear": (partial(linear, scale=SCALE), true_linear),
    "exact": (partial(linear, scale=SCALE, eps=0.0), partial(true_linear, eps=0.0)),
    "delta": (partial(delta, scale=SCALE), partial(delta_loop, scale=SCALE)),
    "dplr": (partial(dplr, scale=SCALE), partial(dplr_loop, scale=SCALE)),
    "diagonal": (diagonal, diagonal_loop),
    "conv": tuple(
        partial(form, activation="silu")
        for form in (short_convolution, conv_loop.short_convolution)
    ),
}
CASES: dict[str, Callable[..., Inputs]] = {
    "linear none": qkv,
    "linear head": gated,
    "linear key": lambda *a: gated(*a, K),
    "linear bonus": bonus,
    "exact normalizer": normalized,
    "linear floor": floored,
    "delta none": lambda *a: written(qkv, *a),
    "delta head": lambda *a: written(gated, *a),
    "delta key": lambda *a: written(gated, *a, K),
    "dplr": generalised,
    "diagonal real": channels("ccc"),
    "diagonal complex": channels("ccc", 2),
    "diagonal selective": channels("ess"),
    "diagonal selective complex": channels("sec", 2),
    "conv": taps,
}


def inputs(case: str, lengths: list[int]) -> Inputs:
    """Random inputs of packed sequences; their states are not zero."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    made = CASES[case](draw, sum(lengths), len(lengths))
    none = {"g": None} if case.startswith(("linear", "delta")) and "g" not in made else {}
    none |= {"theta": None} if case.startswith("diagonal") and "theta" not in made else {}
    return made | none


def ends(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Their ``cu_seqlens``."""
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def one_by_one(loop: Any, made: Inputs, lengths: list[int]) -> tuple[Tensor, ...]:
    """The loop over every sequence alone."""
    outputs, states, begin = [], [], 0
    for n, length in enumerate(lengths):
        mine = {name: x[n : n + 1] for name, x in made.items() if name in STATES}
        after = tuple(mine.values())
        if length:
            for name, x in made.items():
                if name not in STATES:
                    by_step = x is not None and x.dim() > 2 and x.shape[:2] == (1, sum(lengths))
                    mine[name] = x[:, begin : begin + length] if by_step else x
            o, *after = loop(**mine)
            outputs.append(o)
        states.append(after)
        begin += length
    return torch.cat(outputs, dim=1), *(torch.cat(kind) for kind in zip(*states, strict=True))


def with_gradients(call: Any, made: Inputs) -> dict[str, Tensor]:
    """Outputs, states and the gradients of every input, by name."""
    leaves = {n: None if x is None else x.clone().requires_grad_() for n, x in made.items()}
    results = call(leaves)
    generator = torch.Generator().manual_seed(1)
    ups = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in results]
    given = {n: x for n, x in leaves.items() if x is not None}
    ups = [up.to(y.device, y.dtype) for up, y in zip(ups, results, strict=True)]
    grads = torch.autograd.grad(results, list(given.values()), ups)
    named = dict(zip(("o", *(n for n in STATES if n in made)), results, strict=True))
    return named | {f"d{n}": grad for n, grad in zip(given, grads, strict=True)}


def check(
    case: str,
    lengths: list[int],
    bound: float,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> None:
    """Compare with the loop, in float64 throughout; ``dtype`` and ``device`` are ours."""
    ours, loop = OURS[case.split()[0]]
    made = inputs(case, lengths)
    given = {n: None if x is None else x.to(device, dtype) for n, x in made.items()}
    expected = with_gradients(lambda x: one_by_one(loop, x, lengths), made)
    found = with_gradients(lambda x: ours(**x, cu_seqlens=ends(lengths)), given)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert error(found[name], value) < bound, name


@pytest.mark.parametrize("case", CASES)
def test_every_sequence_is_its_own_loop(case: str) -> None:
    check(case, LENGTHS, 1e-11)


@pytest.mark.parametrize("case", CASES)
def test_padding_is_not_seen(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one group, where a call costs as much as a great many tokens."""
    monkeypatch.setitem(packed.GROUP, "cpu", 10**6)
    check(case, [3, 0, 66, 1], 1e-11)


@pytest.mark.parametrize("lengths", [[1], [130], [7, 7, 7], [0, 5, 0], [9, 2, 9, 0], [1, 1, 70]])
def test_few_sequences(lengths: list[int]) -> None:
    check("delta head", lengths, 1e-11)
    check("conv", lengths, 1e-11)


@pytest.mark.parametrize("case", ["linear key", "exact normalizer", "delta head", "dplr", "conv"])
def test_float32(case: str) -> None:
    check(case, [65, 0, 1, 64, 7], 2e-5, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dtypes(dtype: torch.dtype) -> None:
    """bfloat16 values give bfloat16 outputs and float32 states, by either kind of numbers."""
    made = inputs("linear head", [5, 70])
    half = {n: x.bfloat16() for n, x in made.items() if n in "qkv"}
    wide = {n: made[n].float() for n in ("g", "state")}
    o, after = linear(**half, **wide, scale=SCALE, cu_seqlens=ends([5, 70], dtype))
    assert (o.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    made |= {n: x.double() for n, x in half.items()}
    expected = one_by_one(true_linear, made, [5, 70])
    assert error(o, expected[0]) < 1e-2 and error(after, expected[1]) < 1e-2


def test_a_sequence_does_not_see_nan_of_another() -> None:
    made = inputs("linear head", LENGTHS)
    whole, states = linear(**made, cu_seqlens=ends(LENGTHS))
    made["v"][:, 66:] = torch.nan  # the fourth one and those behind it
    o, after = linear(**made, cu_seqlens=ends(LENGTHS))
    assert torch.equal(o[:, :66], whole[:, :66]) and torch.equal(after[:3], states[:3])
    assert after[3].isnan().any()


def test_training_after_inference() -> None:
    """What is kept from call to call can be trained with, whoever was first."""

    def call(x: Tensor, state: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return x, state * lengths[:, None]  # autograd keeps the lengths

    x, state = torch.ones(1, 43, 2), torch.ones(3, 4)
    with torch.inference_mode():
        packed.run(call, (x,), state, ends([20, 1, 22]))
    state.requires_grad_()
    packed.run(call, (x,), state, ends([20, 1, 22]))[1].sum().backward()
    assert state.grad is not None and state.grad[:, 0].tolist() == [20, 1, 22]


def test_sequences_of_one_length_are_one_call_without_a_copy() -> None:
    seen: list[tuple[int, ...]] = []
    x, state = torch.randn(1, 21, 2), torch.randn(3, 4)

    def call(x: Tensor, state: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        seen.append((x.data_ptr(), *x.shape))
        assert lengths is None
        return x, state

    o, after = packed.run(call, (x,), state, ends([7, 7, 7]))
    assert seen == [(x.data_ptr(), 3, 7, 2)]
    assert o.data_ptr() == x.data_ptr() and after.data_ptr() == state.data_ptr()


def least(lengths: list[int], fixed: int) -> int:
    """Cost of the best groups, by trying all ways to cut the sorted lengths."""
    if not lengths:
        return 0
    ways = range(1, len(lengths) + 1)
    return min(fixed + n * lengths[n - 1] + least(lengths[n:], fixed) for n in ways)


@pytest.mark.parametrize("fixed", [1, 100, 1000, 10**5])
def test_groups_cost_the_least(fixed: int) -> None:
    lengths = [64, 64, 128, 192, 512, 576, 640, 1024, 2048, 2048]
    cuts = packed._cuts(lengths[::-1], fixed)
    rows = [sum(low < n <= high for n in lengths) for low, high in pairwise([0, *cuts])]
    assert sum(rows) == len(lengths)
    cost = sum(fixed + n * longest for n, longest in zip(rows, cuts, strict=True))
    assert cost == least(lengths, fixed)


def test_thousands_of_lengths_are_few_groups() -> None:
    lengths = list(range(1, 5000))
    cuts = packed._cuts(lengths, packed.GROUP["cpu"])
    assert len(cuts) <= packed.LENGTHS and cuts[-1] == 4999
    padded = sum((high - low) * high for low, high in pairwise([0, *cuts]))
    assert padded < 1.05 * sum(lengths)


@pytest.mark.parametrize(
    "numbers, message",
    [
        ([0, 4, 9], r"cu_seqlens goes from 0 to 9, need 0 to T = 10, at least 1, never falling"),
        ([1, 4, 10], r"cu_seqlens goes from 1 to 10, need 0 to T = 10"),
        ([0, 6, 4, 10], r"cu_seqlens goes from 0 to 10 and falls between, need 0 to T = 10"),
        ([0], r"cu_seqlens is \(1,\), torch.int64, need \[N \+ 1\] of int32 or int64, N >= 1"),
        ([[0, 10]], r"cu_seqlens is \(1, 2\), torch.int64, need"),
        ([0.0, 4.0, 10.0], r"cu_seqlens is \(3,\), torch.float32, need"),
        ([0, 4, 6, 10], r"a state is \(2, 2, 6, 5\), need a row for each of 3 sequences"),
    ],
)
def test_wrong_ends_are_refused(numbers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        linear(**inputs("linear head", [4, 6]), cu_seqlens=torch.tensor(numbers))
    assert "\n" not in str(refused.value)


def test_rows_and_lengths_are_refused() -> None:
    made = inputs("delta none", [4, 6])
    cu_seqlens = ends([4, 6])
    rows = {name: x.expand(2, *x.shape[1:]) if name in "q k v beta" else x
            for name, x in made.items()}  # fmt: skip
    with pytest.raises(ValueError, match=r"is \(2, 10, 2, 6\), with cu_seqlens all need \[1, 10"):
        delta(**rows, cu_seqlens=cu_seqlens)
    for case in ("linear none", "delta none", "dplr", "diagonal real", "conv"):
        with pytest.raises(ValueError, match="cu_seqlens and lengths are both given"):
            OURS[case.split()[0]][0](
                **inputs(case, [4, 6]), cu_seqlens=cu_seqlens, lengths=torch.tensor([10])
            )


def test_compiled_around() -> None:
    """torch.compile breaks its graph at the call; what is before and behind it is compiled."""
    made = inputs("linear head", [4, 66])
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def layer(v: Tensor, ends: Tensor) -> Tensor:
        return linear(**(made | {"v": 2 * v}), cu_seqlens=ends)[0] + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend)
    for lengths in ([4, 66], [33, 37]):
        torch.testing.assert_close(
            compiled(made["v"], ends(lengths)), layer(made["v"], ends(lengths))
        )
    assert len(graphs) == 2
    torch._dynamo.reset()  # else it takes what was compiled
    with pytest.raises(Exception, match="Python reads the lengths of packed sequences"):
        torch.compile(layer, backend=backend, fullgraph=True)(made["v"], ends([4, 66]))
    torch._dynamo.reset()


def test_interpreted_kernel(device: str) -> None:
    """The kernel of a GPU, which is given zeros behind the ends, not lengths."""
    from edgelin.recurrences.linear import kernel

    lengths = [5, 0, 18, 1]
    made = inputs("linear head", lengths)
    names = ("q", "k", "v", "g")
    steps, state = [made[n].float().to(device) for n in names], made["state"].float().to(device)

    def call(*x: Any) -> tuple[Tensor, Tensor]:
        o, last, _ = kernel.forward(*x[:-1], SCALE)
        return o, last

    results = packed.run(call, steps, state, ends(lengths))
    for found, expected in zip(results, one_by_one(true_linear, made, lengths), strict=True):
        assert error(found, expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fixed", [1, 10**6])
def test_on_a_gpu(case: str, fixed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packed.GROUP, "cuda", fixed)
    check(case, LENGTHS, 1e-4, torch.float32, "cuda")
