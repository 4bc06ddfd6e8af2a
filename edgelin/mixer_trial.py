"""Tries a mixer from outside of the package on a few steps, before anything is trained with it.

What is wrong with the mixers here our own tests find. One of a user's is a module that may do
anything: its mistakes are told in one line, and those that broadcasting or a dropped state would
hide for a whole training are found when the model is built.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from edgelin.errors import EdgelinError
from edgelin.state import GROWING, StateSpec

_KNOWN = ("edgelin.", "torch.")
_BATCH, _TIME = 2, 5
_OWN = ("pool", "position")  # states of the whole model
_NEXT = "see docs/new-mixer.md"
# Relative to the largest value. Rounding is far below it, also where a norm divides by little.
_TOLERANCE = 1e-2

State = dict[str, Tensor]


def is_outside(mixer: Any) -> bool:
    """Whether a mixer, or a part of it, is of another package's class."""
    modules = mixer.modules() if isinstance(mixer, nn.Module) else [mixer]
    return any(not type(module).__module__.startswith(_KNOWN) for module in modules)


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Tell what a user's code raises in one line, with the place.

    Args:
        what: What runs, by its dotted name; code of ours raises as it is.

    Raises:
        EdgelinError: Code of a user raised anything else.
    """
    try:
        yield
    except Exception as error:  # a module of the user may raise anything
        if isinstance(error, EdgelinError) or what.startswith(_KNOWN):
            raise
        raise EdgelinError(f"{what} raised {reason(error)}") from error


def reason(error: BaseException) -> str:
    """An exception in a line: type, message, and the last place that is not in a library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not re.search(r"[/\\](site-packages|edgelin)[/\\]", f.filename)]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"


def check_specs(mixer: Any) -> None:
    """Refuse a mixer from outside whose ``state_specs`` cannot be states.

    Raises:
        EdgelinError: With the mixer and the state.
    """
    name = _name(mixer)
    if not is_outside(mixer):
        return
    if not isinstance(mixer, nn.Module):
        raise EdgelinError(f"{name} is no torch.nn.Module; derive it from one, {_NEXT}")
    with told(f"{name}.state_specs"):
        specs = cast(Any, mixer).state_specs()
    if not isinstance(specs, list) or not all(isinstance(s, StateSpec) for s in specs):
        raise EdgelinError(f"{name}.state_specs() gives {specs!r}; a list of StateSpec is needed")
    for spec in specs:
        sizes = [size for size in spec.shape if size != GROWING]
        if not isinstance(spec.layer, int) or spec.kind in _OWN:
            raise EdgelinError(
                f"{name} has a state {spec.name!r} of the whole model; give its kind another name "
                f"and its layer (needs_position = True asks for the position)"
            )
        if not re.fullmatch(r"[a-z]\w*", spec.kind, re.ASCII):
            raise EdgelinError(
                f"{name} has a state of kind {spec.kind!r}; small letters, digits and _ are allowed"
            )
        if any(not isinstance(n, int) or n < 1 for n in sizes) or len(spec.shape) - len(sizes) > 1:
            raise EdgelinError(
                f"{name} has a state {spec.name!r} of shape {spec.shape}; sizes from 1, and "
                f"{GROWING!r} once, are allowed"
            )
        if spec.dtype not in ("float32", "int64"):
            raise EdgelinError(
                f"{name} has a state {spec.name!r} of {spec.dtype}; float32 and int64 are allowed"
            )


def check_apart(branches: list[Any]) -> None:
    """Refuse a state that two branches of a model, given in order, would both write.

    Raises:
        EdgelinError: With the branches and the state.
    """
    owners: dict[str, str] = {}
    for branch in branches:
        for spec in branch.state_specs():
            if spec.name in owners:
                raise EdgelinError(
                    f"{_name(branch)} has a state {spec.name!r}, which {owners[spec.name]} of the "
                    f"same model has too; a state needs a kind of its own within a layer, and the "
                    f"layer that Mixer was given"
                )
            owners[spec.name] = _name(branch)


@torch.no_grad()
def try_out(mixer: Any, hidden_size: int) -> None:
    """Run a mixer from outside over a few random steps, in one call and step by step.

    Args:
        mixer: Anything else is left alone: one of ours, or one whose weights have no memory.
        hidden_size: Width of the stream.

    Raises:
        EdgelinError: It raises, gives something of another shape or type, or answers otherwise in
            one call than step by step.
    """
    if not is_outside(mixer) or any(p.is_meta for p in (*mixer.parameters(), *mixer.buffers())):
        return
    weight = next(mixer.parameters(), torch.empty(0, device="cpu"))
    random = torch.Generator().manual_seed(1)
    x = torch.randn(_BATCH, _TIME, hidden_size, generator=random, device="cpu").to(weight)
    training = mixer.training
    mixer.eval()
    try:
        whole = _call(mixer, x, _initial(mixer, x), 0)
        if getattr(getattr(mixer, "config", None), "export_obstacle", None) is None:
            _compare_steps(mixer, x, *whole)
    finally:
        mixer.train(training)


def _initial(mixer: Any, x: Tensor) -> State:
    """The states before the first step."""
    state = {}
    for spec in mixer.state_specs():
        dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            dtype = torch.promote_types(dtype, x.dtype)
        shape = (len(x), *spec.sized())
        state[spec.name] = torch.full(shape, spec.initial, dtype=dtype, device=x.device)
    return state


def _call(mixer: Any, x: Tensor, state: State, past: int) -> tuple[Tensor, State]:
    """One call, whose results are checked."""
    name = f"{_name(mixer)}.forward"
    position = torch.full((len(x),), past, dtype=torch.int64, device=x.device)
    extra = ({"embedding": x},) if getattr(mixer, "shares", False) else ()
    with told(name):
        result = mixer(x, dict(state), position, *extra)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EdgelinError(
            f"{name} returns {type(result).__name__}; (y, new state), a tuple of a tensor and a "
            f"dictionary, is needed"
        )
    y, after = result
    _check_tensor(f"{name} returns outputs", y, tuple(x.shape), x.dtype)
    specs = {spec.name: spec for spec in mixer.state_specs()}
    if set(after) != set(specs):
        raise EdgelinError(
            f"{name} returns the states {sorted(after)}, state_specs has {sorted(specs)}; "
            f"return each of these, and no other"
        )
    for key, spec in specs.items():
        shape = (len(x), *spec.sized(past + x.shape[1]))
        _check_tensor(f"{name} returns the state {key!r}", after[key], shape, state[key].dtype)
    return y, after


def _check_tensor(what: str, found: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A result is a finite tensor of this shape and type."""
    if not isinstance(found, Tensor):
        raise EdgelinError(f"{what} that are {type(found).__name__}; a tensor is needed")
    if tuple(found.shape) != shape or found.dtype != dtype:
        raise EdgelinError(
            f"{what} of shape {list(found.shape)} and {str(found.dtype).removeprefix('torch.')}; "
            f"{list(shape)} and {str(dtype).removeprefix('torch.')} are needed"
        )
    if not bool(found.isfinite().all()):
        raise EdgelinError(f"{what} that are not finite, of {_TIME} random steps; {_NEXT}")


def _compare_steps(mixer: Any, x: Tensor, y: Tensor, after: State) -> None:
    """One call and calls of a step each give the same."""
    name, state, outputs = _name(mixer), _initial(mixer, x), []
    for t in range(_TIME):
        output, state = _call(mixer, x[:, t : t + 1], state, t)
        outputs.append(output)
    pairs = {"the outputs": (y, torch.cat(outputs, dim=1))}
    pairs |= {f"the state {key!r}": (after[key], state[key]) for key in after}
    for what, (one, many) in pairs.items():
        most = max(float(many.abs().max()), 1e-6)
        if float((one - many).abs().max()) > _TOLERANCE * most:
            raise EdgelinError(
                f"{name}: {what} of a call of {_TIME} steps differ from those of {_TIME} calls of "
                f"one step; a step may see only the states and itself, and what is kept between "
                f"steps belongs into a state: {_NEXT}"
            )


def _name(mixer: Any) -> str:
    """A mixer as a user would write it."""
    return f"{type(mixer).__module__}.{type(mixer).__qualname__}"
