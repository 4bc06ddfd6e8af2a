"""Turn the large matrices of a lowered graph into int8 or int4 with MatMulNBits.

Every MatMul by a constant becomes com.microsoft MatMulNBits with accuracy_level 4 (activations in
int8, one scale a block), the token embedding becomes GatherBlockQuantized, and experts become QMoE.
A tied head and embedding are rounded once and share their codes and scales. How many bits a matrix
has, or that it stays float, is told by its role (:mod:`edgelin.export.quantise.recipe`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgelin.export.passes.edit import add_constant, constant, drop_unused, only_user, replace
from edgelin.export.passes.experts import experts_nodes
from edgelin.export.passes.tied_head import OP_TYPE as TIED_HEAD
from edgelin.export.passes.tied_head import tied_heads
from edgelin.export.quantise.recipe import FLOAT, Format, Recipe, role_of
from edgelin.export.quantise.rounding import Array, Rounded, relative_error, round_matrix
from edgelin.mapped import Empty

if TYPE_CHECKING:
    from torch import nn

_VENDOR = "com.microsoft"


@dataclass
class Outcome:
    """What became of the matrices.

    Args:
        matrices: Parameter name to ``bits`` and ``error``, the relative ||W' - W|| / ||W||.
        rounded: Parameter name to the matrix as it is stored.
    """

    matrices: dict[str, dict[str, float]] = field(default_factory=dict)
    rounded: dict[str, Rounded] = field(default_factory=dict)

    @property
    def bits(self) -> int:
        """The fewest of any matrix; 32: none was rounded."""
        return min((matrix.bits for matrix in self.rounded.values()), default=FLOAT)


@dataclass(frozen=True)
class Matrices:
    """What of a graph has one format: a matrix, or all those of a layer's experts.

    Args:
        names: Of the parameters.
        role: See :mod:`edgelin.export.quantise.recipe`.
        shapes: `[rows, width]` of each, the rows of all experts.
        multiplies: Whether something is multiplied with them; rows of the others are looked up.
    """

    names: tuple[str, ...]
    role: str
    shapes: tuple[tuple[int, int], ...]
    multiplies: bool

    @property
    def name(self) -> str:
        """Of the first."""
        return self.names[0]

    def format(self, recipe: Recipe) -> Format | None:
        """What a recipe makes of them; None: they stay float."""
        widths = [width for _, width in self.shapes]
        chosen = recipe.format(self.name, self.role, widths)
        return chosen if chosen is not None and self.fits(chosen) else None

    def fits(self, chosen: Format) -> bool:
        """Whether a kernel takes them so: those of experts know only full blocks."""
        return self.role != "experts" or not any(w % chosen.block_size for _, w in self.shapes)


def matrices(model: ir.Model) -> list[Matrices]:
    """What :func:`quantise` could round in a graph, in its order, a tied table once."""
    found: dict[str, Matrices] = {}
    for node in _nodes(model):
        own = _read(node)
        if own is None:
            continue
        known = found.get(own.name)
        if known is not None:
            own = replace_fields(known, multiplies=known.multiplies or own.multiplies)
        found[own.name] = own
    return list(found.values())


def quantise(
    model: ir.Model,
    recipe: Recipe,
    *,
    rounded: Mapping[str, Rounded] | None = None,
    progress: Callable[[int], object] = lambda weights: None,
    empty: Empty = np.empty,
) -> Outcome:
    """Quantise a graph in place, between ``passes.lower`` and ``passes.finish``.

    Args:
        model: Lowered graph; its tied head still is ``edgelin::tied_head``.
        recipe: Bits by role.
        rounded: Matrices that were rounded before, in the recipe's formats, by parameter.
        progress: Called with the number of weights of each matrix that is done.
        empty: Makes the arrays of codes and scales.

    Returns:
        What was done to each matrix.
    """
    work = _Work(model, recipe, rounded or {}, progress, empty)
    for node in _nodes(model):
        own = _read(node)
        if own is None:
            continue
        chosen = own.format(recipe)
        if chosen is None:
            continue
        if node.op_type == "Gather":
            work.lookup(node, chosen)
        elif node.op_type == "MatMul":
            work.matmul(node, chosen)
        elif node.op_type == TIED_HEAD:
            work.head(node, chosen)
        else:
            work.experts(node, chosen)
    drop_unused(model)
    return work.outcome


def round_to_nearest(rows: Array, chosen: Format, empty: Empty = np.empty) -> Rounded:
    """Round a matrix `[N, K]` as :func:`quantise` does what was not rounded before."""
    # Zero points lower the error of 16 codes by a ninth and cost 2 % of a step's time; of the
    # error with 256 codes, what int8 activations add is the larger part anyway.
    return round_matrix(
        rows, chosen.bits, chosen.block_size, symmetric=chosen.bits == 8, empty=empty
    )


def round_parameter(
    model: nn.Module, name: str, chosen: Format, empty: Empty = np.empty
) -> Rounded:
    """Round a parameter of a model, the rows of all experts as one matrix."""
    return round_to_nearest(parameter_rows(model, name), chosen, empty)


def parameter_rows(model: nn.Module, name: str) -> Array:
    """A parameter as the matrix that is rounded, a view."""
    parameter = model.get_parameter(name).detach()
    rows: Array = parameter.numpy().reshape(-1, parameter.shape[-1])
    return rows


def _nodes(model: ir.Model) -> list[ir.Node]:
    """The nodes that may have a matrix to round: lookups first, then heads, experts, products."""
    plain = [node for node in model.graph if not node.domain]
    return [
        *(node for node in plain if node.op_type == "Gather"),
        *tied_heads(model),
        *experts_nodes(model),
        *(node for node in plain if node.op_type == "MatMul"),
    ]


def _read(node: ir.Node) -> Matrices | None:
    """The matrices of a node, if kernels know such ones with codes."""
    lookup = node.op_type == "Gather"
    if lookup and node.attributes.get_int("axis", 0) != 0:
        return None
    start = {"Gather": 0, "MatMul": 1, TIED_HEAD: 1}.get(node.op_type, 3)
    experts = start == 3
    values = [value for value in node.inputs[start : None if experts else start + 1] if value]
    arrays = [constant(value) for value in values]
    shapes = []
    for array in arrays:
        if array is None or array.dtype != np.float32 or array.ndim != (3 if experts else 2):
            return None
        turned = node.op_type == "MatMul"
        width = array.shape[0 if turned else -1]
        shapes.append((array.size // width, width))
    if node.op_type in ("Gather", TIED_HEAD) and shapes[0][1] % 2:
        return None  # two 4-bit codes of one row share a byte
    names = tuple(value.name or "" for value in values)
    role = "experts" if experts else role_of(names[0])
    return Matrices(names, role, tuple(shapes), not lookup)


class _Work:
    """One call of :func:`quantise`: the graph, the recipe and the matrices rounded so far."""

    def __init__(
        self,
        model: ir.Model,
        recipe: Recipe,
        rounded: Mapping[str, Rounded],
        progress: Callable[[int], object],
        empty: Empty,
    ) -> None:
        self.model, self.recipe, self.progress, self.empty = model, recipe, progress, empty
        self.before = rounded
        self.outcome = Outcome()

    def lookup(self, node: ir.Node, chosen: Format) -> None:
        """Gather from a float matrix becomes GatherBlockQuantized."""
        table, indices = node.inputs
        codes, *rest = self._store(_name(table), _content(table), chosen, flat=True)
        new = ir.node(
            "GatherBlockQuantized",
            [codes, indices, *rest],
            attributes={
                "gather_axis": 0,
                "quantize_axis": 1,
                "block_size": chosen.block_size,
                "bits": chosen.bits,
            },
            domain=_VENDOR,
        )
        replace(self.model, node, [new], new.outputs)

    def head(self, node: ir.Node, chosen: Format) -> None:
        """``tied_head(x, embedding)`` becomes MatMulNBits over the embedding's own codes."""
        x, table = node.inputs
        self._multiply(node, x, _name(table), _content(table), chosen)

    def matmul(self, node: ir.Node, chosen: Format) -> None:
        """MatMul by a constant `[K, N]`, with a bias added after it, becomes MatMulNBits."""
        x, weight = node.inputs
        rows = np.ascontiguousarray(_content(weight).T)
        self._multiply(node, x, _name(weight), rows, chosen)

    def experts(self, node: ir.Node, chosen: Format) -> None:
        """Give ``experts`` rounded matrices `[E, N, K]`."""
        x, choice, weights, *matrices = node.inputs
        stored: list[ir.Value | None] = []
        gated = node.attributes.get_int("gated")
        # The kernel always has a gate: without one it reads the same row twice.
        for value, copies in zip(matrices, (1 if gated else 2, 1), strict=True):
            own = self._store(_name(value), _content(value), chosen, flat=True, copies=copies)
            stored += [*own, *[None] * (3 - len(own))]
        new = ir.node(
            node.op_type,
            [x, choice, weights, *stored],
            attributes={
                "gated": gated,
                "bits": chosen.bits,
                "block_size": chosen.block_size,
                "accuracy_level": self.recipe.accuracy_level,
            },
            domain=node.domain,
        )
        replace(self.model, node, [new], new.outputs)

    def _multiply(
        self, node: ir.Node, x: ir.Value | None, name: str, rows: Array, chosen: Format
    ) -> None:
        """Write the MatMulNBits node of ``x @ rows.T``."""
        codes, scales, *zero_points = self._store(name, rows, chosen, flat=False)
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
                "bits": chosen.bits,
                "block_size": chosen.block_size,
                "accuracy_level": self.recipe.accuracy_level,
            },
            domain=_VENDOR,
        )
        if bias is not None and add is not None:
            replace(self.model, add, [new], new.outputs)
        else:
            replace(self.model, node, [new], new.outputs)

    def _store(
        self, name: str, rows: Array, chosen: Format, *, flat: bool, copies: int = 1
    ) -> list[ir.Value]:
        """Initializers of rounded rows `[..., K]`: codes, scales, if asymmetric zero points."""
        matrix, lead = rows.reshape(-1, rows.shape[-1]), rows.shape[:-1]
        if name not in self.outcome.rounded:
            self.outcome.rounded[name] = self._round(name, matrix, chosen)
            self.progress(rows.size)
        rounded = self.outcome.rounded[name]
        # Where blocks fill the rows, both have the same bytes, and the file holds them once.
        codes = rounded.packed_rows(rows.shape[-1]) if flat else rounded.packed()
        if not np.shares_memory(codes, rounded.codes):
            packed, codes = codes, self.empty(codes.shape, codes.dtype)
            codes[...] = packed
        arrays: dict[str, npt.NDArray[Any]] = {
            f"q{chosen.bits}{'_rows' if flat else ''}": codes,
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

    def _round(self, name: str, rows: Array, chosen: Format) -> Rounded:
        """Round one matrix, unless that was done before, and note its error."""
        rounded = self.before.get(name) or round_to_nearest(rows, chosen, self.empty)
        error = relative_error(rounded, rows)
        self.outcome.matrices[name] = {"bits": chosen.bits, "error": error}
        return rounded


def _name(value: ir.Value | None) -> str:
    """Of a parameter."""
    return (value.name or "") if value is not None else ""


def _content(value: ir.Value | None) -> Array:
    """Of a parameter that :func:`_read` found good."""
    array = constant(value)
    assert array is not None
    content: Array = array.astype(np.float32, copy=False)
    return content


def _bias(add: ir.Node | None, product: ir.Value, width: int) -> ir.Value | None:
    """The constant `[N]` that ``add`` adds to ``product``, if that is what it does."""
    if add is None or add.op_type != "Add" or add.domain:
        return None
    other = add.inputs[1] if add.inputs[0] is product else add.inputs[0]
    array = constant(other)
    return other if array is not None and array.shape == (width,) else None
