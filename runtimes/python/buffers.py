"""Preallocated input, state and output buffers of some rows, bound to an onnxruntime session."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from edgelin.errors import EdgelinError
from edgelin.runtimes.manifest import Manifest
from edgelin.state import StateSpec

_LINE = 16  # float32 numbers in 64 bytes
Inputs = NDArray[np.int64] | NDArray[np.float32]
Outputs = NDArray[np.float32]
State = NDArray[np.float32] | NDArray[np.int64]


class Buffers:
    """State tensors of ``batch`` rows and the IOBindings that read and write them.

    Two sets of arrays take turns as input and output. In place, both sets share the float32 arrays;
    integer states (the position) are small and read by many nodes, some of them after the new value
    is written, so they always take turns. These arrays never move, so they are bound only once.

    A call may advance some neighbouring rows only; views of them are bound, and the other rows are
    not touched. What took turns is then copied back, so that all rows stay in one set.

    A state that grows has another shape after every call. It takes turns too, in memory that is
    taken in ever larger pieces, and is bound for every call, which advances all rows.

    Args:
        session: Session of the graph.
        manifest: Names, shapes and initial values.
        batch: Rows of every tensor.
        in_place: See above.

    Raises:
        EdgelinError: There is not so much memory.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        manifest: Manifest,
        batch: int,
        *,
        in_place: bool,
    ) -> None:
        self._session = session
        self._manifest = manifest
        self._batch = batch
        try:
            self._allocate(in_place)
        # What no machine could have, numpy refuses with the other two.
        except (MemoryError, OverflowError, ValueError):
            size = batch * sum(spec.num_bytes() for spec in manifest.states)
            raise EdgelinError(
                f"the states of {batch} streams take {size / 1e9:.3g} GB, and there is not so "
                "much memory; ask for fewer"
            ) from None
        self._keep = np.array([1], np.int64)
        self._turn = 0
        # Turn, first row and number of rows -> their binding, and the call it was bound for last.
        self._bindings: dict[tuple[int, int, int], onnxruntime.IOBinding] = {}
        self._bound: dict[tuple[int, int, int], tuple[int, bool]] = {}

    def _allocate(self, in_place: bool) -> None:
        """Take the memory of all tensors whose size is known."""
        manifest, batch = self._manifest, self._batch
        first = _neighbours(manifest.states, batch)
        fixed = [spec.growing_axis is None for spec in manifest.states]
        self._growing = [i for i, is_fixed in enumerate(fixed) if not is_fixed]
        shared = [
            in_place and is_fixed and a.dtype == np.float32
            for a, is_fixed in zip(first, fixed, strict=True)
        ]
        second = [a if same else a.copy() for a, same in zip(first, shared, strict=True)]
        self._sets = [first, second]
        self._turning = [i for i, same in enumerate(shared) if not same]
        self._memory = {
            (turn, i): np.empty(0, np.float32) for turn in (0, 1) for i in self._growing
        }
        source = manifest.input
        self._inputs = np.zeros(batch * manifest.chunk * math.prod(source.step), source.dtype)
        self._lengths = np.zeros(batch, np.int64)
        self._outputs = np.zeros(batch * manifest.output.size, np.float32)

    @property
    def states(self) -> list[State]:
        """The current state arrays, in the order of the manifest; writable."""
        return self._sets[self._turn]

    def load(self, states: Sequence[State], *, first: int = 0) -> None:
        """Copy other states, in the order of the manifest, into the rows from ``first`` on."""
        current = self._sets[self._turn]
        for i in self._growing:
            current[i] = self._shaped(self._turn, i, states[i].shape)
        for target, source in zip(current, states, strict=True):
            target[first : first + len(source)] = source

    def swap(self, one: int, other: int) -> None:
        """Exchange the states of two rows."""
        for array in self._sets[self._turn]:
            array[[one, other]] = array[[other, one]]

    def run(
        self,
        inputs: Inputs,
        *,
        all_outputs: bool = False,
        first: int = 0,
        lengths: NDArray[np.int64] | None = None,
    ) -> Outputs:
        """Read ``inputs`` [R, T] or [R, T, F], T <= chunk, and advance R rows from ``first`` on.

        Args:
            inputs: See above.
            all_outputs: Whether to return the outputs of every step, not only of the last.
            first: See above.
            lengths: How many steps each row really has, [R]; None: all T. Only where the graph
                takes them. Outputs behind the end of a row mean nothing.

        Returns:
            [R, 1, size], or [R, T, size] with ``all_outputs``; overwritten by the next call.
        """
        rows, time = inputs.shape[:2]
        kept = time if all_outputs else 1
        shape = (rows, kept, self._manifest.output.size)
        size = math.prod(shape)
        if size > self._outputs.size:
            self._outputs = np.zeros(size, np.float32)
            self._bound.clear()
        self._inputs[: inputs.size] = inputs.reshape(-1)
        self._keep[0] = 0 if all_outputs else 1
        self._lengths[:rows] = time if lengths is None else lengths
        place = (self._turn, first, rows)
        binding = self._bindings.get(place) or self._bind(*place)
        if self._bound.get(place) != (time, all_outputs):
            self._bind_call(binding, rows, time, kept)
            self._bound[place] = (time, all_outputs)
        grown = self._bind_growing(binding, time)
        self._session.run_with_iobinding(binding)
        for i, array in grown.items():
            self._sets[1 - self._turn][i] = array
        if rows == self._batch:
            self._turn = 1 - self._turn
        else:
            here, there = self._sets[self._turn], self._sets[1 - self._turn]
            for i in self._turning:
                here[i][first : first + rows] = there[i][first : first + rows]
        return self._outputs[:size].reshape(shape)

    def _bind(self, turn: int, first: int, rows: int) -> onnxruntime.IOBinding:
        """Bind the tensors whose shape never changes."""
        binding = self._bindings[turn, first, rows] = self._session.io_binding()
        targets = self._sets[1 - turn]
        for spec, source, target in zip(
            self._manifest.states, self._sets[turn], targets, strict=True
        ):
            if spec.growing_axis is not None:
                continue
            source, target = (array[first : first + rows] for array in (source, target))
            dtype = source.dtype.type
            binding.bind_input(spec.input_name, "cpu", 0, dtype, source.shape, source.ctypes.data)
            binding.bind_output(spec.output_name, "cpu", 0, dtype, target.shape, target.ctypes.data)
        binding.bind_input(
            self._manifest.num_logits_to_keep, "cpu", 0, np.int64, [], self._keep.ctypes.data
        )
        if self._manifest.lengths is not None:
            address = self._lengths.ctypes.data
            binding.bind_input(self._manifest.lengths, "cpu", 0, np.int64, [rows], address)
        return binding

    def _bind_growing(self, binding: onnxruntime.IOBinding, time: int) -> dict[int, State]:
        """Bind the states that grow; the arrays that the call will fill, by index."""
        grown = {}
        for i in self._growing:
            spec, source = self._manifest.states[i], self._sets[self._turn][i]
            axis = spec.growing_axis
            shape = tuple(n + time * (k == axis) for k, n in enumerate(source.shape))
            target = grown[i] = self._shaped(1 - self._turn, i, shape)
            for bind, name, array in (
                (binding.bind_input, spec.input_name, source),
                (binding.bind_output, spec.output_name, target),
            ):
                bind(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        return grown

    def _shaped(self, turn: int, index: int, shape: tuple[int, ...]) -> State:
        """An array of this shape in the memory of a growing state; its content may be anything."""
        size = math.prod(shape)
        if size > self._memory[turn, index].size:
            self._memory[turn, index] = np.empty(size + size // 2, np.float32)
        return self._memory[turn, index][:size].reshape(shape)

    def _bind_call(self, binding: onnxruntime.IOBinding, rows: int, time: int, kept: int) -> None:
        """Bind the tensors whose shape follows the number of steps."""
        source, output = self._manifest.input, self._manifest.output
        shape = [rows, time, *source.step]
        binding.bind_input(source.name, "cpu", 0, source.dtype, shape, self._inputs.ctypes.data)
        shape = [rows, kept, output.size]
        binding.bind_output(output.name, "cpu", 0, np.float32, shape, self._outputs.ctypes.data)


def _neighbours(specs: Sequence[StateSpec], batch: int) -> list[State]:
    """All states before the first step, those of float32 side by side in one piece of memory.

    A step finds little of them in a cache, but the weights: large pages, which numpy asks for where
    a piece is large enough, then save a tenth of the time of a recurrence. Each begins at a line of
    the cache.
    """
    shapes = [(batch, *spec.sized(0)) for spec in specs]
    sizes = [math.prod(shape) if spec.dtype == "float32" else 0
             for spec, shape in zip(specs, shapes, strict=True)]  # fmt: skip
    starts = np.cumsum([0, *(-(-size // _LINE) * _LINE for size in sizes)])
    piece = np.empty(starts[-1] + _LINE, np.float32)
    piece = piece[-(piece.ctypes.data // piece.itemsize) % _LINE :]
    arrays = []
    for spec, shape, start, size in zip(specs, shapes, starts, sizes, strict=False):
        if spec.dtype == "float32":
            array = piece[start : start + size].reshape(shape)
            array[...] = spec.initial
        else:
            array = initial_state(spec, batch)
        arrays.append(array)
    return arrays


def initial_state(spec: StateSpec, batch: int, *, past: int = 0) -> State:
    """The array of one state before the first step; a state that grows is ``past`` steps long."""
    return np.full((batch, *spec.sized(past)), spec.initial, np.dtype(spec.dtype))
