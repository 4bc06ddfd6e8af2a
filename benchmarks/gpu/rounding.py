"""What the roundings of the kernels with a decay a key do to outputs and gradients, on a CPU.

    python benchmarks/gpu/rounding.py

The chunked form in float32, rounded to bfloat16: queries and keys with their decays, the state
before it is read, scores, results. A line is a way to round less, by taking some of these in two
bfloat16 parts (one product more each), and the relative norms of the differences from float64: of
the output, the last state and all gradients. `recurrences/linear/kernel_passes.py` rounds as the
line `sums`: dq and dk read the state in two parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from edgelin.recurrences import CHUNK

HEADS, TIME, WIDTH = 2, 300, 128
SCALE = WIDTH**-0.5
Round = Callable[[Tensor], Tensor]


def once(x: Tensor) -> Tensor:
    """Rounded to bfloat16."""
    return x.bfloat16().float()


def twice(x: Tensor) -> Tensor:
    """The same in two parts."""
    return once(x) + once(x - once(x))


def results(inputs: list[Tensor], ups: list[Tensor], rounds: dict[str, Round]) -> list[Tensor]:
    """o, the last state, dq, dk, dv, dg and the gradient of the initial state.

    ``rounds`` says how q, k (with their decays), the state, the one of which dg is made (``sums``),
    and scores are rounded; once where nothing is said.
    """
    q, k, v, g, state = (x.float() for x in inputs)
    do, dstate = (x.float() for x in ups)
    by = {n: rounds.get(n, once) for n in ("q", "k", "state", "sums", "scores")}
    o, dq, dk, dv, dg, share = (torch.zeros_like(q) for _ in range(6))
    pieces = [slice(i, min(i + CHUNK, TIME)) for i in range(0, TIME, CHUNK)]
    total = [g[:, t].cumsum(1) for t in pieces]
    middle = [x[:, min(CHUNK // 2, x.shape[1]) - 1, :, None] for x in total]
    apart = [x - m.mT for x, m in zip(total, middle, strict=True)]
    near = [
        (by["q"](q[:, t] * c.exp()), by["k"](k[:, t] * (-c).exp()))
        for t, c in zip(pieces, apart, strict=True)
    ]
    for n, t in enumerate(pieces):
        qn, kn = near[n]
        at = state * middle[n].exp()
        seen = torch.ones(qn.shape[1], qn.shape[1]).tril()
        o[:, t] = SCALE * (qn @ by["state"](at) + by["scores"](qn @ kn.mT * seen) @ v[:, t])
        out = by["scores"](do[:, t] @ v[:, t].mT * seen) @ kn
        out = SCALE * (out + do[:, t] @ by["sums"](at).mT)
        dq[:, t], share[:, t] = out * apart[n].exp(), out * qn
        state = (at + once(kn).mT @ v[:, t]) * (total[n][:, -1, :, None] - middle[n]).exp()
    last, after = state, dstate / SCALE
    carry = SCALE * (last * after).sum(2)
    for n, t in reversed(list(enumerate(pieces))):
        qn, kn = near[n]
        at = after * (total[n][:, -1, :, None] - middle[n]).exp()
        seen = torch.ones(qn.shape[1], qn.shape[1]).triu()
        out = by["scores"](v[:, t] @ do[:, t].mT * seen) @ qn
        out = SCALE * (out + v[:, t] @ by["sums"](at).mT)
        dk[:, t] = out * (-apart[n]).exp()
        dv[:, t] = SCALE * (kn @ by["state"](at) + by["scores"](kn @ qn.mT * seen) @ do[:, t])
        parts = share[:, t] - out * kn
        dg[:, t] = carry[:, None] + parts.flip(1).cumsum(1).flip(1)
        carry = carry + parts.sum(1)
        after = (at + once(qn).mT @ do[:, t]) * middle[n].exp()
    return [once(o), last, once(dq), once(dk), once(dv), dg, SCALE * after]


def truth(inputs: list[Tensor], ups: list[Tensor]) -> list[Tensor]:
    """The same by the recurrence in float64."""
    leaves = [x.double().requires_grad_() for x in inputs]
    q, k, v, g, state = leaves
    outputs = []
    for t in range(TIME):
        state = state * g[:, t, :, None].exp() + k[:, t, :, None] * v[:, t, None, :]
        outputs.append(SCALE * torch.einsum("hk,hkv->hv", q[:, t], state))
    made = [torch.stack(outputs, 1), state]
    grads = torch.autograd.grad(made, leaves, [x.double() for x in ups])
    return [*(x.detach() for x in made), *grads]


def main() -> None:
    """Print a line for every way."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(HEADS, TIME, WIDTH).bfloat16() for _ in range(4))
    g = logsigmoid(torch.randn(HEADS, TIME, WIDTH)) / 16
    state, dstate = (torch.randn(HEADS, WIDTH, WIDTH) for _ in range(2))
    inputs, ups = [q, k, v, g, state], [do, dstate]
    expected = truth(inputs, ups)
    names = ("o", "state", "dq", "dk", "dv", "dg", "dstate")
    print(f"{'in two parts':30}" + "".join(f"{name:>9}" for name in names))
    ways = ["", "sums", "sums q", "sums q k", "sums q k state", "sums q k state scores"]
    for way in ways:
        found = results(inputs, ups, dict.fromkeys(way.split(), twice))
        errors = [
            float((x.double() - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True)
        ]
        print(f"{way or 'nothing':30}" + "".join(f"{error:9.1e}" for error in errors))


if __name__ == "__main__":
    main()
