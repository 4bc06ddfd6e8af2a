"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Segments of one chunk in the linear recurrence, so that short sequences have several."""
    from edgelin.recurrences import launches
    from edgelin.recurrences.linear import kernel_plan

    monkeypatch.setattr(kernel_plan, "SEGMENT", 32)
    launches.forget()
    yield
    launches.forget()


@pytest.fixture
def bfloat16_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies the bits of bfloat16 numbers: give it the numbers."""
    if torch.cuda.is_available():
        return
    import triton.language as tl  # noqa: TID251
    from triton.runtime import interpreter  # noqa: TID251

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        numbers = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    dot = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest),
    )
