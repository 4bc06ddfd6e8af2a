"""The running maximum in standard ONNX operators: the scan of ``scan.py`` for one chunk.

T is 1 to `graph.chunk` and read at run time; a longer call fails inside the runtime. Shifts are
gathers along time whose first entries repeat. That adds candidates m_0 + G_t at tokens whose
interval reaches back to the first already; they are never above m_t, since g is never positive.
"""

from __future__ import annotations

import onnx_ir as ir

from edgelin.recurrences.decay_graph import scan_tables
from edgelin.recurrences.graph import Graph

_LOWEST = -3e38  # a finite float32, so that no difference of two is NaN


def plain(graph: Graph, x: ir.Value, g: ir.Value, state: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Append the scan.

    Args:
        graph: Receives the nodes.
        x: ``[B, T, C]``, float32.
        g: ``[B, T, C]``.
        state: ``[B, C]``.

    Returns:
        m ``[B, T, C]`` and the last of them ``[B, C]``.
    """
    op = graph.op
    shifts, pads = scan_tables(graph)
    first = op("Gather", [g, graph.ints(0)], axis=1)
    carried = op("Add", [first, op("Unsqueeze", [state, graph.ints(1)])])
    m = op("Max", [x, op("Pad", [carried, pads, graph.const(_LOWEST), graph.ints(1)])])
    for i, shift in enumerate(shifts):
        m = op("Max", [m, op("Add", [op("Gather", [m, shift], axis=1), g])])
        if i + 1 < len(shifts):
            g = op("Add", [g, op("Gather", [g, shift], axis=1)])
    return m, op("Gather", [m, graph.const(-1, "int64")], axis=1)


fused = plain  # no com.microsoft operator has this recurrence
