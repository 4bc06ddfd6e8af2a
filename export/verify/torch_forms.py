"""The forms of a model in torch, as :mod:`edgelin.export.verify` replays them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edgelin.export.activations import RoundedActivations
from edgelin.export.contract import signature
from edgelin.export.step_form import load
from edgelin.export.verify.forms import Array, Record, State, compare, replay
from edgelin.recurrences.delta import reference as delta
from edgelin.recurrences.diagonal import reference as diagonal
from edgelin.recurrences.dplr import reference as dplr
from edgelin.recurrences.linear import reference as linear
from edgelin.recurrences.lti import reference as lti
from edgelin.recurrences.rnn import reference as rnn
from edgelin.recurrences.running_max import reference as running_max

if TYPE_CHECKING:
    from edgelin.model import SequenceModel

_REFERENCES: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "edgelin::linear": linear.forward,
    "edgelin::delta": lambda *args: delta.reference(*args[:-1], scale=args[-1]),
    "edgelin::dplr": lambda *args: dplr.reference(*args[:-1], scale=args[-1]),
    "edgelin::diagonal": diagonal.forward,
    "edgelin::lti": lti.forward,
    "edgelin::rnn": rnn.forward,
    "edgelin::running_max": running_max.forward,
}


class TorchForm:
    """A checkpoint's model as a form: steps and state in, outputs, streams and state out.

    Args:
        folder: The checkpoint.
        sequential: Float64 on the CPU with every recurrence by its sequential reference; otherwise
            float32 on a CUDA GPU, or on the CPU where there is none.
        dtype: Another precision.
        weights: Values that take the place of the checkpoint's, by parameter.
        blocks: Parameters with which activations are multiplied that were rounded to 8 bits, and
            how many of these share a scale; not for a sequential form.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sequential: bool,
        dtype: torch.dtype | None = None,
        weights: dict[str, Array] | None = None,
        blocks: dict[str, int] | None = None,
    ) -> None:
        cuda = torch.cuda.is_available() and not sequential
        self.device = "cuda" if cuda else "cpu"
        self.dtype = dtype or (torch.float64 if sequential else torch.float32)
        self.model = load(folder, device=self.device, dtype=self.dtype)
        with torch.no_grad():
            for name, values in (weights or {}).items():
                self.model.get_parameter(name).copy_(torch.from_numpy(values))
        self.output = signature(self.model.config)[1].name
        own = self.model.get_parameter
        matrices = [(own(name), size) for name, size in (blocks or {}).items()]
        self._mode = _Sequential if sequential else partial(RoundedActivations, matrices)

    def __call__(
        self, steps: Array, state: State, lengths: Array | None = None
    ) -> tuple[dict[str, Array], State]:
        """Run ``steps`` [B, T, ...] in one call, each row as far as ``lengths`` [B]."""
        ends = None if lengths is None else self._tensor(lengths)
        tensors = {name: self._tensor(array) for name, array in state.items()}
        with torch.no_grad(), self._mode(), _streams(self.model) as found:
            outputs, after = self.model(self._tensor(steps), tensors, ends)
        found[self.output] = outputs
        return _arrays(found), _arrays(after)

    def _tensor(self, array: Array) -> torch.Tensor:
        """Steps or a state in this form's precision; integers stay."""
        dtype = self.dtype if np.issubdtype(array.dtype, np.floating) else None
        return torch.tensor(array, dtype=dtype, device=self.device)


def float32_noise(
    folder: Path, steps: Array, state: State, truth: Record, weights: dict[str, Array] | None = None
) -> float:
    """The largest error of the recurrence in float32, step by step.

    Args:
        folder: The checkpoint.
        steps: ``[B, T, ...]``.
        state: Before the first step.
        truth: The same in float64.
        weights: As of :class:`TorchForm`.
    """
    form = TorchForm(folder, sequential=True, dtype=torch.float32, weights=weights)
    record = replay(form, steps, state, size=1)
    return max(difference.error for difference in compare(record, truth, steps.shape[1]))


class _Sequential(TorchDispatchMode):
    """Computes every recurrence of the model with its ``reference.py``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().partition(".")[0]
        if name.startswith("edgelin::"):
            return _REFERENCES[name](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def _streams(model: SequenceModel) -> Iterator[dict[str, torch.Tensor]]:
    """Collects the output of every block as ``hidden.<layer>``."""
    found: dict[str, torch.Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            found[f"hidden.{layer}"] = output[0]

        return hook

    hooks = [block.register_forward_hook(keep(i)) for i, block in enumerate(model.blocks)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _arrays(tensors: dict[str, torch.Tensor]) -> dict[str, Array]:
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
