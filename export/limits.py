"""Limits of what is computed in float32, beside the same model in float64.

A fixed limit tells a right graph from a wrong one as long as float32 itself stays below it. In a
model so deep, or of such weights, that rounding to float32 alone does more, the limit is a few
times what it does to the model in torch (the same noise, of sums in another order), but at most so
large that a graph can still be told from a wrong one.
"""

from __future__ import annotations

_ROOM = 3.0
MOST = 0.1  # of the largest of many errors


def allowed(fixed: float, float32: float, most: float = MOST) -> float:
    """The limit of an error.

    Args:
        fixed: The usual limit.
        float32: The same error of the model in torch in float32.
        most: Largest limit that float32 may be the reason of.
    """
    return max(fixed, min(_ROOM * float32, most))
