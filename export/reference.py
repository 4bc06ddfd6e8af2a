"""The golden stream in float64, without a second copy of the model in memory.

A block has its weights in float64 while it runs, and those of a quantised graph in their place
where these are asked for. The embedding and the head keep float32: what is read from them is exact
in float64. In float32 instead, the stream shows what the model makes of that precision alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgelin.export.activations import RoundedActivations, round_activations
from edgelin.export.contract import signature
from edgelin.export.golden import Stream, inputs_of
from edgelin.export.quantise.rounding import Rounded
from edgelin.mapped import Empty, release

if TYPE_CHECKING:
    from edgelin.model import SequenceModel

_HEAD_ROWS = 4096


def reference(
    model: SequenceModel,
    rounded: Mapping[str, Rounded] | None = None,
    *,
    rounded_activations: bool = False,
    dtype: torch.dtype = torch.float64,
    empty: Empty = np.empty,
) -> Stream:
    """Run the model in one call from its initial state.

    Args:
        model: The model; not changed.
        rounded: Parameters to replace by their quantised values.
        rounded_activations: Round also what these are multiplied with, to 8 bits in their blocks.
        dtype: What is computed in.
        empty: Makes the arrays of the outputs and states.
    """
    rounded = rounded or {}
    source, output = signature(model.config)
    inputs = inputs_of(model)
    outputs = empty((len(inputs), output.size), np.float64)
    exact = _Exact(model, rounded, dtype)
    sizes: dict[Tensor, int] = {
        parameter: rounded[name].block_size
        for name, parameter in exact.model.named_parameters()
        if rounded_activations and name in rounded
    }
    with torch.no_grad(), RoundedActivations(list(sizes.items())):
        hidden, states = exact.hidden(torch.from_numpy(inputs)[None])
        if source.unit == "token" and exact.model.head_weight in sizes:
            hidden = round_activations(hidden, sizes[exact.model.head_weight])
        exact.outputs(hidden[0], torch.from_numpy(outputs))
    return Stream(
        inputs,
        outputs,
        {name: _kept(value[0], empty) for name, value in states.items()},
        output.is_distribution,
    )


def _kept(value: Tensor, empty: Empty) -> npt.NDArray[Any]:
    """A copy in memory of the caller's choice: the states of a model may be as large as a layer."""
    array = value.numpy()
    kept = empty(array.shape, array.dtype)
    kept[...] = array
    return kept


class _Exact:
    """A model in another precision that shares the storage of the first one's parameters."""

    def __init__(
        self, model: SequenceModel, rounded: Mapping[str, Rounded], dtype: torch.dtype
    ) -> None:
        shared: dict[int, Any] = {}  # what deepcopy takes in the place of copies
        for tensor in (*model.parameters(), *model.buffers()):
            view = tensor.detach()
            is_parameter = isinstance(tensor, nn.Parameter)
            shared[id(tensor)] = nn.Parameter(view, requires_grad=False) if is_parameter else view
        self.model = copy.deepcopy(model, shared).eval()
        self._rounded, self._dtype = rounded, dtype
        self._is_text = model.config.features is None
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for block in self.model.blocks:
            _convert_while_it_runs(block, names, rounded, dtype)
        for name, part in self.model.named_children():
            if name != "blocks" and not (self._is_text and name in ("embedding", "head")):
                part.to(dtype)
        if self._is_text:
            self.model.embedding.register_forward_hook(self._embedded)

    def hidden(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What the head reads, and the states."""
        return self.model.hidden(inputs, self.model.initial_state(1, "cpu"))

    def outputs(self, hidden: Tensor, out: Tensor) -> None:
        """Logits or outputs `[T, size]`, of text with a few rows of the head at a time."""
        if not self._is_text:
            out.copy_(self.model.logits(hidden))
            return
        name = "embedding" if self.model.config.tie_word_embeddings else "head"
        for start in range(0, len(self.model.head_weight), _HEAD_ROWS):
            rows = np.arange(start, min(start + _HEAD_ROWS, len(self.model.head_weight)))
            logits = F.linear(hidden, self._rows(name, rows))
            out[:, start : start + len(rows)] = self.model.capped(logits)
            release()

    def _embedded(self, part: nn.Module, given: Any, found: Tensor) -> Tensor:
        """The rows of the tokens."""
        ids = given[0].numpy()
        return self._rows("embedding", ids.reshape(-1)).view(*ids.shape, -1)

    def _rows(self, part: str, rows: Any) -> Tensor:
        """Rows of the embedding or the head."""
        weight = self.model.get_parameter(f"{part}.weight")
        if (matrix := self._rounded.get(f"{part}.weight")) is None:
            return weight[torch.from_numpy(rows)].to(self._dtype)
        return torch.from_numpy(matrix.rows(rows).values(weight.shape[1])).to(self._dtype)


def _convert_while_it_runs(
    block: nn.Module,
    names: Mapping[int, str],
    rounded: Mapping[str, Rounded],
    dtype: torch.dtype,
) -> None:
    """Have a block's weights in a precision, rounded if they are to be, while it runs.

    ``names`` are those of the model's parameters by identity: a block may have some of another's.
    """
    kept = [(parameter, parameter.data) for parameter in block.parameters()]

    def before(part: nn.Module, given: Any) -> None:
        part.to(dtype)
        for parameter, _ in kept:
            if (matrix := rounded.get(names[id(parameter)])) is not None:
                values = torch.from_numpy(matrix.values(parameter.shape[-1]))
                parameter.data = values.view_as(parameter).to(dtype)

    def after(part: nn.Module, given: Any, result: Any) -> None:
        for parameter, data in kept:
            parameter.data = data
        release()

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after)
