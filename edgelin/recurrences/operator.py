"""How a recurrence becomes one differentiable operator of PyTorch.

``torch.compile``, ``torch.export`` and the CPU run it as the custom op ``edgelin::<name>``, with
gradients by ``edgelin::<name>_backward``. Eager calls on a GPU leave these out, since a step of few
tokens waits for Python, and the layers of a custom op take longer there than the launches of the
kernels: they run the same two functions in an ``autograd.Function``. ``torch.func`` has one more,
in ``transforms.py``.

What the kernels go on from backwards may be kept, since computing it again costs up to a third of a
training step's time. While gradients are recorded, the op ``edgelin::<name>_keeping`` then returns
it beside the outputs, and nobody else reads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter

from edgelin.recurrences import transforms
from edgelin.recurrences.exporting import is_exporting

Run = Callable[..., Any]


class Operator:
    """A recurrence with its gradients.

    Args:
        name: Of the op in the namespace ``edgelin``.
        forward: Maps the inputs, tensors (some may be None) before numbers, to the outputs and,
            with ``allocate``, a list of what is kept. Its annotations are the schema of the op; no
            input has a default.
        backward: Maps the same, the gradients of the outputs and, with ``allocate``, what is kept
            (or nothing), to contiguous gradients of all tensors, empty for None. It can't be
            differentiated again.
        outputs: For every output the input that has its shape and dtype, by name.
        allocate: Maps the inputs to tensors of the shapes of what is kept; None: nothing is.
        reads: Places of outputs that ``backward`` goes on from, before the rest of what is kept.
    """

    def __init__(
        self,
        name: str,
        forward: Run,
        backward: Run,
        outputs: Sequence[str],
        allocate: Callable[..., list[Tensor]] | None = None,
        reads: Sequence[int] = (),
    ) -> None:
        given, hints = inspect.signature(forward).parameters, get_type_hints(forward)
        self.name, self.run, self.run_backward = name, forward, backward
        self.allocate, self.reads = allocate, reads
        self.tensors = sum(hints[name] in (Tensor, Tensor | None) for name in given)
        self.like = [list(given).index(name) for name in outputs]
        whole = torch.library.infer_schema(forward, mutates_args=())
        self.op = self._register(name, self._outputs, whole.replace(", Tensor[])", ")"))
        self.op.register_fake(self._fake)
        self.keeping_op = self.op
        if allocate is not None:
            self.keeping_op = self._register(f"{name}_keeping", self._everything, whole)
            self.keeping_op.register_fake(self._fake_everything)
        for op in {self.op, self.keeping_op}:
            op.register_autograd(self._gradients, setup_context=self._save)
        schema = torch.library.infer_schema(backward, mutates_args=())
        self.backward_op = self._register(f"{name}_backward", self._backward, schema)
        self.backward_op.register_fake(self._fake_backward)
        for op in {self.op, self.keeping_op, self.backward_op}:
            op.register_vmap(transforms.one_by_one(op))
        self.function = _function(name, self)
        self.transformed = transforms.function(self)
        self.transformed_backward = transforms.gradients(self, len(given) + len(outputs))

    def __call__(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Run it on its inputs, all of them, in the order of ``forward``."""
        count = len(self.like)
        if inputs[0].is_cuda and not is_exporting():
            inputs = tuple(_dense(x) if isinstance(x, Tensor) else x for x in inputs)
        if transforms.are_active():
            made: tuple[Tensor, ...] = self.transformed.apply(*inputs)
            return made[:count]
        if not _is_direct(inputs):
            keeps = torch.is_grad_enabled() and not is_exporting()
            return tuple((self.keeping_op if keeps else self.op)(*inputs)[:count])
        tensors = inputs[: self.tensors]
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            applied: tuple[Tensor, ...] = self.function.apply(*inputs)
            return applied
        return self._outputs(*inputs)

    @staticmethod
    def _register(name: str, run: Run, schema: str) -> Any:
        """A custom op."""
        return torch.library.custom_op(f"edgelin::{name}", run, mutates_args=(), schema=schema)

    def _everything(self, *inputs: Any) -> tuple[Any, ...]:
        """Outputs and what is kept."""
        made: tuple[Any, ...] = _on_device(self.run, inputs)
        return made

    def _outputs(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Outputs alone."""
        return self._everything(*inputs)[: len(self.like)]

    def _backward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Gradients of all tensors."""
        made: tuple[Tensor, ...] = _on_device(self.run_backward, inputs)
        return made

    def _fake(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Outputs that only have a shape."""
        return tuple(_empty(inputs[i]) for i in self.like)

    def _fake_everything(self, *inputs: Any) -> tuple[Any, ...]:
        """The same with what is kept."""
        assert self.allocate is not None
        return *self._fake(*inputs), self.allocate(*inputs)

    def _fake_backward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Gradients that only have a shape."""
        none = inputs[0].new_empty(0, dtype=torch.float32)
        return tuple(none if x is None else _empty(x) for x in inputs[: self.tensors])

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep the inputs, and what the kernels keep."""
        kept = [] if len(output) == len(self.like) else output[-1]
        ctx.numbers = inputs[self.tensors :]
        read = [output[i] for i in self.reads]
        ctx.save_for_backward(*inputs[: self.tensors], *read, *kept)
        ctx.set_materialize_grads(False)  # what is kept has no gradient, and zeros would be large

    def _gradients(self, ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Gradients of all inputs."""
        saved = ctx.saved_tensors
        inputs = (*saved[: self.tensors], *ctx.numbers)
        ups = [
            torch.zeros_like(inputs[i]) if up is None else up
            for up, i in zip(grads, self.like, strict=False)
        ]
        given = (*inputs, *ups)
        kept = list(saved[self.tensors :])
        if transforms.are_active():
            found = self.transformed_backward.apply(*given, *kept)
        else:
            # The op refuses second derivatives, of which a graph is recorded here.
            direct = not torch.is_grad_enabled() and _is_direct(given)
            lists = [] if self.allocate is None else [kept]
            found = (self._backward if direct else self.backward_op)(*given, *lists)
        pairs = zip(inputs[: self.tensors], found, strict=True)
        return *(None if x is None else grad for x, grad in pairs), *[None] * len(ctx.numbers)


def _function(name: str, operator: Operator) -> Any:
    """The operator without the custom op; a profile shows it by its name."""

    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        made = operator._everything(*inputs)
        operator._save(ctx, inputs, made)
        # autograd lets nobody write into a view that was made in here
        return tuple(x.clone() if x._is_view() else x for x in made[: len(operator.like)])

    methods = {
        "forward": staticmethod(forward),
        "backward": staticmethod(operator._gradients),
    }
    return type(f"edgelin_{name}", (torch.autograd.Function,), methods)


def _dense(x: Tensor) -> Tensor:
    """Parts of a fused projection made contiguous once, not again by the backward pass; what is
    expanded stays as it is."""
    return x if x.is_contiguous() or 0 in x.stride() else x.contiguous()


def _is_direct(inputs: tuple[Any, ...]) -> bool:
    """Whether a call is of plain CUDA tensors, and nobody traces, transforms or records it."""
    if torch.compiler.is_compiling() or not inputs[0].is_cuda:
        return False
    for x in inputs:
        if isinstance(x, Tensor) and type(x) is not Tensor and type(x) is not Parameter:
            return False
    return not (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch.jit.is_tracing()
    )


def _on_device(run: Run, inputs: tuple[Any, ...]) -> Any:
    """Run something on the GPU that has its inputs: kernels start on the current one."""
    device = inputs[0].get_device()
    if device < 0 or device == torch.cuda.current_device():
        return run(*inputs)
    with torch.cuda.device(device):
        return run(*inputs)


def _empty(like: Tensor) -> Tensor:
    """A contiguous tensor of the same shape, dtype and device."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
