"""The profiles: which operators a bundle's graphs may use, and what can run them."""

from __future__ import annotations

from dataclasses import dataclass

import onnxruntime

from edgelin.errors import EdgelinError
from edgelin.recurrences import CHUNK


@dataclass(frozen=True)
class Profile:
    """What a graph of a profile is made of.

    Args:
        form: Function of the recurrences' ``onnx.py`` that translates them.
        opset: ai.onnx opset.
        ir_version: ONNX file version.
        min_onnxruntime: Oldest version that runs the graph.
        vendor_ops: Whether com.microsoft operators may stand outside quantised matrices.
        max_time: Largest number of tokens in a call; None for no limit.
    """

    form: str
    opset: int
    ir_version: int
    min_onnxruntime: str
    vendor_ops: bool
    max_time: int | None = CHUNK


PROFILES = {
    "fused": Profile("fused", opset=21, ir_version=9, min_onnxruntime="1.25.1", vendor_ops=True),
    "plain": Profile("plain", opset=21, ir_version=9, min_onnxruntime="1.20.0", vendor_ops=False),
    "onnx": Profile("fused", opset=27, ir_version=13, min_onnxruntime="1.32.0", vendor_ops=False),
}


def find(name: str) -> Profile:
    """The profile of this name.

    Raises:
        EdgelinError: There is no such profile.
    """
    if name not in PROFILES:
        raise EdgelinError(f"profile is {name!r}; allowed: {', '.join(PROFILES)}")
    return PROFILES[name]


def check_onnxruntime(name: str, version: str = onnxruntime.__version__) -> None:
    """Refuse to export what this onnxruntime could not run: every bundle is run before it is kept.

    Raises:
        EdgelinError: ``version`` is older than the profile needs.
    """
    needed = find(name).min_onnxruntime
    if _numbers(version) < _numbers(needed):
        raise EdgelinError(
            f"onnxruntime {version} cannot run profile {name!r}, which needs {needed} or newer; "
            f"run `pip install 'onnxruntime>={needed}'` or choose another --profile"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Version as numbers; a suffix such as ``.dev1`` is dropped."""
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts[:3] if part.isdigit())
