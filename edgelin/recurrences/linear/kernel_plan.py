"""What the shape of a call decides for the linear recurrence on a GPU: segments, blocks, launches.

The output and every gradient are one kernel each, run over segments of time in parallel from the
state before each segment (segment scan; equations in ``chunked.py``). Where packed sequences end
changes from call to call, and nothing of it is in here: launches are told by tables
(``kernel_places.py``) and take the number of programs from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton.language as tl

from edgelin.recurrences.launches import Choice, Launch, cdiv, choose, planned, power_of_2
from edgelin.recurrences.linear import kernel_by_key, kernel_decays, kernel_passes, kernel_segments
from edgelin.recurrences.linear.kernel_places import Places, in_packed_rows

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


def launch_of(
    name: str, mode: int, half: bool, width_x: int, width_y: int, normal: bool = False
) -> Choice:
    """Block over the width that is cut (BLOCK) and warps of a pass or of ``segment``.

    By a rule read off the compiler's register counts: larger tiles spill, above all in float32.
    """
    inner = name in ("o", "dv")
    contracted, width = (width_y, width_x) if inner else (width_x, width_y)
    whole = whole_of(contracted)
    large = (mode == NONE and not normal) or (mode == KEY and inner)
    cells = 16384 if half and large else 8192
    block = max(16, min(power_of_2(width), cells // whole))
    few = half and whole * block <= 8192
    rule = {"BLOCK": block, "num_warps": 4 if few else 8, "num_stages": 2 if half else 1}
    if name == "segment":
        rule = {"BLOCK": max(16, min(whole, 64)), "num_warps": 4, "num_stages": 2 if half else 1}
    if not half:
        return rule
    kind = f"{_NAMES[mode]} normal" if normal else _NAMES[mode]
    chosen = choose(f"linear {kind} {name} {width_x}x{width_y}", rule)
    if name == DK.name and mode == HEAD:  # both add to one sum a block of K
        return chosen | {"BLOCK": launch_of(DQ.name, mode, half, width_x, width_y, normal)["BLOCK"]}
    return chosen


def far_launch(kind: Pass, width_x: int, width_y: int) -> Choice:
    """The same for ``kernel_by_key.attend``."""
    contracted, width = (width_y, width_x) if kind.inner else (width_x, width_y)
    block = max(16, min(power_of_2(width), 8192 // whole_of(contracted)))
    return {"BLOCK": block, "num_warps": 8, "num_stages": 1}


def block_of(half: bool) -> int:
    """Tokens of a chunk."""
    return 64 if half else 16


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
    normal: int = 0  # with a column of ones; 2: and a floor
    eps: float = 0.0
    packed: int = 0  # sequences in one row, of which none (1) or some (2) have several segments


def cut(rows: int, time: int, block_t: int) -> tuple[int, int]:
    """Chunks of ``block_t`` tokens in a segment, and segments, of so many sequences of a head."""
    segments = max(1, min(time // SEGMENT, cdiv(PROGRAMS, rows)))
    chunks = cdiv(cdiv(time, block_t), segments)
    return chunks, cdiv(time, chunks * block_t)


class Plan:
    """Sizes and launches of all calls of a shape.

    Time is cut into ``segments`` of ``chunks`` chunks of ``block_t`` tokens. Of packed rows, batch
    and time count as 1.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.rows = shape.batch * shape.heads
        self.block_t = block_of(shape.half)
        self.chunks, self.segments = cut(self.rows, shape.time, self.block_t)
        self.single = shape.packed == 1 if shape.packed else self.segments == 1
        self.packed = shape.packed > 0
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
        self.wide = torch.float32 if shape.half else torch.float64

    def width(self, name: str) -> int:
        """Of a tensor, by its name."""
        return self.shape.key if name in ("q", "k") else self.shape.value

    def widths(self, kind: Pass) -> tuple[int, int]:
        """Of x and y."""
        return self.width(kind.x), self.width(kind.y)

    def rule(self, kind: Pass) -> Choice:
        """How a pass is launched."""
        normal = self.shape.normal > 0 and kind is not DV
        return launch_of(kind.name, self.shape.mode, self.shape.half, *self.widths(kind), normal)

    @planned
    def split(self, exponents: bool) -> Launch:
        """Of ``kernel_segments.split``."""
        time, heads, key = self.shape[1:4]
        rule = {"BK": min(64, whole_of(key)), "num_warps": 4}
        chosen = choose(f"linear key split {key}", rule)
        tiles = cdiv(key, chosen["BK"])
        return Launch(
            kernel_segments.split,
            (self.rows * cdiv(time, self.block_t) * tiles,), time, self.chunks, tiles=tiles,
            H=heads, K=key, BT=self.block_t, PACKED=self.packed, EXPONENTS=exponents,
            PT=self.dtypes["PT"], PARTS=3, **chosen,
        )  # fmt: skip

    @planned
    def sums(self) -> Launch:
        """Of ``kernel_segments.head_sums``."""
        batch, time, heads = self.shape[:3]
        block_h = min(16, power_of_2(heads))
        return Launch(
            kernel_segments.head_sums,
            (batch * cdiv(time, self.block_t), cdiv(heads, block_h)), time,
            H=heads, BH=block_h, BT=self.block_t, PACKED=self.packed, num_warps=2,
        )  # fmt: skip

    @planned
    def scan(self, kind: Pass, width: int) -> Launch:
        """Of ``kernel_segments.scan``, for so many columns of x."""
        x, y = width, self.widths(kind)[1]
        block_x, block_y = min(32, power_of_2(x)), 32
        tiles = cdiv(x, block_x) * cdiv(y, block_y)
        return Launch(
            kernel_segments.scan, (self.rows * tiles,),
            self.segments, 1.0 / self.shape.scale if kind.reverse else 1.0, tiles=tiles,
            H=self.shape.heads if self.packed else 1, X=x, Y=y, BX=block_x, BY=block_y,
            MODE=self.shape.mode, REV=kind.reverse, PACKED=self.packed, num_warps=4,
        )  # fmt: skip

    @planned
    def segment(self, kind: Pass, far: bool) -> Launch:
        """Of ``segment``, near or ``far``."""
        x, y = self.widths(kind)
        chosen = launch_of("segment", self.shape.mode, self.shape.half, x, y)
        block_x, block_y = (min(whole_of(w), chosen["BLOCK"]) for w in (x, y))
        tiles = cdiv(x, block_x) * cdiv(y, block_y)
        grid = (self.rows * tiles, self.segments)
        sizes = {"H": self.shape.heads, "X": x, "Y": y, "BX": block_x, "BY": block_y}
        if not far:
            return Launch(
                kernel_segments.segment, grid, self.shape.time, self.chunks, tiles=tiles, **sizes,
                HY=self.shape.key_heads, BT=self.block_t, MODE=self.shape.mode, REV=kind.reverse,
                NORM=self.shape.normal > 0, PACKED=self.packed, DT=self.dtypes["DT"],
                num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
            )  # fmt: skip
        return Launch(
            kernel_by_key.segment, grid, self.shape.time, self.chunks, tiles=tiles,
            **sizes, BT=self.block_t, ALL=self.by_key, REV=kind.reverse, PACKED=self.packed,
            **self.dtypes, num_warps=4, num_stages=1,
        )  # fmt: skip

    @planned
    def near(self, kind: Pass, weigh: bool) -> Launch:
        """Of ``kernel_passes.attend``; ``weigh``: with weights."""
        chosen, shape = self.rule(kind), self.shape
        tiles = self._tiles(kind, chosen["BLOCK"])
        return Launch(
            kernel_passes.attend, (self.rows * tiles, self.segments), shape.time, self.chunks,
            *self._starts(kind), shape.batch * shape.time * shape.heads, shape.eps,
            tiles=tiles, **self._blocks(kind, chosen["BLOCK"]), HY=shape.key_heads, BT=self.block_t,
            MODE=shape.mode, INNER=kind.inner, REV=kind.reverse, WEIGH=weigh,
            NORM=shape.normal > 0 and kind is not DV,
            FLOORED=shape.normal == 2 and kind is OUTPUT, PACKED=self.packed, **self.dtypes,
            num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
        )  # fmt: skip

    @planned
    def far(self, kind: Pass, weigh: bool) -> Launch:
        """Of ``kernel_by_key.attend``."""
        chosen = far_launch(kind, *self.widths(kind))
        tiles = self._tiles(kind, chosen["BLOCK"])
        return Launch(
            kernel_by_key.attend, (self.rows * tiles, self.segments),
            self.shape.time, self.chunks, *self._starts(kind), tiles=tiles,
            **self._blocks(kind, chosen["BLOCK"]), BT=self.block_t, ALL=self.by_key,
            INNER=kind.inner, REV=kind.reverse, WEIGH=weigh, PACKED=self.packed,
            LEVELS=self.block_t.bit_length() - 1, **self.dtypes,
            num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
        )  # fmt: skip

    def _starts(self, kind: Pass) -> tuple[float, float, int, int, int, int]:
        """Factors of the state before a segment and of the output, and the former's strides: of
        batch and head, segment, X and Y."""
        x, y = self.widths(kind)
        row, step = x * y, self.shape.heads * x * y if self.packed else x * y
        if self.single:
            factor = 1.0 / self.shape.scale if kind.reverse else 1.0
            return factor, self.shape.scale, row, step if self.packed else 0, 1, x
        if not self.packed:
            row *= self.segments
        return 1.0, self.shape.scale, row, step, y, 1

    def _blocks(self, kind: Pass, block: int) -> dict[str, int]:
        """Sizes and blocks of a pass."""
        x, y = self.widths(kind)
        block_x, block_y = (block, whole_of(y)) if kind.inner else (whole_of(x), block)
        return {"H": self.shape.heads, "X": x, "Y": y, "BX": block_x, "BY": block_y}

    def _tiles(self, kind: Pass, block: int) -> int:
        """Programs of a pass for a segment; those that read the same rows begin together."""
        return cdiv(self.width(kind.x if kind.inner else kind.y), block)


plan_of = planned(Plan)


def places_of(
    ends: Sequence[int], heads: int, half: bool, device: torch.device
) -> tuple[Places, bool]:
    """Where packed sequences have their segments, and whether there is one for each."""
    return in_packed_rows(ends, heads, block_of(half), SEGMENT, PROGRAMS, device)
