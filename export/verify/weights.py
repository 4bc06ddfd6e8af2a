"""Compare the weights inside a bundle's graphs with those of its checkpoint.

A quantised graph is too far from its model for an error in a few weights to show in its outputs. So
every quantised matrix must be as good a rounding of the checkpoint's as the exporter makes: in each
block the squared error of ``scale * (q - zero_point)`` may not be larger than that of
:mod:`edgelin.export.quantise.rounding`. (Equal codes would be too much to ask: on another machine
the last bit of a sum moves a weight that lies in the middle of two codes.) Where a text decided
between codes (:mod:`edgelin.export.quantise.gptq`), that holds for the nearest codes, and each code
is at most one away from it. All other weights are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgelin import checkpoint as checkpoints
from edgelin.errors import EdgelinError
from edgelin.export import passes
from edgelin.export.passes import experts
from edgelin.export.profiles import find
from edgelin.export.quantise.recipe import role_of
from edgelin.export.quantise.rounding import round_matrix
from edgelin.export.step_form import load
from edgelin.export.trace import trace

Array = NDArray[Any]

# Where a node has the codes, scales and zero points of each of its rounded matrices.
_PLACES = {
    "MatMulNBits": ((1, 2, 3),),
    "GatherBlockQuantized": ((0, 2, 3),),
    "QMoE": experts.PLACES,
}
_PRODUCTS = ("MatMulNBits", "QMoE")
_ROOM = 1e-3  # of a block's squared error, for other machines' last bits
_LAST_BITS = 1e-6  # of a block's largest weight: float32 products
_SHOWN = 3
_OTHERWISE = "the manifest says otherwise; export the checkpoint again"


def check_weights(
    graph: Path,
    weights: dict[str, Array],
    rebuild: Callable[[], list[Array]],
    *,
    most_codes: int = 0,
) -> None:
    """Compare all weights of a graph.

    Args:
        graph: The ``.onnx`` file.
        weights: Parameter name to float32 array, from :func:`read_weights`.
        rebuild: Gives :func:`computed_constants`; called only for a graph that needs them.
        most_codes: How far a code may be away from the nearest one.

    Raises:
        EdgelinError: Some are not the checkpoint's; the first are named.
    """
    model = ir.load(graph)
    wrong = list(dict.fromkeys(_wrong(model, weights, rebuild, most_codes)))
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise EdgelinError(
            f"{graph}: not the checkpoint's weights: {', '.join(wrong[:_SHOWN])}{more}; "
            "export the checkpoint again"
        )


def check_formats(graph: Path, weights: dict[str, Array], record: dict[str, Any] | None) -> None:
    """Compare how a graph stores its matrices with what the manifest says of it.

    Args:
        graph: The ``.onnx`` file.
        weights: As of :func:`check_weights`.
        record: ``quantisation`` of the variant in the manifest; None: all is float.

    Raises:
        EdgelinError: A matrix has other bits than its role, or the products another arithmetic.
    """
    record = record or {}
    roles, matrices = record.get("roles", {}), record.get("matrices", {})
    fewest = 8  # as of a variant of which no matrix was large enough
    for node in ir.load(graph).graph:
        level = node.attributes.get_int("accuracy_level", 0)
        if node.op_type == "MatMulNBits" and level != record.get("accuracy_level"):
            raise EdgelinError(f"{graph}: accuracy_level is {level}, {_OTHERWISE}")
        for stored in _stored(node, weights):
            fewest = min(fewest, stored.bits)
            role = "experts" if node.op_type == "QMoE" else role_of(stored.name)
            said = matrices.get(stored.name, roles.get(role, "float")).partition("/")[0]
            if said not in ("auto", f"int{stored.bits}"):
                raise EdgelinError(
                    f"{graph}: {stored.name} has {stored.bits} bits, the manifest says {said}; "
                    "export the checkpoint again"
                )
    if record and fewest != record.get("bits"):
        raise EdgelinError(f"{graph}: the fewest bits are {fewest}, {_OTHERWISE}")


def read_weights(checkpoint: Path) -> dict[str, Array]:
    """What a checkpoint's step form computes with, in float32 by name, a tied head once."""
    own = checkpoints.own_tensors(load(checkpoint))
    # No graph holds an integer: the seed of random features only says where these come from.
    return {k: v.detach().numpy() for k, v in own.items() if v.is_floating_point()}


def computed_constants(checkpoint: Path, profile: str, *, lengths: bool = False) -> list[Array]:
    """What an export works out of the parameters, such as a diagonal recurrence's decay.

    Traces the model, which takes a while.

    Args:
        checkpoint: Folder in our own format.
        profile: Name of the profile.
        lengths: Whether the graph takes rows of different lengths.
    """
    chosen = find(profile)
    model = load(checkpoint)
    graph = trace(model, lengths=lengths)
    passes.lower(graph, chosen)
    passes.finish(graph, chosen)
    own = checkpoints.own_tensors(model)
    found = [_content(v) for name, v in graph.graph.initializers.items() if name not in own]
    return [array for array in found if np.issubdtype(array.dtype, np.floating)]


def _wrong(
    model: ir.Model,
    weights: dict[str, Array],
    rebuild: Callable[[], list[Array]],
    most_codes: int,
) -> Iterator[str]:
    """Names of the parameters that the graph holds with other values, or not at all."""
    seen = set()
    for node in model.graph:
        for stored in _stored(node, weights):
            seen.add(stored.name)
            if not _is_rounding(stored, weights.get(stored.name), most_codes):
                yield stored.name
    constants = [_content(value) for value in model.graph.initializers.values()]
    for name, value in model.graph.initializers.items():
        if name not in weights:
            continue
        seen.add(name)
        for node in {use.node for use in value.uses()}:
            turned = node.op_type == "MatMul" and weights[name].ndim == 2
            wanted = weights[name].T if turned else weights[name]
            if not np.array_equal(_content(value), wanted):
                yield name
    # Equal ones, such as norms that are all one, stand in the graph once, under either name.
    lost = [
        name
        for name in sorted(weights.keys() - seen)
        if not any(_is_folded(found, weights[name]) for found in constants)
    ]
    if lost and not all(any(_equal(x, y) for y in constants) for x in rebuild()):
        yield from lost


@dataclass(frozen=True)
class _Stored:
    """A rounded matrix, or one an expert, as a node reads it.

    Args:
        name: Of the parameter.
        codes: As they are packed.
        scales: One a block.
        zeros: Zero points as they are packed; None: all in the middle.
        bits: Of a code.
        block_size: Weights that share a scale.
    """

    name: str
    codes: Array
    scales: Array
    zeros: Array | None
    bits: int
    block_size: int


def _stored(node: ir.Node, weights: dict[str, Array]) -> Iterator[_Stored]:
    """The rounded matrices that a node reads."""
    if node.op_type == "DequantizeLinear":
        yield from _portable(node)
        return
    attributes = node.attributes
    bits = attributes.get_int("bits", attributes.get_int("expert_weight_bits", 0))
    for places in _PLACES.get(node.op_type, ()):
        codes, scales, zeros = (node.inputs[i] if i < len(node.inputs) else None for i in places)
        name = codes.name or "" if codes is not None else ""
        yield _Stored(
            next((known for known in _stems(name) if known in weights), name),
            _content(codes),
            _content(scales),
            None if zeros is None else _content(zeros),
            bits,
            attributes.get_int("block_size", 0),
        )


def _portable(node: ir.Node) -> Iterator[_Stored]:
    """The matrix that a DequantizeLinear reads, or rows that were looked up in it."""
    sources = [_looked_up(value) for value in node.inputs]
    name = sources[0].name or "" if sources[0] is not None else ""
    stem, mark, bits = name.rpartition("_dq")
    if not mark:
        return
    turned = node.attributes.get_int("axis", 1) == 0
    codes, scales, *rest = (_content(v).T if turned else _content(v) for v in sources)
    middle = 0 if rest else 1 << (int(bits) - 1)
    packed = [_pack(cells.astype(np.int16) + middle, int(bits)) for cells in (codes, *rest)]
    zeros = packed[1] if rest else None
    size = node.attributes.get_int("block_size", 0)
    yield _Stored(stem, packed[0], scales, zeros, int(bits), size)


def _looked_up(value: ir.Value | None) -> ir.Value | None:
    """The matrix of which a value is rows; the value itself if it is none."""
    node = value.producer() if value is not None else None
    return node.inputs[0] if node is not None and node.op_type == "Gather" else value


def _pack(cells: Array, bits: int) -> Array:
    """`[N, cells]` to `[N, bytes]`, as MatMulNBits has them."""
    if bits == 8:
        return cells.astype(np.uint8)
    cells = np.pad(cells, ((0, 0), (0, cells.shape[1] % 2)))
    packed: Array = (cells[:, 0::2] | (cells[:, 1::2] << 4)).astype(np.uint8)
    return packed


def _stems(name: str) -> list[str]:
    """What the name of codes, ``<parameter>_q<bits>`` and perhaps ``_rows``, may come from."""
    return [name.removesuffix("_rows").removesuffix(end) for end in ("_q4", "_q8")]


def rounded_weights(graph: Path, weights: dict[str, Array]) -> dict[str, Array]:
    """What the quantised matrices of a graph stand for, by parameter, once they were checked."""
    found = {}
    for node in ir.load(graph).graph:
        for stored in _stored(node, weights):
            values = _values(stored, weights[stored.name].shape)
            if values is not None:
                found[stored.name] = values.reshape(weights[stored.name].shape)
    return found


def block_sizes(graph: Path, weights: dict[str, Array]) -> dict[str, int]:
    """How many numbers share a scale in the matrices that a graph multiplies with, by parameter."""
    nodes = [node for node in ir.load(graph).graph if node.op_type in _PRODUCTS]
    return {s.name: s.block_size for node in nodes for s in _stored(node, weights)}


def _is_rounding(stored: _Stored, wanted: Array | None, most_codes: int) -> bool:
    """Whether a matrix rounds ``wanted`` [..., K] as well as the exporter would."""
    if wanted is None or wanted.ndim not in (2, 3):
        return False
    found = _cells(stored, wanted.shape)
    if found is None:
        return False
    codes, scale, zero = found
    size, width = stored.block_size, wanted.shape[-1]
    rows: Array = wanted.reshape(-1, width)
    if most_codes:
        place = np.clip(rows / np.where(scale == 0, 1, scale) + zero, 0, (1 << stored.bits) - 1)
        if not (np.abs(codes - place) <= most_codes + 0.5 + _ROOM).all():
            return False
        codes = np.rint(place)
    best = round_matrix(rows, stored.bits, size, symmetric=stored.zeros is None).values(width)
    values = (codes - zero) * scale
    error, limit = (_block_errors(values - rows, size) for values in (values, best))
    slack = size * np.square(_LAST_BITS * _blocks(np.abs(rows), size).max(-1))
    return bool((error <= (1 + _ROOM) * limit + slack).all())  # NaN is not


def _values(stored: _Stored, shape: tuple[int, ...]) -> Array | None:
    """The rows `[N, K]` that codes stand for, of all experts; None if there are others."""
    found = _cells(stored, shape)
    if found is None:
        return None
    codes, scale, zero = found
    values: Array = (codes - zero) * scale
    return values


def _cells(stored: _Stored, shape: tuple[int, ...]) -> tuple[Array, Array, Array] | None:
    """Codes, scales and zero points, float32 `[N, K]` each; None if there are others."""
    bits, size = stored.bits, stored.block_size
    if bits not in (4, 8) or size < 2:
        return None
    rows, width = math.prod(shape[:-1]), shape[-1]
    count = -(-width // size)
    copies = stored.scales.size // (rows * count)
    parts = [_once(array, rows, copies) for array in (stored.codes, stored.scales, stored.zeros)]
    if parts[0] is None or parts[1] is None or (parts[2] is None) != (stored.zeros is None):
        return None
    codes, scales = _unpack(parts[0], bits)[:, :width], parts[1]
    zero = np.full((rows, count), 1 << (bits - 1))
    if parts[2] is not None:
        zero = _unpack(parts[2], bits)[:, :count]
    if codes.shape != (rows, width) or not scales.shape == zero.shape == (rows, count):
        return None
    spread = [np.repeat(array, size, axis=1)[:, :width] for array in (scales, zero)]
    return codes.astype(np.float32), spread[0], spread[1].astype(np.float32)


def _once(array: Array | None, rows: int, copies: int) -> Array | None:
    """`[rows, ...]` of an array that has each row so often; None if the copies differ."""
    if array is None or copies < 1 or array.size % (rows * copies):
        return None
    each = array.reshape(rows, copies, -1)
    return each[:, 0] if (each == each[:, :1]).all() else None


def _block_errors(difference: Array, size: int) -> Array:
    """Squared error of every block, `[N, blocks]`."""
    errors: Array = np.square(_blocks(difference, size)).sum(-1)
    return errors


def _blocks(rows: Array, size: int) -> Array:
    """`[N, K]` to `[N, blocks, size]`, padded with zeros."""
    pad = -rows.shape[1] % size
    return np.pad(rows, ((0, 0), (0, pad))).reshape(len(rows), -1, size)


def _unpack(packed: Array, bits: int) -> Array:
    """`[N, bytes]` to one code a cell; for 4 bits the low half of a byte comes first."""
    packed = packed.astype(np.uint8)
    if bits == 8:
        return packed
    cells: Array = np.stack([packed & 15, packed >> 4], axis=-1)
    return cells.reshape(len(packed), -1)


def _is_folded(found: Array, parameter: Array) -> bool:
    """Whether a constant is a parameter in another shape, or -exp of it, a rate of decay."""
    if found.size != parameter.size or found.dtype != np.float32:
        return False
    found, flat = found.reshape(-1), parameter.reshape(-1)
    return np.array_equal(found, flat) or _equal(found, -np.exp(flat))


def _equal(one: Array, other: Array) -> bool:
    """Whether two constants are the same but for other machines' last bits."""
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-6, atol=0))


def _content(value: ir.Value | None) -> Array:
    """Content of an initializer; nothing for a value that is computed."""
    tensor = value.const_value if value is not None else None
    return np.zeros(0) if tensor is None else tensor.numpy()
