"""Linear recurrence on a GPU: block sizes and launches of the kernels in ``kernel_passes.py``.

The output and every gradient are one kernel each, run over segments of time in parallel from the
state before each segment (segment scan; equations in ``chunked.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelin.recurrences.launches import Choice, choose
from edgelin.recurrences.linear import kernel_by_key, kernel_passes
from edgelin.recurrences.linear.kernel_decays import HEAD, KEY, NONE

SEGMENT = 512  # shortest segment in tokens: below, passing states costs more than it gains
PROGRAMS = 256  # programs that fill a large GPU; more segments than that take are not made


@dataclass(frozen=True)
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

_NAMES = {NONE.value: "none", HEAD.value: "head", KEY.value: "key"}


class Split(NamedTuple):
    """Queries and keys without the decays between tokens of a chunk (``kernel_passes.split``)."""

    q: Tensor
    k: Tensor
    exponents: Tensor  # float32 [B, T, H, K]
    first: Tensor  # log decays of half chunks, float32 [B * H, N, K]
    second: Tensor
    far: Tensor  # marks of segments, int32 [B * H, segments]


class Starts(NamedTuple):
    """The state before each segment, backwards its gradient after it, and a factor of it."""

    h: Tensor
    strides: tuple[int, int, int, int, int]  # of batch and head, segment, X, Y; to the next state
    scale: float


def launch_of(name: str, mode: tl.constexpr, half: bool, width_x: int, width_y: int) -> Choice:
    """Block over the width that is cut (BLOCK) and warps of a pass or of ``segment``.

    By a rule read off the compiler's register counts: larger tiles spill, above all in float32.
    """
    inner = name in ("o", "dv")
    contracted, width = (width_y, width_x) if inner else (width_x, width_y)
    whole = whole_of(contracted)
    cells = 16384 if half and (mode == NONE or (mode == KEY and inner)) else 8192
    block = max(16, min(triton.next_power_of_2(width), cells // whole))
    few = half and whole * block <= 8192
    rule = {"BLOCK": block, "num_warps": 4 if few else 8, "num_stages": 2 if half else 1}
    if name == "segment":
        rule = {"BLOCK": max(16, min(whole, 64)), "num_warps": 4, "num_stages": 2 if half else 1}
    if not half:
        return rule
    chosen = choose(f"linear {_NAMES[mode.value]} {name} {width_x}x{width_y}", rule)
    if name == DK.name and mode == HEAD:  # both add to one sum a block of K
        return chosen | {"BLOCK": launch_of(DQ.name, mode, half, width_x, width_y)["BLOCK"]}
    return chosen


def far_launch(kind: Pass, half: bool, width_x: int, width_y: int) -> Choice:
    """The same for ``kernel_by_key.attend``, with the tokens of a chunk (BT)."""
    contracted, width = (width_y, width_x) if kind.inner else (width_x, width_y)
    block = max(16, min(triton.next_power_of_2(width), 8192 // whole_of(contracted)))
    return {"BLOCK": block, "BT": 64 if half else 16, "num_warps": 8, "num_stages": 1}


def whole_of(width: int) -> int:
    """Block over a side that is not cut."""
    return int(max(16, triton.next_power_of_2(width)))


class Walk:
    """The passes of one call over its segments.

    Args:
        tensors: q, k ``[B, T, H, K]``, v and backwards do ``[B, T, H, V]``, contiguous, by name;
            q and k of one head serve all.
        g: Log decay ``[B, T, H]``, ``[B, T, H, K]`` or None, contiguous.
        scale: Factor of the output; backwards it multiplies what a pass adds to the state too.
    """

    def __init__(self, tensors: dict[str, Tensor], g: Tensor | None, scale: float) -> None:
        self.tensors, self.g, self.scale = tensors, g, scale
        self.half = all(x.dtype == torch.bfloat16 for x in tensors.values())
        q = tensors["q"]
        self.batch, self.time, self.heads = tensors["v"].shape[:3]
        self.key, self.key_heads = q.shape[3], q.shape[2]
        self.mode = NONE if g is None else HEAD if g.dim() == 3 else KEY
        self.block_t = 64 if self.half else 16
        segments = self.time // SEGMENT
        segments = max(1, min(segments, -(-PROGRAMS // (self.batch * self.heads))))
        self.chunks = triton.cdiv(triton.cdiv(self.time, self.block_t), segments)
        self.segments = triton.cdiv(self.time, self.chunks * self.block_t)
        self.split = self._split() if self.mode == KEY and self.half else None
        # Where `split` marks no segments, `kernel_by_key` takes all or none.
        self.by_key = self.mode == KEY and not self.half

    @property
    def _dtypes(self) -> dict[str, Any]:
        """Of products, of masks and of sums of decays.

        Triton's interpreter multiplies bfloat16 wrongly: on the CPU products are float32.
        """
        on_gpu = self.tensors["q"].is_cuda
        return {
            "DT": tl.bfloat16 if self.half and on_gpu else tl.float32,
            "PT": tl.bfloat16 if on_gpu else tl.float32,
            "PARTS": 2 if self.half else 3,
        }

    @property
    def _wide(self) -> tl.dtype:
        """Differences of float64 sums are exact enough in float32, those of float32 in bfloat16."""
        return tl.float32 if self.half else tl.float64

    def _split(self) -> Split:
        """Take the decays between tokens out of queries and keys."""
        q, k, g = self.tensors["q"], self.tensors["k"], self.g
        assert g is not None
        rows, chunks = self.batch * self.heads, triton.cdiv(self.time, self.block_t)
        first, second = (g.new_empty(rows, chunks, self.key, dtype=torch.float32) for _ in range(2))
        exponents = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        far = torch.zeros(rows, self.segments, dtype=torch.int32, device=q.device)
        made = Split(torch.empty_like(q), torch.empty_like(k), exponents, first, second, far)
        rule = {"BK": min(64, whole_of(self.key)), "num_warps": 4}
        launch = choose(f"linear key split {self.key}", rule)
        dtypes = self._dtypes
        kernel_passes.split[(rows * chunks, triton.cdiv(self.key, launch["BK"]))](
            q, k, g, *made, self.time, self.chunks,
            H=self.heads, K=self.key, BT=self.block_t, PT=dtypes["PT"], PARTS=3, **launch,
        )  # fmt: skip
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

    def starts(self, kind: Pass, initial: Tensor) -> Starts:
        """What the passes in the direction of ``kind`` begin with.

        ``initial`` is ``[B, H, K, V]`` float32, contiguous: the state, or backwards the gradient
        of the last one.
        """
        x, y = self.tensors[kind.x], self.tensors[kind.y]
        width_x, width_y = x.shape[3], y.shape[3]
        size, rows, scale = width_x * width_y, self.batch * self.heads, 1.0
        if kind.reverse:
            scale = 1.0 / self.scale
        if self.segments == 1:
            return Starts(initial, (size, 0, 1, width_x, 0), scale)
        h = initial.new_empty((rows, self.segments + 1, width_x, width_y), dtype=torch.float32)
        total = initial.new_empty((rows, self.segments, width_y), dtype=torch.float32)
        self._segments(kind, h, total)
        kernel_passes.scan[(rows, triton.cdiv(size, 1024))](
            h, total, initial, self.segments, scale,
            X=width_x, Y=width_y, BLOCK=1024, MODE=self.mode, REV=kind.reverse, num_warps=4,
        )  # fmt: skip
        return Starts(h, ((self.segments + 1) * size, size, width_y, 1, size), 1.0)

    def _segments(self, kind: Pass, h: Tensor, total: Tensor) -> None:
        """What each segment adds to the state."""
        x, y = self.tensors[kind.x], self.tensors[kind.y]
        width_x, width_y = x.shape[3], y.shape[3]
        chosen = launch_of("segment", self.mode, self.half, width_x, width_y)
        block_x, block_y = (min(whole_of(w), chosen["BLOCK"]) for w in (width_x, width_y))
        tiles = triton.cdiv(width_x, block_x) * triton.cdiv(width_y, block_y)
        grid = (self.batch * self.heads, self.segments, tiles)
        warps = {name: chosen[name] for name in ("num_warps", "num_stages")}
        sizes = {"H": self.heads, "X": width_x, "Y": width_y, "BX": block_x, "BY": block_y}
        heads = {"HY": self.key_heads}
        dtypes, g = self._dtypes, x if self.g is None else self.g
        if not self.by_key:
            kernel_passes.segment[grid](
                self._near(kind.x), self._near(kind.y), g, *self._halves(kind.reverse), h, total,
                self.time, self.chunks, **sizes, **heads, BT=self.block_t, MODE=self.mode,
                REV=kind.reverse, DT=dtypes["DT"], WIDE=self._wide, **warps,
            )  # fmt: skip
        if self.mode == KEY:
            far = far_launch(kind, self.half, width_x, width_y)
            kernel_by_key.segment[grid](
                x, y, g, self._halves(False)[2], h, total, self.time,
                self.chunks * self.block_t // far["BT"], **sizes, BT=far["BT"],
                ALL=self.by_key, REV=kind.reverse, **dtypes, num_warps=4, num_stages=1,
            )  # fmt: skip

    def attend(
        self, kind: Pass, starts: Starts, weights: Tensor | None = None, ends: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run one pass over time.

        Args:
            kind: Which pass.
            starts: From :meth:`starts`, in its direction.
            weights: For the decay's gradient, float32: dq leaves q dq there and dk makes the
                gradient of it, ``[B, T, H, K]`` or, with a decay a head, ``[blocks, B, T, H]``.
            ends: For dk with weights, ``h`` of the states before the segments; if there is one
                segment, the last state.

        Returns:
            The result, with the width of x (outer: y), and the state after the pass
            ``[B, H, K, V]`` float32.
        """
        x, y = self.tensors[kind.x], self.tensors[kind.y]
        like = x if kind.inner else y
        rows = (self.batch, self.time, self.heads, like.shape[3])
        out = torch.empty(rows, dtype=like.dtype, device=like.device)
        shape = (self.batch, self.heads, y.shape[3], x.shape[3])
        final = torch.empty(shape, dtype=torch.float32, device=like.device)
        ends = starts.h if ends is None else ends
        if not self.by_key:
            self._attend_near(kind, starts, ends, out, final, weights)
        if self.mode == KEY:
            self._attend_far(kind, starts, ends, out, final, weights)
        return out, final

    def _attend_near(
        self, kind: Pass, starts: Starts, ends: Tensor, out: Tensor, final: Tensor,
        weights: Tensor | None,
    ) -> None:  # fmt: skip
        a, x, y = (self._near(name) for name in (kind.a, kind.x, kind.y))
        g = x if self.g is None else self.g if self.split is None else self.split.exponents
        chosen = launch_of(kind.name, self.mode, self.half, x.shape[3], y.shape[3])
        kernel_passes.attend[self._grid(kind, chosen["BLOCK"])](
            a, x, y, g, *self._halves(kind.reverse), starts.h, ends, out, final,
            self._near(kind.m) if weights is not None else out, out if weights is None else weights,
            self.time, self.chunks, starts.scale, self.scale, *starts.strides,
            self.batch * self.time * self.heads, **self._blocks(kind, chosen["BLOCK"]),
            HY=self.key_heads, BT=self.block_t, MODE=self.mode, INNER=kind.inner, REV=kind.reverse,
            WEIGH=weights is not None, WIDE=self._wide, **self._dtypes,
            num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
        )  # fmt: skip

    def _attend_far(
        self, kind: Pass, starts: Starts, ends: Tensor, out: Tensor, final: Tensor,
        weights: Tensor | None,
    ) -> None:  # fmt: skip
        a, x, y = (self.tensors[name] for name in (kind.a, kind.x, kind.y))
        chosen = far_launch(kind, self.half, x.shape[3], y.shape[3])
        block_t = chosen["BT"]
        kernel_by_key.attend[self._grid(kind, chosen["BLOCK"])](
            a, x, y, self.g, self._halves(False)[2], starts.h, ends, out, final,
            self.tensors[kind.m] if weights is not None else out,
            out if weights is None else weights,
            self.time, self.chunks * self.block_t // block_t, starts.scale, self.scale,
            *starts.strides, **self._blocks(kind, chosen["BLOCK"]),
            BT=block_t, ALL=self.by_key, INNER=kind.inner, REV=kind.reverse,
            WEIGH=weights is not None, LEVELS=block_t.bit_length() - 1, **self._dtypes,
            num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
        )  # fmt: skip

    def _blocks(self, kind: Pass, block: int) -> dict[str, int]:
        """Sizes and blocks of a pass."""
        x, y = self.tensors[kind.x].shape[3], self.tensors[kind.y].shape[3]
        block_x, block_y = (block, whole_of(y)) if kind.inner else (whole_of(x), block)
        return {"H": self.heads, "X": x, "Y": y, "BX": block_x, "BY": block_y}

    def _grid(self, kind: Pass, block: int) -> tuple[int, int, int]:
        """Programs of a pass."""
        width = self.tensors[kind.x if kind.inner else kind.y].shape[3]
        return self.batch * self.heads, self.segments, triton.cdiv(width, block)


def inputs_of(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, do: Tensor | None = None
) -> dict[str, Tensor]:
    """The tensors of a :class:`Walk`: queries and keys expanded from one head are taken once."""
    if q.stride(2) == k.stride(2) == 0 and (g is None or g.dim() == 3):
        q, k = q[:, :, :1], k[:, :, :1]
    tensors = {"q": q, "k": k, "v": v} | ({} if do is None else {"do": do})
    return {name: x.contiguous() for name, x in tensors.items()}


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The recurrence on a GPU: shapes as in ``chunked.forward``, K and V up to 256, scale > 0."""
    walk = Walk(inputs_of(q, k, v, g), None if g is None else g.contiguous(), scale)
    return walk.attend(OUTPUT, walk.starts(OUTPUT, state.contiguous()))
