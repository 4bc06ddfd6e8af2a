"""Builder of ONNX nodes for the recurrences' ``onnx.py`` files.

A thin layer over onnx_ir's values and nodes: it names nothing, infers nothing, and keeps two
promises that the lowered graphs need. Equal constants are stored once a graph, and the preamble
that depends only on T (masks and tables cut to T) is built once and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

Shared = TypeVar("Shared")


class Graph:
    """Collects nodes and initializers; ``nodes`` are in topological order.

    Args:
        time: int64 `[1]` value that holds T of the call (``Shape(input, start=1, end=2)``).
        chunk: Largest T that a one-chunk form must serve.
        prefix: Of the names of constants, another for every builder of a graph.
    """

    def __init__(
        self, time: ir.Value | None = None, chunk: int = 64, prefix: str = "edgelin_const"
    ) -> None:
        self.nodes: list[ir.Node] = []
        self.preamble: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self.chunk = chunk
        self.time = time
        self._prefix = prefix
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._shared: dict[Any, Any] = {}
        self._target = self.nodes

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        *,
        outputs: int = 1,
        domain: str = "",
        **attributes: Any,
    ) -> Any:
        """Append a node; returns its output, or a tuple of them when ``outputs`` > 1."""
        node = ir.node(
            op_type, list(inputs), attributes=attributes, domain=domain, num_outputs=outputs
        )
        self._target.append(node)
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    def const(self, value: Any, dtype: Any = np.float32) -> ir.Value:
        """An initializer with this content; equal content is stored once."""
        array = np.asarray(value, dtype=dtype)
        key = (array.shape, str(array.dtype), array.tobytes())
        if key not in self._constants:
            name = f"{self._prefix}_{len(self._constants)}"
            value_ = ir.Value(
                name=name,
                shape=ir.Shape(array.shape),
                type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
                const_value=ir.tensor(array, name=name),
            )
            self._constants[key] = value_
            self.initializers[name] = value_
        return self._constants[key]

    def ints(self, *values: int) -> ir.Value:
        """A 1-D int64 constant (shapes, axes, starts)."""
        return self.const(values, np.int64)

    def shared(self, key: Any, build: Callable[[], Shared]) -> Shared:
        """What ``build`` returns, built once a graph, before every other node.

        ``build`` may use constants, :attr:`time` and other shared parts only.
        """
        if key not in self._shared:
            outer, self._target = self._target, self.preamble
            try:
                self._shared[key] = build()
            finally:
                self._target = outer
        result: Shared = self._shared[key]
        return result

    def time_scalar(self) -> ir.Value:
        """T of the call as an int64 scalar."""
        result: ir.Value = self.shared("time_scalar", lambda: self.op("Squeeze", [self.time]))
        return result

    def by_time(self, table: Any, dtype: Any = np.int64) -> ir.Value:
        """Row T of a table with chunk + 1 rows; T > chunk fails inside the runtime (Gather)."""
        array = np.asarray(table, dtype=dtype)
        if len(array) != self.chunk + 1:
            raise ValueError(f"table has {len(array)} rows, need chunk + 1 = {self.chunk + 1}")
        return self.op("Gather", [self.const(array, dtype), self.time_scalar()])  # type: ignore[no-any-return]

    def cut_to_time(self, constant: Any, ends: Any, axes: Sequence[int]) -> ir.Value:
        """``constant`` cut along ``axes`` to the ends that row T of the table ``ends`` gives."""
        return self.op(  # type: ignore[no-any-return]
            "Slice",
            [
                self.const(constant),
                self.ints(*[0] * len(axes)),
                self.by_time(ends),
                self.ints(*axes),
            ],
        )
