"""The profiles: which operators a bundle's graphs may use, and what can run them."""

from __future__ import annotations

from dataclasses import dataclass

import onnxruntime

from edgelin.errors import EdgelinError
from edgelin.recurrences import CHUNK

# QMoE with accuracy_level; older kernels take rounded experts apart before they multiply.
_MIN_QUANTISED_EXPERTS = "1.31.0"


@dataclass(frozen=True)
class Profile:
    """What a graph of a profile is made of.

    Args:
        name: As on the command line and in the manifest.
        form: Function of the recurrences' ``onnx.py`` that translates them.
        opset: ai.onnx opset.
        ir_version: ONNX file version.
        min_float: Oldest onnxruntime that runs a float graph.
        min_quantised: The same for int8 and int4 weights (GatherBlockQuantized with 8 bits).
        vendor_ops: Whether com.microsoft operators may stand outside quantised matrices.
        max_time: Largest number of tokens in a call; None for no limit.
    """

    name: str
    form: str
    opset: int
    ir_version: int
    min_float: str
    min_quantised: str
    vendor_ops: bool
    max_time: int | None = CHUNK

    def min_onnxruntime(self, *, quantised: bool, experts: bool = False) -> str:
        """Oldest onnxruntime that runs the graphs of a bundle.

        Args:
            quantised: Whether some are quantised.
            experts: Whether the model has layers of experts.
        """
        oldest = self.min_quantised if quantised else self.min_float
        return (
            max(oldest, _MIN_QUANTISED_EXPERTS, key=_numbers) if quantised and experts else oldest
        )


_ALL = (
    Profile(
        name="fused",
        form="fused",
        opset=21,
        ir_version=9,
        min_float="1.25.1",
        min_quantised="1.25.1",
        vendor_ops=True,
    ),
    Profile(
        name="plain",
        form="plain",
        opset=21,
        ir_version=9,
        min_float="1.20.0",
        min_quantised="1.23.2",
        vendor_ops=False,
    ),
    Profile(
        name="onnx",
        form="fused",
        opset=27,
        ir_version=13,
        min_float="1.32.0",
        min_quantised="1.32.0",
        vendor_ops=False,
    ),
)
PROFILES = {profile.name: profile for profile in _ALL}


def find(name: str) -> Profile:
    """The profile of this name.

    Raises:
        EdgelinError: There is no such profile.
    """
    if name not in PROFILES:
        raise EdgelinError(f"profile is {name!r}; allowed: {', '.join(PROFILES)}")
    return PROFILES[name]


def check_onnxruntime(needed: str, version: str = onnxruntime.__version__) -> None:
    """Refuse to export what this onnxruntime could not run: every bundle is run before it is kept.

    Raises:
        EdgelinError: ``version`` is older than ``needed``.
    """
    if _numbers(version) < _numbers(needed):
        raise EdgelinError(
            f"onnxruntime {version} cannot run this profile, which needs {needed} or newer; "
            f"run `pip install 'onnxruntime>={needed}'` or choose another --profile"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Version as numbers; a suffix such as ``.dev1`` is dropped."""
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts[:3] if part.isdigit())
