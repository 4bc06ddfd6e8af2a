"""A text read as one stream, layer by layer: every layer reads all of it before the next one does.

A recurrence that has read thousands of tokens sees other inputs than one that begins: so the state
is carried from call to call, over the whole text, as on a device. Of the model only one layer is in
use at a time; what stands between two layers, `[T, width]`, is all that is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from edgelin.export.activations import RoundedActivations, round_activations
from edgelin.export.quantise.rounding import Rounded
from edgelin.mapped import Empty, release

if TYPE_CHECKING:
    from edgelin.model import Block, SequenceModel

CALL = 256  # tokens
_HEAD_ROWS = 64  # positions whose logits are in memory

Array = NDArray[Any]


class Rollout:
    """Where a reading has come to: the stream before one of the layers.

    Args:
        model: In float32; its parameters are changed only while a layer runs.
        ids: int64 `[T]`.
        empty: Makes the array of the stream.
    """

    def __init__(self, model: SequenceModel, ids: Array, empty: Empty = np.empty) -> None:
        self.model, self.ids = model, ids
        self.layer = 0
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._stream = torch.from_numpy(empty((len(ids), model.config.hidden_size), np.float32))
        self._shared: list[dict[str, Tensor]] = []

    def fork(self) -> Rollout:
        """A second reading from here on."""
        twin = copy.copy(self)
        twin._stream = self._stream.clone()
        twin._shared = [dict(shared) for shared in self._shared]
        return twin

    @torch.no_grad()
    def start(self, rounded: Mapping[str, Rounded] | None = None) -> None:
        """Look the tokens up."""
        self._shared, weight = [], self.model.get_parameter("embedding.weight")
        table = (rounded or {}).get("embedding.weight")
        for part in self._calls():
            ids = self.ids[part]
            if table is None:
                x = weight[torch.from_numpy(ids)]
            else:
                x = torch.from_numpy(table.rows(ids).values(weight.shape[1]))
            if self.model.config.embedding_norm:
                x = self.model.embedding_norm(x)
            self._stream[part] = x
            self._shared.append({"embedding": x[None]})
        self.layer = 0
        release()

    @property
    def block(self) -> Block:
        """The layer that comes next."""
        block: Any = self.model.blocks[self.layer]
        return block  # type: ignore[no-any-return]

    @torch.no_grad()
    def read(self, rounded: Mapping[str, Rounded] | None = None, *, noisy: bool = False) -> None:
        """Go through one layer.

        Args:
            rounded: Matrices to take in the place of the model's.
            noisy: Whether to round also what these are multiplied with, as the kernels do.
        """
        for part, y, shared in self._run(rounded or {}, noisy=noisy):
            self._stream[part] = y[0]
            self._shared[part.start // CALL] = shared
        self.layer += 1
        release()

    @torch.no_grad()
    def watch(self) -> dict[str, Tensor]:
        """H = X X^T of every matrix of the next layer, float64 `[K, K]`, by parameter.

        The reading stays where it is.
        """
        names = {p.data_ptr(): self._names[id(p)] for p in self.block.parameters() if p.ndim == 2}
        products = _Products(names)
        with products:
            for _ in self._run({}, noisy=False):
                pass
        release()
        return products.hessians

    @torch.no_grad()
    def hidden(self, at: slice) -> Tensor:
        """What the head reads at some positions, after all layers."""
        return self.model.norm(self._stream[at])  # type: ignore[no-any-return]

    @torch.no_grad()
    def logits(
        self, at: slice, rounded: Mapping[str, Rounded] | None = None, *, noisy: bool = False
    ) -> Tensor:
        """Logits at some positions, after all layers."""
        name = "embedding" if self.model.config.tie_word_embeddings else "head"
        table, weight = (rounded or {}).get(f"{name}.weight"), self.model.head_weight
        hidden = self.hidden(at)
        if table is None:
            return self.model.logits(hidden)
        if noisy:
            hidden = round_activations(hidden, table.block_size)
        values = torch.from_numpy(table.values(weight.shape[1]))
        return self.model.capped(F.linear(hidden, values))

    def _calls(self) -> list[slice]:
        """The tokens of each call."""
        count = len(self.ids)
        return [slice(i, min(i + CALL, count)) for i in range(0, count, CALL)]

    def _run(
        self, rounded: Mapping[str, Rounded], *, noisy: bool
    ) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
        """The next layer over the text: the tokens of each call and what it makes of them."""
        block, initial = self.block, self.model.initial_state(1)
        state = {spec.name: initial[spec.name] for spec in block.state_specs()}
        own = {
            p: rounded[self._names[id(p)]] for p in block.parameters() if self._is_in(p, rounded)
        }
        sizes = [(p, matrix.block_size) for p, matrix in own.items()]
        with _replaced(own), RoundedActivations(sizes) if noisy else nullcontext():
            for part, shared in zip(self._calls(), self._shared, strict=True):
                shared = dict(shared)
                position = torch.tensor([part.start])
                y, state = block(self._stream[part][None], state, position, shared)
                yield part, y, shared

    def _is_in(self, parameter: nn.Parameter, rounded: Mapping[str, Rounded]) -> bool:
        return self._names[id(parameter)] in rounded


@contextmanager
def _replaced(rounded: Mapping[nn.Parameter, Rounded]) -> Iterator[None]:
    """Have parameters stand for their rounded values."""
    kept = [(parameter, parameter.data) for parameter in rounded]
    try:
        for parameter, matrix in rounded.items():
            values = torch.from_numpy(matrix.values(parameter.shape[-1]))
            parameter.data = values.view_as(parameter)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data


class _Products(TorchFunctionMode):
    """Sums X X^T over all products with some matrices.

    Args:
        names: Parameter name by where its content lies.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.hessians: dict[str, Tensor] = {}
        self._names = names

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and (name := self._names.get(args[1].data_ptr())) is not None:
            x = args[0].flatten(0, -2).double()
            if name not in self.hessians:
                self.hessians[name] = x.new_zeros(x.shape[1], x.shape[1])
            self.hessians[name].addmm_(x.T, x)
        return func(*args, **(kwargs or {}))
