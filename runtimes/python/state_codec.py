"""States at rest in fewer bytes than the float32 in which they step.

    float16   every value rounded to the nearest
    int8      q = round(x / s), x' = q s, with s = max |x| / 127 of a row

A row is the last axis of a tensor: in a matrix state [batch, heads, key, value] the values of one
head and key, in a cache [batch, heads, time, width] one head of a token. A tensor whose rows are
shorter than ``SHORT`` would spend on scales what it saves, so int8 stores it as float16; a tensor
with a value that float16 cannot hold stays float32. Integers (the position) stay as they are. So
the dtype of each stored tensor says how it is read: nothing else has to be kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgelin.runtimes import checks

DTYPES = ("float32", "float16", "int8")
SHORT = 16
_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Encoded:
    """A tensor as it is stored.

    Args:
        values: float32, float16, int8 or int64, in the shape of the tensor.
        scale: Of int8, float32 in that shape with a last axis of 1; else None.
    """

    values: NDArray[Any]
    scale: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        """Size of the values and their scales."""
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)


def check(dtype: object) -> str:
    """A name of ``DTYPES``.

    Raises:
        EdgelinError: It is another.
    """
    checks.require(dtype in DTYPES, "the state's dtype", dtype, ", ".join(DTYPES))
    return str(dtype)


def encode(array: NDArray[Any], dtype: str) -> Encoded:
    """A state tensor as it is stored.

    Args:
        array: float32 or int64 in any shape of at least one axis, finite. With ``"float32"`` it is
            not copied.
        dtype: ``"float32"``, ``"float16"`` or ``"int8"``.
    """
    if dtype == "float32" or array.dtype != np.float32:
        return Encoded(array)
    if dtype == "int8" and array.shape[-1] >= SHORT:
        scale = (np.abs(array).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float32)
        quotient = array / np.where(scale > 0, scale, np.float32(1))
        # The scale of a row of the tiniest numbers is rounded itself: hence the limits.
        return Encoded(np.rint(quotient).clip(-127, 127).astype(np.int8), scale)
    if np.abs(array).max(initial=0) > _LARGEST:
        return Encoded(array)
    return Encoded(array.astype(np.float16))


def decode(stored: Encoded) -> NDArray[Any]:
    """The float32 tensor, or the integers, of what :func:`encode` gave."""
    if stored.scale is not None:
        return stored.values.astype(np.float32) * stored.scale
    if stored.values.dtype == np.float16:
        return stored.values.astype(np.float32)
    return stored.values
