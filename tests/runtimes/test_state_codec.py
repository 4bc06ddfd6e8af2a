"""States at rest equal a float64 loop over rows, and take the bytes that they should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgelin.errors import EdgelinError
from edgelin.runtimes import state_codec

SHAPES = [(1, 2, 3, 16), (3, 5, 64), (1, 40), (2, 4, 15), (1, 6, 1), (1, 2, 0, 32), (3, 1, 130)]


def _state(shape: tuple[int, ...], seed: int = 0) -> Any:
    """Rows of very different sizes, one of them zero."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal(shape) * 10 ** random.uniform(-6, 4, (*shape[:-1], 1))
    rows[:, :1] *= 0 if len(shape) > 2 else 1
    return rows.astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_a_scale_a_row(shape: tuple[int, ...]) -> None:
    array = _state(shape)
    stored = state_codec.encode(array, "int8")
    found = state_codec.decode(stored)
    assert found.dtype == np.float32 and found.shape == shape
    if shape[-1] < 16:
        assert stored.values.dtype == np.float16 and stored.scale is None
        return
    assert stored.values.dtype == np.int8
    assert stored.nbytes == array.size + 4 * array.size // shape[-1]
    wanted = []
    for row in array.astype(np.float64).reshape(-1, shape[-1]):
        scale = max(abs(x) for x in row) / 127
        wanted += [round(x / scale) * scale if scale else 0.0 for x in row]
        np.testing.assert_array_less(np.abs(row - wanted[-len(row) :]), scale / 2 + 1e-30)
    np.testing.assert_allclose(found.ravel(), wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_float16_is_the_nearest(shape: tuple[int, ...]) -> None:
    array = _state(shape)
    stored = state_codec.encode(array, "float16")
    assert stored.values.dtype == np.float16 and stored.nbytes == array.nbytes // 2
    found = state_codec.decode(stored)
    # 11 bits of significand; 2^-25 is half the smallest step.
    error = np.abs(found.astype(np.float64) - array)
    assert (error <= np.maximum(np.abs(array) * 2.0**-11, 2.0**-25)).all()


@pytest.mark.parametrize("dtype", state_codec.DTYPES)
def test_what_a_dtype_cannot_hold_stays(dtype: str) -> None:
    position = np.array([7, 2**40], np.int64)
    assert state_codec.decode(state_codec.encode(position, dtype)).tobytes() == position.tobytes()
    large = np.array([[1.0, 7e4]], np.float32)
    found = state_codec.decode(state_codec.encode(large, dtype))
    assert found.tobytes() == large.tobytes()


@pytest.mark.parametrize("value", [0.0, 1e-45, 3e-43, 1e-38, 1.0, 3.4e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_rows(value: float, sign: int) -> None:
    row = np.full((1, 64), sign * value, np.float32)
    row[0, 1:] *= np.float32(0.5)
    found = state_codec.decode(state_codec.encode(row, "int8"))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, row, rtol=0.01, atol=1e-42)


def test_encoding_twice_changes_nothing() -> None:
    array = _state((2, 3, 64), 5)
    for dtype in state_codec.DTYPES:
        once = state_codec.decode(state_codec.encode(array, dtype))
        twice = state_codec.decode(state_codec.encode(once, dtype))
        np.testing.assert_allclose(twice, once, rtol=2e-7)


def test_names() -> None:
    assert [state_codec.check(name) for name in state_codec.DTYPES] == [*state_codec.DTYPES]
    for name in ("int4", "", None, 8):
        with pytest.raises(EdgelinError, match="allowed: float32, float16, int8"):
            state_codec.check(name)
