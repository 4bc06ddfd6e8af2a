"""What operators need for ``torch.func``: gradients in functional form, and calls of many at once.

``vmap`` runs an operator once for each, one after the other: right, not fast. Second derivatives
and those in forward mode there are none, and who asks is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def one_by_one(op: Any) -> Callable[..., tuple[Any, Any]]:
    """The rule of ``vmap`` for a custom op."""

    def rule(info: Any, dims: Any, *inputs: Any) -> tuple[Any, Any]:
        def run(i: int) -> Any:
            def take(x: Any, dim: int | None) -> Any:
                return x if dim is None else x.select(dim, i)

            return op(*pytree.tree_map(take, inputs, dims, is_leaf=lambda x: x is None))

        runs = [run(i) for i in range(info.batch_size)]
        made = pytree.tree_map(lambda *x: torch.stack(x), *runs)
        return made, pytree.tree_map(lambda _: 0, made)

    return rule


def function(operator: Any) -> Any:
    """The operator as a function that ``torch.func`` can look through; what is kept comes last."""

    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return tuple(pytree.tree_leaves(operator.keeping_op(*inputs)))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        count = len(operator.like)
        kept = [] if operator.allocate is None else [list(output[count:])]
        operator._save(ctx, inputs, (*output[:count], *kept))

    return _made(operator.name, forward, setup_context, operator._gradients)


def gradients(operator: Any, count: int) -> Any:
    """Its gradients likewise: of ``count`` inputs, then what is kept."""

    def forward(*inputs: Any) -> Any:
        kept = [] if operator.allocate is None else [list(inputs[count:])]
        return operator.backward_op(*inputs[:count], *kept)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """There is no next one."""

    def backward(ctx: Any, *ups: Tensor) -> None:
        raise RuntimeError(f"edgelin::{operator.name} has no second derivatives, take first ones")

    return _made(operator.name, forward, setup_context, backward)


def _made(name: str, forward: Any, setup_context: Any, backward: Any) -> Any:
    """A function of autograd and ``torch.func``."""

    def jvp(ctx: Any, *tangents: Any) -> None:
        raise NotImplementedError(f"edgelin::{name} has no forward mode, take torch.func.vjp")

    methods = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
        "jvp": staticmethod(jvp),
        "generate_vmap_rule": True,
    }
    return type(f"edgelin_{name}", (torch.autograd.Function,), methods)


def are_active() -> bool:
    """Whether ``torch.func`` or forward mode is at work."""
    if torch.compiler.is_compiling():
        return False
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return forward_mode or torch._C._are_functorch_transforms_active()
