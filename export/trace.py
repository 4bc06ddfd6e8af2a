"""Trace a model once into an ONNX graph whose recurrences are still single, opaque nodes.

``torch.onnx.export`` sees the model's ordinary ``forward(inputs, state)``. Every operator of the
``edgelin`` namespace becomes one node of the ONNX domain ``edgelin``; :mod:`edgelin.export.passes`
turns these into real ONNX operators later, differently for each profile. The tied output head is
kept as one node too, so that a pass can let it share the embedding matrix.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import torch
from onnxscript import optimizer

from edgelin.errors import EdgelinError
from edgelin.export import trace_blocks
from edgelin.export.contract import LENGTHS, signature
from edgelin.export.passes.experts import OP_TYPE as EXPERTS
from edgelin.export.passes.lower_recurrences import DOMAIN, OPERATORS
from edgelin.mixer_trial import is_outside, reason
from edgelin.recurrences import CHUNK
from edgelin.state import GROWING, StateSpec

if TYPE_CHECKING:
    from edgelin.model import Block, SequenceModel

# The newest opset that torch writes correctly; RMSNormalization (23) stays one node in it.
TRACE_OPSET = 23
# Unequal and unlike any width, so that the exporter cannot confuse the symbolic axes.
_EXAMPLE_BATCH, _EXAMPLE_TIME, _EXAMPLE_PAST = 2, 3, 5
_ATTRIBUTE_TYPES = {
    "float": onnx.defs.OpSchema.AttrType.FLOAT,
    "int": onnx.defs.OpSchema.AttrType.INT,
    "bool": onnx.defs.OpSchema.AttrType.INT,
    "str": onnx.defs.OpSchema.AttrType.STRING,
}


def trace(model: SequenceModel, *, max_time: int = CHUNK, lengths: bool = False) -> ir.Model:
    """Trace ``model.forward`` with symbolic batch and time.

    Args:
        model: Model in float32 on the CPU, in evaluation mode.
        max_time: Largest number of steps of a call.
        lengths: Whether the rows of a call may be of different lengths, in an input ``lengths``.

    Returns:
        Graph with inputs ``input_ids`` or ``features``, ``past_*`` and perhaps ``lengths``, and
        outputs ``logits`` or ``outputs`` and ``present_*``, in the order of
        ``model.state_specs()``; weights keep their parameter names.

    Raises:
        EdgelinError: A mixer has no form to export, such as a window shorter than a call.
    """
    _check_mixers(model, lengths=lengths)
    specs = model.state_specs()
    if not specs:
        raise EdgelinError(
            "no layer of the model has a state, so that a token knows nothing of those before it; "
            "add a layer that mixes tokens"
        )
    source, output = signature(model.config)
    steps = np.zeros((_EXAMPLE_BATCH, _EXAMPLE_TIME, *source.step), source.dtype)
    axes = _Axes(max_time)
    ragged = [_example_lengths()] if lengths else []
    positional = _Positional(model, specs)
    alike = trace_blocks.kinds(model)
    with trace_blocks.as_calls(alike):
        graph = _export(
            positional,
            [torch.from_numpy(steps), *map(_example, specs), *ragged],
            [axes.steps, *map(axes.state, specs), *([axes.rows] if lengths else [])],
            [source.name, *(s.input_name for s in specs), *([LENGTHS] if lengths else [])],
            [output.name, *(spec.output_name for spec in specs)],
            alike,
        )
    _merge_shared(graph.graph, positional)
    _name_weights(graph)
    _mark_tied_heads(graph)
    optimizer.optimize_ir(graph)
    if alike:
        width = model.config.hidden_size
        blocks = {kind.name: _block(kind, width, axes, ragged) for kind in alike}
        trace_blocks.inline(graph, blocks)
        _name_weights(graph)
        trace_blocks.tidy(graph)
    _strip(graph)
    _drop_prefix(graph, "model.")
    return graph


def _block(
    kind: trace_blocks.Kind, width: int, axes: _Axes, ragged: list[torch.Tensor]
) -> ir.Model:
    """The graph of one of the blocks that are alike."""
    specs, block = kind.specs[0], kind.blocks[0]
    weights = [tensor.detach() for tensor in (*block.parameters(), *block.buffers())]
    x = torch.zeros(_EXAMPLE_BATCH, _EXAMPLE_TIME, width)
    position = torch.zeros(_EXAMPLE_BATCH, dtype=torch.int64)
    rows = [axes.rows for _ in ragged]
    return _export(
        trace_blocks.Alone(kind, lengths=bool(ragged)),
        [x, position, *ragged, *map(_example, specs), *weights],
        [axes.steps, axes.rows, *rows, *map(axes.state, specs), *({} for _ in weights)],
        None,
        None,
        [],
    )


def _export(
    module: torch.nn.Module,
    arguments: list[torch.Tensor],
    axes: list[dict[int, Any]],
    inputs: list[str] | None,
    outputs: list[str] | None,
    alike: list[trace_blocks.Kind],
) -> ir.Model:
    """Torch's export of a module that takes one tensor and any number of others."""
    with torch.no_grad(), _quiet(), _told(module):
        program = torch.onnx.export(
            module,
            tuple(arguments),
            dynamo=True,
            opset_version=TRACE_OPSET,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=_like_signature(module, axes),
            custom_translation_table=_translations() | trace_blocks.translations(alike),
            optimize=False,
            verbose=False,
        )
    assert program is not None
    return program.model


@contextmanager
def _told(module: torch.nn.Module) -> Iterator[None]:
    """Tell in one line why a model with mixers from outside cannot be traced."""
    try:
        yield
    except Exception as error:  # torch raises many kinds; ours are ours to see as they are
        if not is_outside(module):
            raise
        cause = error.__cause__ or error
        raise EdgelinError(
            f"the mixers from outside of edgelin cannot be traced: {reason(cause)}; nothing in "
            f"forward may depend on a tensor's values, see docs/new-mixer.md"
        ) from error


def _like_signature(module: torch.nn.Module, axes: list[dict[int, Any]]) -> Any:
    """The axes of arguments, those of ``*rest`` in a tuple of their own."""
    named = len(inspect.signature(module.forward).parameters) - 1
    return (*axes[:named], tuple(axes[named:]))


class _Axes:
    """The symbolic axes of a trace's inputs."""

    def __init__(self, max_time: int) -> None:
        self._batch = torch.export.Dim("batch", min=1, max=2**20)
        self._past = torch.export.Dim(GROWING, min=0, max=2**31)
        self.rows = {0: self._batch}
        self.steps = {0: self._batch, 1: torch.export.Dim("time", min=1, max=max_time)}

    def state(self, spec: StateSpec) -> dict[int, Any]:
        """Those of a state."""
        axis = spec.growing_axis
        return self.rows if axis is None else {**self.rows, axis: self._past}


def _example(spec: StateSpec) -> torch.Tensor:
    """A state of the trace."""
    shape = (_EXAMPLE_BATCH, *spec.sized(_EXAMPLE_PAST))
    return torch.full(shape, spec.initial, dtype=getattr(torch, spec.dtype))


def _example_lengths() -> torch.Tensor:
    """Lengths of the rows of the trace."""
    return torch.arange(1, _EXAMPLE_BATCH + 1)


def _check_mixers(model: SequenceModel, *, lengths: bool) -> None:
    """Refuse what trains but can't be exported, such as a ring that one call could write round."""
    for spec in model.state_specs() if lengths else ():
        if spec.growing_axis is not None:
            raise EdgelinError(
                f"layer {spec.layer}: streams of different lengths need states of fixed size, and "
                f"that of attention to all tokens grows; export with --attention window=N, or "
                f"without --streams"
            )
    for layer, block in enumerate(model.blocks):
        for branch in cast("Block", block).branches():
            obstacle = getattr(getattr(branch, "config", None), "export_obstacle", None)
            if obstacle is not None:
                raise EdgelinError(f"layer {layer}: {obstacle}")
            if lengths and "lengths" not in inspect.signature(branch.forward).parameters:
                raise EdgelinError(
                    f"layer {layer}: {type(branch).__module__}.Mixer takes no lengths, which "
                    f"--streams needs; add them to its forward (docs/new-mixer.md), or leave "
                    f"--streams out"
                )


class _Positional(torch.nn.Module):
    """The model with its states as positional arguments, which is what the exporter can name."""

    def __init__(self, model: SequenceModel, specs: list[StateSpec]) -> None:
        super().__init__()
        self.model = model
        self.names = [spec.name for spec in specs]

    def forward(self, inputs: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits or outputs, then every new state; ``rest`` is the states, then any lengths."""
        state = dict(zip(self.names, rest, strict=False))
        outputs, new = self.model(inputs, state, *rest[len(self.names) :])
        return outputs, *(new[name] for name in self.names)


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """For every operator that a pass lowers later, a function that writes its opaque node."""
    table: dict[Callable[..., Any], Callable[..., Any]] = {}
    for name in (*OPERATORS, EXPERTS, "keep_last"):
        if hasattr(torch.ops.edgelin, name):  # only those of the model's mixers are loaded
            overload = getattr(torch.ops.edgelin, name).default
            table[overload] = _opaque(name, overload._schema)
    return table


def _opaque(name: str, schema: Any) -> Callable[..., Any]:
    """A translation that keeps tensor arguments as inputs and all others as attributes."""
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    inputs, attributes, tensor_at = [], [], []
    for argument in schema.arguments:
        kind = str(argument.type)
        is_optional = kind.startswith("Optional[")
        kind = kind.removeprefix("Optional[").removesuffix("]")
        tensor_at.append(kind == "Tensor")
        if kind == "Tensor":
            option = optional if is_optional else single
            inputs.append(
                onnx.defs.OpSchema.FormalParameter(
                    argument.name, f"T_{argument.name}", param_option=option
                )
            )
        else:
            attributes.append(
                onnx.defs.OpSchema.Attribute(
                    argument.name, _ATTRIBUTE_TYPES[kind], required=not is_optional
                )
            )
    outputs = [
        onnx.defs.OpSchema.FormalParameter(f"out_{i}", f"T_out_{i}")
        for i in range(len(schema.returns))
    ]
    any_type = ["tensor(float)", "tensor(int64)"]
    op = onnxscript.values.Op(
        onnxscript.values.Opset(DOMAIN, 1),
        name,
        onnx.defs.OpSchema(
            name,
            DOMAIN,
            1,
            inputs=inputs,
            outputs=outputs,
            attributes=attributes,
            type_constraints=[(p.type_str, any_type, "") for p in (*inputs, *outputs)],
        ),
    )
    names = [argument.name for argument in schema.arguments]

    def translate(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = [given.get(n) for n, is_t in zip(names, tensor_at, strict=True) if is_t]
        rest = {
            n: given[n]
            for n, is_t in zip(names, tensor_at, strict=True)
            if not is_t and given.get(n) is not None
        }
        return op(*tensors, **rest)

    return translate


def _merge_shared(graph: ir.Graph, model: torch.nn.Module) -> None:
    """Give what several layers share its first name, under which a checkpoint has it."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        known = first.setdefault(id(tensor), name)
        value = graph.initializers.get(name)
        if known == name or value is None:
            continue
        if known in graph.initializers:
            value.replace_all_uses_with(graph.initializers[known])
            del graph.initializers[name]
        else:
            value.name = known


def _name_weights(model: ir.Model) -> None:
    """Fold ``Transpose(parameter)`` into a parameter of the same name, unless others read it.

    The optimizer would fold it too, but under a new name; which matrices stay float in a quantised
    graph is decided by parameter name.
    """
    for name, source in list(model.graph.initializers.items()):
        readers = [use.node for use in source.uses()]
        orders = {tuple(n.attributes.get_ints("perm")) for n in readers if _is_transpose(n)}
        if len(orders) != 1 or not all(map(_is_transpose, readers)):
            continue
        assert source.const_value is not None
        array = source.const_value.numpy().transpose(orders.pop())
        del model.graph.initializers[name]
        new = ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=source.type,
            const_value=ir.Tensor(array, name=name),
        )
        model.graph.register_initializer(new)
        for node in readers:
            node.outputs[0].replace_all_uses_with(new)
            model.graph.remove(node, safe=True)


def _is_transpose(node: ir.Node) -> bool:
    """Whether a node swaps axes in an order that it names."""
    return node.op_type == "Transpose" and "perm" in node.attributes


def _mark_tied_heads(model: ir.Model) -> None:
    """Turn ``MatMul(x, Transpose(embedding))`` into one ``edgelin::tied_head(x, embedding)``."""
    for node in list(model.graph):
        right = node.inputs[1] if node.op_type == "MatMul" else None
        transpose = right.producer() if right is not None else None
        if transpose is None or transpose.op_type != "Transpose":
            continue
        weight = transpose.inputs[0]
        if weight is None or weight.const_value is None:
            continue
        head = ir.node(
            "tied_head", [node.inputs[0], weight], domain=DOMAIN, outputs=list(_fresh(node))
        )
        model.graph.insert_after(node, head)
        ir.convenience.replace_all_uses_with(node.outputs, head.outputs, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)


def _fresh(node: ir.Node) -> Iterator[ir.Value]:
    """New values with the names, shapes and types of a node's outputs."""
    for value in node.outputs:
        yield ir.Value(name=value.name, shape=value.shape, type=value.type)


def _strip(model: ir.Model) -> None:
    """Drop the trace's own metadata (source positions, module stacks): it holds machine paths."""
    model.metadata_props.clear()
    model.doc_string = None
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.producer_name = "edgelin"
    model.producer_version = None


def _drop_prefix(model: ir.Model, prefix: str) -> None:
    """Give parameters the names that they have in the checkpoint."""
    for name, value in list(model.graph.initializers.items()):
        if name.startswith(prefix):
            value.name = name.removeprefix(prefix)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's remarks about its own exporter; nothing of ours can answer them."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
