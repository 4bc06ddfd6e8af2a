"""Delta rule with a decay for every key (KDA): op and ONNX forms against a float64 loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from comparisons import to
from delta_cases import HARD, SCALE, close, inputs, run, session, with_gradients

from edgelin.recurrences.delta import delta
from edgelin.recurrences.delta import onnx as forms
from edgelin.recurrences.delta.reference import reference


def test_reference_with_a_decay_a_key_is_the_equation() -> None:
    made = inputs(5, by_key=True)
    q, k, v, beta, g, state = (x.numpy().copy() for x in made.values())  # type: ignore[union-attr]
    expected = np.zeros(v.shape)
    for b, t, h in np.ndindex(*beta.shape):
        s = np.diag(np.exp(g[b, t, h])) @ state[b, h]
        s = s - beta[b, t, h] * np.outer(k[b, t, h], k[b, t, h] @ s - v[b, t, h])
        state[b, h], expected[b, t, h] = s, SCALE * q[b, t, h] @ s
    o, after = reference(*to(made, torch.float64), scale=SCALE)
    np.testing.assert_allclose(o, expected, atol=1e-12)
    np.testing.assert_allclose(after, state, atol=1e-12)


@pytest.mark.parametrize("time", [1, 2, 63, 64, 65, 130])
def test_decay_a_key_and_gradients(time: int) -> None:
    made = inputs(time, by_key=True, batch=1 if time == 63 else 3)
    expected = with_gradients(reference, to(made, torch.float64), made)
    close(with_gradients(delta, to(made, torch.float64), made), expected, 1e-11)
    close(with_gradients(delta, to(made, torch.float32), made), expected, 5e-6)


@pytest.mark.parametrize("kind", HARD)
def test_decay_a_key_at_hard_inputs(kind: str) -> None:
    made = inputs(130, kind=kind, by_key=True)
    expected = with_gradients(reference, to(made, torch.float64), made)
    close(with_gradients(delta, to(made, torch.float32), made), expected, 1e-4)


def test_decay_a_key_in_the_op_that_is_exported() -> None:
    made = inputs(70, by_key=True)
    op = torch.ops.edgelin.delta

    def run(*arguments: Any, scale: float) -> Any:
        return op(*arguments, scale)

    expected = with_gradients(reference, to(made, torch.float64), made)
    close(with_gradients(run, to(made, torch.float64), made), expected, 1e-11)


@pytest.mark.parametrize("form", [forms.plain, forms.fused])
def test_onnx_forms_with_a_decay_a_key(form: Callable[..., Any]) -> None:
    runner = session(form, inputs(1, by_key=True))
    for time, batch in [(1, 1), (2, 3), (7, 3), (63, 1), (64, 3)]:
        made = inputs(time, batch=batch, by_key=True)
        expected = reference(*to(made, torch.float64), scale=SCALE)
        close(run(runner, made), expected, 3e-6)


@pytest.mark.parametrize("form", [forms.plain, forms.fused])
@pytest.mark.parametrize("kind", HARD)
def test_onnx_forms_with_a_decay_a_key_at_hard_inputs(form: Callable[..., Any], kind: str) -> None:
    made = inputs(64, kind=kind, by_key=True)
    expected = reference(*to(made, torch.float64), scale=SCALE)
    close(run(session(form, made), made), expected, 5e-5)
