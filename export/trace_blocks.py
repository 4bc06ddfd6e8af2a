"""Blocks that are alike are traced once: tracing costs about a second a layer otherwise.

Two blocks are alike if they differ in nothing but their weights and the index of their layer. Where
a model has several such blocks, one of them is traced as an ONNX function of the stream, the
states and the weights. In the trace of the model each is a single node, ``edgelin::block``, which
calls that function; inlined, the graph is the one that a trace of every layer gives.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import onnx
import onnx_ir as ir
import onnxscript
import torch
from onnx_ir.passes import common
from onnxscript import optimizer
from torch import Tensor

from edgelin.state import StateSpec

if TYPE_CHECKING:
    from edgelin.model import Block, SequenceModel

_LEAST = 3  # blocks; a trace of its own costs as much as two
_DOMAIN = "edgelin.blocks"
_OWN = frozenset(vars(torch.nn.Module()))  # what every module has
_PLAIN = (int, float, str, bool, type(None))


@dataclasses.dataclass
class Kind:
    """Blocks that are alike.

    Args:
        name: Of the function.
        blocks: The blocks.
        specs: The states of each.
    """

    name: str
    blocks: list[Block]
    specs: list[list[StateSpec]]

    @property
    def weights(self) -> list[str]:
        """Names of the parameters and buffers."""
        first = self.blocks[0]
        return [name for name, _ in (*first.named_parameters(), *first.named_buffers())]

    def called(self, index: int) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        """What stands for the ``forward`` of one of the blocks."""
        block, specs = self.blocks[index], self.specs[index]

        def forward(
            x: Tensor,
            state: dict[str, Tensor],
            position: Tensor,
            shared: dict[str, Tensor],
            lengths: Tensor | None = None,
        ) -> tuple[Tensor, dict[str, Tensor]]:
            given = [x, position, *([] if lengths is None else [lengths])]
            states = [state[spec.name] for spec in specs]
            weights = [*block.parameters(), *block.buffers()]  # those that the exporter put there
            growing = [spec.growing_axis or 0 for spec in specs]
            x, *after = torch.ops.edgelin.block(given, states, weights, growing, self.name)
            return x, dict(zip((spec.name for spec in specs), after, strict=True))

        return forward


class Alone(torch.nn.Module):
    """The first block of a kind as a function of everything that it reads."""

    def __init__(self, kind: Kind, *, lengths: bool) -> None:
        super().__init__()
        self._block, self._names = [kind.blocks[0]], kind.weights  # in a list: no submodule
        self._states, self._lengths = [spec.name for spec in kind.specs[0]], lengths

    def forward(self, x: Tensor, position: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """``rest`` is any lengths, the states and the weights."""
        lengths, rest = (rest[0], rest[1:]) if self._lengths else (None, rest)
        count = len(self._states)
        state = dict(zip(self._states, rest[:count], strict=True))
        weights = dict(zip(self._names, rest[count:], strict=True))
        given: Any = (x, state, position, {}, lengths)
        y, after = torch.func.functional_call(self._block[0], weights, given)
        return y, *(after[name] for name in self._states)


@torch.library.custom_op("edgelin::block", mutates_args=())
def _block(
    given: list[Tensor], states: list[Tensor], weights: list[Tensor], growing: list[int], kind: str
) -> list[Tensor]:
    raise NotImplementedError("a block is a single operator in a trace only")


@_block.register_fake
def _fake(
    given: list[Tensor], states: list[Tensor], weights: list[Tensor], growing: list[int], kind: str
) -> list[Tensor]:
    x, after = given[0], []
    for state, axis in zip(states, growing, strict=True):
        sizes = [n + x.shape[1] * (axis > 0 and i == axis) for i, n in enumerate(state.shape)]
        after.append(state.new_empty(sizes))
    return [torch.empty_like(x), *after]


def kinds(model: SequenceModel) -> list[Kind]:
    """The kinds of which a model has several blocks, in the order of their first."""
    found: dict[Any, list[Block]] = {}
    for block in cast("list[Block]", list(model.blocks)):
        if not any(getattr(branch, "shares", False) for branch in block.branches()):
            found.setdefault(_signature(block), []).append(block)
    alike = [blocks for blocks in found.values() if len(blocks) >= _LEAST]
    return [
        Kind(f"kind_{i}", blocks, [block.state_specs() for block in blocks])
        for i, blocks in enumerate(alike)
    ]


@contextlib.contextmanager
def as_calls(found: list[Kind]) -> Iterator[None]:
    """Have every block of some kinds be a single operator."""
    blocks = [(kind, i, block) for kind in found for i, block in enumerate(kind.blocks)]
    try:
        for kind, i, block in blocks:
            block.forward = kind.called(i)  # type: ignore[method-assign]
        yield
    finally:
        for _, _, block in blocks:
            vars(block).pop("forward", None)


def translations(found: list[Kind]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """How the exporter writes ``edgelin::block``."""
    counts = {kind.name: 1 + len(kind.specs[0]) for kind in found}

    def translate(given: Any, states: Any, weights: Any, growing: Any, kind: str) -> Any:
        inputs = [*given, *states, *weights]
        schema = onnx.defs.OpSchema(
            kind,
            _DOMAIN,
            1,
            inputs=_formal("in", len(inputs)),
            outputs=_formal("out", counts[kind]),
            type_constraints=[
                (p.type_str, ["tensor(float)", "tensor(double)", "tensor(int64)"], "")
                for p in (*_formal("in", len(inputs)), *_formal("out", counts[kind]))
            ],
        )
        opset = onnxscript.values.Opset(_DOMAIN, 1)
        result = onnxscript.values.Op(opset, kind, schema)(*inputs)
        return result if isinstance(result, list | tuple) else [result]

    return {torch.ops.edgelin.block.default: translate} if found else {}


def inline(model: ir.Model, functions: dict[str, ir.Model]) -> None:
    """Replace every call by the nodes of its function, which are optimised before they are many."""
    for name, one in functions.items():
        optimizer.optimize_ir(one)
        graph = one.graph
        constants = []
        for value in list(graph.initializers.values()):
            node = ir.node("Constant", [], attributes={"value": value.const_value})
            ir.convenience.replace_all_uses_with(value, node.outputs[0])
            constants.append(node)
        graph.initializers.clear()
        if constants:
            graph.insert_before(graph[0], constants)
        own = ir.Function(_DOMAIN, name, graph=graph, attributes=[])
        model.functions.update({own.identifier(): own, **one.functions})
    common.InlinePass()(model)
    model.opset_imports.pop(_DOMAIN, None)
    _share_sizes(model.graph)


def tidy(model: ir.Model) -> None:
    """What the optimiser does, without its rules, whose time grows with the square of the nodes."""
    optimizer.fold_constants(model)
    ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


def _share_sizes(graph: ir.Graph) -> None:
    """Read a symbolic size from the first input of the model that has it, as a single trace does.

    What follows from it, such as the angles of rotary positions, is then the same node for all
    layers.
    """
    places: dict[str, tuple[ir.Value, int]] = {}
    for value in graph.inputs:
        for axis, length in enumerate(value.shape or ()):
            if isinstance(length, ir.SymbolicDim) and length.value is not None:
                places.setdefault(length.value, (value, axis))
    for node in graph:
        shape = node.inputs[0].shape if node.op_type == "Shape" and node.inputs[0] else None
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", -1)
        size: Any = shape[start] if shape is not None and end == start + 1 else None
        if isinstance(size, ir.SymbolicDim) and size.value in places:
            value, axis = places[size.value]
            node.replace_input_with(0, value)
            node.attributes["start"] = ir.AttrInt64("start", axis)
            node.attributes["end"] = ir.AttrInt64("end", axis + 1)


def _formal(name: str, count: int) -> list[Any]:
    """Parameters of a schema, each with a type of its own."""
    return [
        onnx.defs.OpSchema.FormalParameter(f"{name}_{i}", f"T_{name}_{i}") for i in range(count)
    ]


def _signature(module: torch.nn.Module) -> Any:
    """Equal for modules that differ in weights and layer only; of others, and in doubt, not."""
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return (
        type(module),
        tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors),
        tuple((k, _value(v)) for k, v in vars(module).items() if k not in _OWN and k != "layer"),
        tuple((name, _signature(child)) for name, child in module.named_children()),
    )


def _value(value: Any) -> Any:
    """An attribute's value, or what is equal to nothing else."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, tuple | list):
        return (type(value), tuple(map(_value, value)))
    if isinstance(value, dict):
        return (dict, tuple((k, _value(v)) for k, v in value.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return (type(value), tuple((f.name, _value(getattr(value, f.name))) for f in fields))
    return object()
