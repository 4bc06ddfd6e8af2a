"""Turn the large matrices of a lowered graph into int8 or int4 with MatMulNBits.

Every MatMul by a constant becomes com.microsoft MatMulNBits with accuracy_level 4 (activations in
int8, one scale a block), the token embedding becomes GatherBlockQuantized, and experts become QMoE.
A tied head and embedding are rounded once and share their codes and scales. Projections that make
the gates of a recurrence stay float32 (their errors grow with the length of the stream), as do
routers, convolutions, norms and states; which ones is decided by words in the parameter's name. A
model of features keeps its first projection and its head float as well: they are small, and all
that it reads or answers passes through them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgelin.export.passes.edit import add_constant, constant, drop_unused, only_user, replace
from edgelin.export.passes.experts import experts_nodes
from edgelin.export.passes.tied_head import tied_heads
from edgelin.export.rounding import Array, Rounded, relative_error, round_matrix
from edgelin.mapped import Empty

_LEAST_BLOCK = 32
# "x": Mamba's x_proj makes the steps dt
FLOAT_WORDS = ("beta", "decay", "dt", "x", "router", "conv", "norm")
_VENDOR = "com.microsoft"


@dataclass(frozen=True)
class Recipe:
    """How a variant's weights are stored.

    Args:
        bits: Of the matrices, 4 or 8.
        embedding_bits: Of the token embedding and a head tied to it.
        precise_words: A parameter with one of these names in its path is stored with 8 bits.
        block_size: Weights of 4 bits that share a scale, at most: halved, down to 32, until enough
            blocks fill the rows of a matrix.
        precise_block_size: The same of 8 bits.
        row_blocks: Blocks that are enough; narrow models feel a shared scale more.
        accuracy_level: onnxruntime's arithmetic: 4 multiplies in int8.
        float_words: A parameter with one of these words in its name stays float32.
    """

    bits: int
    embedding_bits: int
    precise_words: tuple[str, ...] = ()
    block_size: int = 32
    # Beside scales for 32 these cost the demo 0.0001 nat; with AVX-512 a step takes 0.7 the time.
    precise_block_size: int = 128
    row_blocks: int = 8
    accuracy_level: int = 4
    float_words: tuple[str, ...] = FLOAT_WORDS

    def for_features(self) -> Recipe:
        """The recipe for a model that reads features."""
        return dataclasses.replace(self, float_words=(*self.float_words, "embedding", "head"))

    def for_mixers(self) -> Recipe:
        """The recipe for a model of mixers only, of which nothing else could take fewer bits."""
        return dataclasses.replace(self, precise_words=())

    def block(self, bits: int, *widths: int) -> int:
        """Weights that share a scale in matrices of these bits, whose rows are so wide."""
        size = self.precise_block_size if bits == 8 else self.block_size
        least = self.row_blocks
        while size > _LEAST_BLOCK and any(w % size or w < least * size for w in widths):
            size //= 2
        return size

    def as_dict(self) -> dict[str, Any]:
        """The entry in the manifest."""
        return {
            "bits": self.bits,
            "embedding_bits": self.embedding_bits,
            "precise": list(self.precise_words),
            "block_size": self.block_size,
            "precise_block_size": self.precise_block_size,
            "row_blocks": self.row_blocks,
            "accuracy_level": self.accuracy_level,
            "float": list(self.float_words),
        }


# Of the demo model's parts, the mixers gain most from 8 bits beside 4-bit MLPs: top-1 agreement
# with the float model 93.0 %, where all matrices at 4 bits give 90.9 %. But a step of int4 takes as
# long as one of int8: fewer scales are what makes it shorter. int4-fast is 0.028 nat from the float
# demo, int4 0.011; symmetric blocks of 32 in all matrices, such as llama.cpp's Q4_0, are 0.034.
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "int8": Recipe(bits=8, embedding_bits=8),
    "int4": Recipe(bits=4, embedding_bits=8, precise_words=("mixer",)),
    "int4-fast": Recipe(bits=4, embedding_bits=8, block_size=256, row_blocks=4),
}


@dataclass
class Outcome:
    """What became of the matrices.

    Args:
        matrices: Parameter name to ``bits`` and ``error``, the relative ||W' - W|| / ||W||.
        rounded: Parameter name to the matrix as it is stored.
    """

    matrices: dict[str, dict[str, float]] = field(default_factory=dict)
    rounded: dict[str, Rounded] = field(default_factory=dict)


def quantise(
    model: ir.Model,
    recipe: Recipe,
    *,
    progress: Callable[[int], object] = lambda weights: None,
    empty: Empty = np.empty,
) -> Outcome:
    """Quantise a graph in place, between ``passes.lower`` and ``passes.finish``.

    Args:
        model: Lowered graph; its tied head still is ``edgelin::tied_head``.
        recipe: Bits and exceptions.
        progress: Called with the number of weights of each matrix that is done.
        empty: Makes the arrays of codes and scales.

    Returns:
        What was done to each matrix.
    """
    work = _Work(model, recipe, progress, empty)
    for node in list(model.graph):
        if node.op_type == "Gather" and not node.domain:
            work.lookup(node)
    for node in tied_heads(model):
        work.head(node)
    for node in experts_nodes(model):
        work.experts(node)
    for node in list(model.graph):
        if node.op_type == "MatMul" and not node.domain:
            work.matmul(node)
    drop_unused(model)
    return work.outcome


class _Work:
    """One call of :func:`quantise`: the graph, the recipe and the matrices rounded so far."""

    def __init__(
        self,
        model: ir.Model,
        recipe: Recipe,
        progress: Callable[[int], object],
        empty: Empty,
    ) -> None:
        self.model, self.recipe, self.progress, self.empty = model, recipe, progress, empty
        self.outcome = Outcome()

    def lookup(self, node: ir.Node) -> None:
        """Gather from a float matrix becomes GatherBlockQuantized."""
        table, indices = node.inputs
        rows = constant(table)
        if table is None or rows is None or rows.ndim != 2 or rows.dtype != np.float32:
            return
        if node.attributes.get_int("axis", 0) != 0 or self._stays_float(table):
            return
        if rows.shape[1] % 2:
            return  # two 4-bit codes of one row share a byte
        bits = self.recipe.embedding_bits
        matrix: Array = rows.astype(np.float32, copy=False)
        size = self.recipe.block(bits, matrix.shape[1])
        codes, *rest = self._store(table.name or "", matrix, bits, size, flat=True)
        new = ir.node(
            "GatherBlockQuantized",
            [codes, indices, *rest],
            attributes={
                "gather_axis": 0,
                "quantize_axis": 1,
                "block_size": size,
                "bits": bits,
            },
            domain=_VENDOR,
        )
        replace(self.model, node, [new], new.outputs)

    def head(self, node: ir.Node) -> None:
        """``tied_head(x, embedding)`` becomes MatMulNBits over the embedding's own codes."""
        x, table = node.inputs
        rows = constant(table)
        if table is None or rows is None:
            return
        matrix: Array = rows.astype(np.float32, copy=False)
        self._multiply(node, x, table.name or "", matrix, self.recipe.embedding_bits)

    def matmul(self, node: ir.Node) -> None:
        """MatMul by a constant `[K, N]`, with a bias added after it, becomes MatMulNBits."""
        x, weight = node.inputs
        matrix = constant(weight)
        if weight is None or matrix is None or matrix.ndim != 2 or matrix.dtype != np.float32:
            return
        if self._stays_float(weight):
            return
        rows = np.ascontiguousarray(matrix.T)
        self._multiply(node, x, weight.name or "", rows, self._bits(weight))

    def experts(self, node: ir.Node) -> None:
        """Give ``experts`` rounded matrices `[E, N, K]`, if blocks fill the rows of both."""
        x, chosen, weights, *matrices = node.inputs
        bits = self._bits(matrices[0])
        found = [(m.name or "", constant(m)) for m in matrices if m is not None]
        widths = [array.shape[-1] for _, array in found if array is not None]
        size = self.recipe.block(bits, *widths)
        if any(array is None or array.shape[-1] % size for _, array in found):
            return
        stored: list[ir.Value | None] = []
        gated = node.attributes.get_int("gated")
        # The kernel always has a gate: without one it reads the same row twice.
        for (name, array), copies in zip(found, (1 if gated else 2, 1), strict=True):
            assert array is not None
            rows: Array = array.astype(np.float32, copy=False)
            own = self._store(name, rows, bits, size, flat=True, copies=copies)
            stored += [*own, *[None] * (3 - len(own))]
        level = self.recipe.accuracy_level
        new = ir.node(
            node.op_type,
            [x, chosen, weights, *stored],
            attributes={
                "gated": gated,
                "bits": bits,
                "block_size": size,
                "accuracy_level": level,
            },
            domain=node.domain,
        )
        replace(self.model, node, [new], new.outputs)

    def _multiply(
        self, node: ir.Node, x: ir.Value | None, name: str, rows: Array, bits: int
    ) -> None:
        """Write the MatMulNBits node of ``x @ rows.T``."""
        size = self.recipe.block(bits, rows.shape[1])
        codes, scales, *zero_points = self._store(name, rows, bits, size, flat=False)
        inputs: list[ir.Value | None] = [x, codes, scales, *zero_points]
        add = only_user(node.outputs[0])
        bias = _bias(add, node.outputs[0], len(rows))
        if bias is not None:
            inputs += [None] * (5 - len(inputs)) + [bias]
        new = ir.node(
            "MatMulNBits",
            inputs,
            attributes={
                "K": rows.shape[1],
                "N": rows.shape[0],
                "bits": bits,
                "block_size": size,
                "accuracy_level": self.recipe.accuracy_level,
            },
            domain=_VENDOR,
        )
        if bias is not None and add is not None:
            replace(self.model, add, [new], new.outputs)
        else:
            replace(self.model, node, [new], new.outputs)

    def _bits(self, weight: ir.Value | None) -> int:
        """Bits of the codes of a matrix."""
        words = (weight.name or "").split(".") if weight is not None else []
        precise = any(word in words for word in self.recipe.precise_words)
        return 8 if precise else self.recipe.bits

    def _store(
        self, name: str, rows: Array, bits: int, size: int, *, flat: bool, copies: int = 1
    ) -> list[ir.Value]:
        """Initializers of rounded rows `[..., K]`: codes, scales, if asymmetric zero points."""
        matrix, lead = rows.reshape(-1, rows.shape[-1]), rows.shape[:-1]
        if name not in self.outcome.rounded:
            self.outcome.rounded[name] = self._round(name, matrix, bits, size)
            self.progress(rows.size)
        rounded = self.outcome.rounded[name]
        # Where blocks fill the rows, both have the same bytes, and the file holds them once.
        codes = rounded.packed_rows(rows.shape[-1]) if flat else rounded.packed()
        if not np.shares_memory(codes, rounded.codes):
            packed, codes = codes, self.empty(codes.shape, codes.dtype)
            codes[...] = packed
        arrays: dict[str, npt.NDArray[Any]] = {
            f"q{bits}{'_rows' if flat else ''}": codes,
            "scales": rounded.scales,
        }
        zero_points = rounded.packed_zero_points()
        if zero_points is not None:
            arrays["zero_points"] = zero_points
        if copies > 1:
            lead = (*lead[:-1], copies * lead[-1])
            arrays = {key: np.repeat(array, copies, axis=0) for key, array in arrays.items()}
        return [
            add_constant(self.model, f"{name}_{key}", array.reshape(*lead, *array.shape[1:]))
            for key, array in arrays.items()
        ]

    def _round(self, name: str, rows: Array, bits: int, size: int) -> Rounded:
        """Round one matrix and note its error."""
        # Zero points lower the error of 16 codes by a ninth and cost 2 % of a step's time; of the
        # error with 256 codes, what int8 activations add is the larger part anyway.
        rounded = round_matrix(rows, bits, size, symmetric=bits == 8, empty=self.empty)
        error = relative_error(rounded, rows)
        self.outcome.matrices[name] = {"bits": bits, "error": error}
        return rounded

    def _stays_float(self, weight: ir.Value) -> bool:
        """Whether a parameter's name has one of the recipe's words in it."""
        words = re.split(r"[._]", weight.name or "")
        return any(word in words for word in self.recipe.float_words)


def _bias(add: ir.Node | None, product: ir.Value, width: int) -> ir.Value | None:
    """The constant `[N]` that ``add`` adds to ``product``, if that is what it does."""
    if add is None or add.op_type != "Add" or add.domain:
        return None
    other = add.inputs[1] if add.inputs[0] is product else add.inputs[0]
    array = constant(other)
    return other if array is not None and array.shape == (width,) else None
