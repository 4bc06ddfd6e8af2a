"""Linear recurrence on a GPU: block sizes and launches of the kernels in ``kernel_passes.py``.

The output and every gradient are one kernel each, run over segments of time in parallel from the
state before each segment (segment scan; equations in ``chunked.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from edgelin.recurrences.launches import Choice, Launch, cdiv, choose, planned, power_of_2
from edgelin.recurrences.linear import kernel_by_key, kernel_decays, kernel_passes

NONE, HEAD, KEY = (
    mode.value for mode in (kernel_decays.NONE, kernel_decays.HEAD, kernel_decays.KEY)
)
SEGMENT = 512  # shortest segment in tokens: below, passing states costs more than it gains
PROGRAMS = 256  # programs that fill a large GPU; more segments than that take are not made


@dataclass(frozen=True, eq=False)
class Pass:
    """What ``kernel_passes.attend`` computes (see its module docstring), of which tensors."""

    name: str
    a: str
    x: str
    y: str
    inner: bool
    reverse: bool
    m: str = ""  # what the result is multiplied with for the decay's gradient


OUTPUT = Pass("o", "q", "v", "k", inner=True, reverse=False)
DQ = Pass("dq", "do", "v", "k", inner=False, reverse=False, m="q")
DK = Pass("dk", "v", "do", "q", inner=False, reverse=True, m="k")
DV = Pass("dv", "k", "do", "q", inner=True, reverse=True)

_NAMES = {NONE: "none", HEAD: "head", KEY: "key"}


class Split(NamedTuple):
    """Queries and keys without the decays between tokens of a chunk (``kernel_passes.split``)."""

    q: Tensor
    k: Tensor
    exponents: Tensor  # float32 [B, T, H, K]
    first: Tensor  # log decays of half chunks, float32 [B * H, N, K]
    second: Tensor
    far: Tensor  # marks of segments, int32 [B * H, segments]


def launch_of(name: str, mode: int, half: bool, width_x: int, width_y: int) -> Choice:
    """Block over the width that is cut (BLOCK) and warps of a pass or of ``segment``.

    By a rule read off the compiler's register counts: larger tiles spill, above all in float32.
    """
    inner = name in ("o", "dv")
    contracted, width = (width_y, width_x) if inner else (width_x, width_y)
    whole = whole_of(contracted)
    cells = 16384 if half and (mode == NONE or (mode == KEY and inner)) else 8192
    block = max(16, min(power_of_2(width), cells // whole))
    few = half and whole * block <= 8192
    rule = {"BLOCK": block, "num_warps": 4 if few else 8, "num_stages": 2 if half else 1}
    if name == "segment":
        rule = {"BLOCK": max(16, min(whole, 64)), "num_warps": 4, "num_stages": 2 if half else 1}
    if not half:
        return rule
    chosen = choose(f"linear {_NAMES[mode]} {name} {width_x}x{width_y}", rule)
    if name == DK.name and mode == HEAD:  # both add to one sum a block of K
        return chosen | {"BLOCK": launch_of(DQ.name, mode, half, width_x, width_y)["BLOCK"]}
    return chosen


def far_launch(kind: Pass, half: bool, width_x: int, width_y: int) -> Choice:
    """The same for ``kernel_by_key.attend``, with the tokens of a chunk (BT)."""
    contracted, width = (width_y, width_x) if kind.inner else (width_x, width_y)
    block = max(16, min(power_of_2(width), 8192 // whole_of(contracted)))
    return {"BLOCK": block, "BT": 64 if half else 16, "num_warps": 8, "num_stages": 1}


def whole_of(width: int) -> int:
    """Block over a side that is not cut."""
    return max(16, power_of_2(width))


class Shape(NamedTuple):
    """What the launches of a call depend on."""

    batch: int
    time: int
    heads: int
    key: int
    value: int
    key_heads: int  # 1 where one head of queries and keys serves all
    mode: int
    half: bool  # whether all tensors are bfloat16
    on_gpu: bool
    scale: float


class Plan:
    """Sizes and launches of all calls of a shape.

    Time is cut into ``segments`` of ``chunks`` chunks of ``block_t`` tokens.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.rows = shape.batch * shape.heads
        self.block_t = 64 if shape.half else 16
        segments = max(1, min(shape.time // SEGMENT, cdiv(PROGRAMS, self.rows)))
        self.chunks = cdiv(cdiv(shape.time, self.block_t), segments)
        self.segments = cdiv(shape.time, self.chunks * self.block_t)
        self.splits = shape.mode == KEY and shape.half
        # Where `split` marks no segments, `kernel_by_key` takes all or none.
        self.by_key = shape.mode == KEY and not shape.half
        # Triton's interpreter multiplies bfloat16 wrongly: on the CPU products are float32.
        self.dtypes = {
            "DT": tl.bfloat16 if shape.half and shape.on_gpu else tl.float32,
            "PT": tl.bfloat16 if shape.on_gpu else tl.float32,
            "PARTS": 2 if shape.half else 3,
        }
        # Differences of float64 sums are exact enough in float32, those of float32 in bfloat16.
        self.wide = tl.float32 if shape.half else tl.float64

    def width(self, name: str) -> int:
        """Of a tensor, by its name."""
        return self.shape.key if name in ("q", "k") else self.shape.value

    def widths(self, kind: Pass) -> tuple[int, int]:
        """Of x and y."""
        return self.width(kind.x), self.width(kind.y)

    def rule(self, kind: Pass) -> Choice:
        """How a pass is launched."""
        return launch_of(kind.name, self.shape.mode, self.shape.half, *self.widths(kind))

    @planned
    def split(self) -> Launch:
        """Of ``kernel_passes.split``."""
        time, heads, key = self.shape[1:4]
        rule = {"BK": min(64, whole_of(key)), "num_warps": 4}
        chosen = choose(f"linear key split {key}", rule)
        return Launch(
            kernel_passes.split,
            (self.rows * cdiv(time, self.block_t), cdiv(key, chosen["BK"])),
            time, self.chunks,
            H=heads, K=key, BT=self.block_t, PT=self.dtypes["PT"], PARTS=3, **chosen,
        )  # fmt: skip

    @planned
    def scan(self, kind: Pass) -> Launch:
        """Of ``kernel_passes.scan``."""
        x, y = self.widths(kind)
        return Launch(
            kernel_passes.scan, (self.rows, cdiv(x * y, 1024)),
            self.segments, 1.0 / self.shape.scale if kind.reverse else 1.0,
            X=x, Y=y, BLOCK=1024, MODE=self.shape.mode, REV=kind.reverse, num_warps=4,
        )  # fmt: skip

    @planned
    def segment(self, kind: Pass, far: bool) -> Launch:
        """Of ``segment``, near or ``far``."""
        x, y = self.widths(kind)
        chosen = launch_of("segment", self.shape.mode, self.shape.half, x, y)
        block_x, block_y = (min(whole_of(w), chosen["BLOCK"]) for w in (x, y))
        grid = (self.rows, self.segments, cdiv(x, block_x) * cdiv(y, block_y))
        sizes = {"H": self.shape.heads, "X": x, "Y": y, "BX": block_x, "BY": block_y}
        if not far:
            return Launch(
                kernel_passes.segment, grid, self.shape.time, self.chunks, **sizes,
                HY=self.shape.key_heads, BT=self.block_t, MODE=self.shape.mode, REV=kind.reverse,
                DT=self.dtypes["DT"], WIDE=self.wide,
                num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
            )  # fmt: skip
        block_t = far_launch(kind, self.shape.half, x, y)["BT"]
        return Launch(
            kernel_by_key.segment, grid, self.shape.time, self.chunks * self.block_t // block_t,
            **sizes, BT=block_t, ALL=self.by_key, REV=kind.reverse, **self.dtypes,
            num_warps=4, num_stages=1,
        )  # fmt: skip

    @planned
    def near(self, kind: Pass, weigh: bool) -> Launch:
        """Of ``kernel_passes.attend``; ``weigh``: with weights."""
        chosen, shape = self.rule(kind), self.shape
        return Launch(
            kernel_passes.attend, self._grid(kind, chosen["BLOCK"]), shape.time, self.chunks,
            *self._starts(kind), shape.batch * shape.time * shape.heads,
            **self._blocks(kind, chosen["BLOCK"]), HY=shape.key_heads, BT=self.block_t,
            MODE=shape.mode, INNER=kind.inner, REV=kind.reverse, WEIGH=weigh, WIDE=self.wide,
            **self.dtypes, num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
        )  # fmt: skip

    @planned
    def far(self, kind: Pass, weigh: bool) -> Launch:
        """Of ``kernel_by_key.attend``."""
        chosen = far_launch(kind, self.shape.half, *self.widths(kind))
        block_t = chosen["BT"]
        return Launch(
            kernel_by_key.attend, self._grid(kind, chosen["BLOCK"]),
            self.shape.time, self.chunks * self.block_t // block_t, *self._starts(kind),
            **self._blocks(kind, chosen["BLOCK"]), BT=block_t, ALL=self.by_key,
            INNER=kind.inner, REV=kind.reverse, WEIGH=weigh, LEVELS=block_t.bit_length() - 1,
            **self.dtypes, num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
        )  # fmt: skip

    def _starts(self, kind: Pass) -> tuple[float, float, int, int, int, int, int]:
        """Factors of the state before a segment and of the output, and the former's strides: of
        batch and head, segment, X, Y, and to the next state."""
        x, y = self.widths(kind)
        if self.segments == 1:
            factor = 1.0 / self.shape.scale if kind.reverse else 1.0
            return factor, self.shape.scale, x * y, 0, 1, x, 0
        return 1.0, self.shape.scale, (self.segments + 1) * x * y, x * y, y, 1, x * y

    def _blocks(self, kind: Pass, block: int) -> dict[str, int]:
        """Sizes and blocks of a pass."""
        x, y = self.widths(kind)
        block_x, block_y = (block, whole_of(y)) if kind.inner else (whole_of(x), block)
        return {"H": self.shape.heads, "X": x, "Y": y, "BX": block_x, "BY": block_y}

    def _grid(self, kind: Pass, block: int) -> tuple[int, int, int]:
        """Programs of a pass."""
        return self.rows, self.segments, cdiv(self.width(kind.x if kind.inner else kind.y), block)


plan_of = planned(Plan)


class Walk:
    """The passes of one call over its segments.

    Args:
        tensors: q, k ``[B, T, H, K]``, v and backwards do ``[B, T, H, V]``, contiguous, by name;
            q and k of one head serve all.
        g: Log decay ``[B, T, H]``, ``[B, T, H, K]`` or None, contiguous.
        scale: Factor of the output; backwards it multiplies what a pass adds to the state too.
    """

    def __init__(self, tensors: dict[str, Tensor], g: Tensor | None, scale: float) -> None:
        self.tensors, self.g = tensors, g
        half = all(x.dtype == torch.bfloat16 for x in tensors.values())
        q, (batch, time, heads, value) = tensors["q"], tensors["v"].shape
        mode = NONE if g is None else HEAD if g.dim() == 3 else KEY
        self.plan = plan_of(
            Shape(batch, time, heads, q.shape[3], value, q.shape[2], mode, half, q.is_cuda, scale)
        )
        self.split = self._split() if self.plan.splits else None

    def _split(self) -> Split:
        """Take the decays between tokens out of queries and keys."""
        q, k, g, plan = self.tensors["q"], self.tensors["k"], self.g, self.plan
        assert g is not None
        halves = (plan.rows, cdiv(plan.shape.time, plan.block_t), plan.shape.key)
        first, second = (g.new_empty(halves, dtype=torch.float32) for _ in range(2))
        exponents = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        far = torch.zeros(plan.rows, plan.segments, dtype=torch.int32, device=q.device)
        made = Split(torch.empty_like(q), torch.empty_like(k), exponents, first, second, far)
        plan.split()(q, k, g, *made)
        return made

    def _near(self, name: str) -> Tensor:
        """A tensor, without the decays between its tokens."""
        if self.split is None or name not in ("q", "k"):
            return self.tensors[name]
        return self.split.q if name == "q" else self.split.k

    def _halves(self, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Log decays on the way into a chunk and out of it, and the marks of segments."""
        if self.split is None:
            nothing = self.tensors["q"]
            return nothing, nothing, nothing
        first, second, far = self.split[3:]
        return (second, first, far) if reverse else (first, second, far)

    def starts(self, kind: Pass, initial: Tensor) -> Tensor:
        """What the passes in the direction of ``kind`` begin with.

        ``initial`` is ``[B, H, K, V]`` float32, contiguous: the state, or backwards the gradient
        of the last one. With several segments they begin with the state before each, backwards its
        gradient after it, and what is behind the last.
        """
        plan = self.plan
        if plan.segments == 1:
            return initial
        x, y = plan.widths(kind)
        h = initial.new_empty((plan.rows, plan.segments + 1, x, y), dtype=torch.float32)
        total = initial.new_empty((plan.rows, plan.segments, y), dtype=torch.float32)
        g = self.tensors[kind.x] if self.g is None else self.g
        if not plan.by_key:
            plan.segment(kind, far=False)(
                self._near(kind.x), self._near(kind.y), g, *self._halves(kind.reverse), h, total
            )
        if plan.shape.mode == KEY:
            plan.segment(kind, far=True)(
                self.tensors[kind.x], self.tensors[kind.y], g, self._halves(False)[2], h, total
            )
        plan.scan(kind)(h, total, initial)
        return h

    def attend(
        self,
        kind: Pass,
        starts: Tensor,
        weights: Tensor | None = None,
        ends: Tensor | None = None,
        final: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one pass over time.

        Args:
            kind: Which pass.
            starts: From :meth:`starts`, in its direction.
            weights: For the decay's gradient, float32: dq leaves q dq there and dk makes the
                gradient of it, ``[B, T, H, K]`` or, with a decay a head, ``[blocks, B, T, H]``.
            ends: For dk with weights, the states before the segments; if there is one segment, the
                last state.
            final: Where to leave the last state, else in new memory.

        Returns:
            The result, with the width of x (outer: y), and the state after the pass
            ``[B, H, K, V]`` float32.
        """
        plan, shape = self.plan, self.plan.shape
        x, y = plan.widths(kind)
        like = self.tensors[kind.x if kind.inner else kind.y]
        rows = (shape.batch, shape.time, shape.heads, x if kind.inner else y)
        out = torch.empty(rows, dtype=like.dtype, device=like.device)
        if final is None:
            states = (shape.batch, shape.heads, y, x)
            final = torch.empty(states, dtype=torch.float32, device=like.device)
        ends = starts if ends is None else ends
        if not plan.by_key:
            g = like if self.g is None else self.g if self.split is None else self.split.exponents
            plan.near(kind, weights is not None)(
                self._near(kind.a), self._near(kind.x), self._near(kind.y), g,
                *self._halves(kind.reverse), starts, ends, out, final,
                out if weights is None else self._near(kind.m), out if weights is None else weights,
            )  # fmt: skip
        if shape.mode == KEY:
            assert self.g is not None
            plan.far(kind, weights is not None)(
                self.tensors[kind.a], self.tensors[kind.x], self.tensors[kind.y], self.g,
                self._halves(False)[2], starts, ends, out, final,
                out if weights is None else self.tensors[kind.m],
                out if weights is None else weights,
            )  # fmt: skip
        return out, final


def walk(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    scale: float,
    do: Tensor | None = None,
) -> Walk:
    """Of q, k, v, g and backwards do: queries and keys expanded from one head are taken once."""
    q, k, v, g = inputs
    if q.stride(2) == k.stride(2) == 0 and (g is None or g.dim() == 3):
        q, k = q[:, :, :1], k[:, :, :1]
    tensors = {"q": q.contiguous(), "k": k.contiguous(), "v": v.contiguous()}
    if do is not None:
        tensors["do"] = do.contiguous()
    return Walk(tensors, None if g is None else g.contiguous(), scale)


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The recurrence on a GPU: shapes as in ``chunked.forward``, K and V up to 256, scale > 0."""
    passes = walk((q, k, v, g), scale)
    return passes.attend(OUTPUT, passes.starts(OUTPUT, state.contiguous()))
