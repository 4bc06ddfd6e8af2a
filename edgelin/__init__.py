"""edgelin: train linear-recurrent models in parallel form, run them in recurrent form anywhere.

Importing this package costs nothing: torch, onnx, triton and onnxruntime are loaded by the parts
that use them.
"""

from __future__ import annotations

import typing as _typing

from edgelin.errors import EdgelinError

if _typing.TYPE_CHECKING:
    from edgelin.runtimes import load as load

__version__ = "0.1.0"
__all__ = ["EdgelinError", "__version__", "load"]


def __getattr__(name: str) -> _typing.Any:
    if name == "load":
        from edgelin.runtimes import load

        return load
    raise AttributeError(f"module 'edgelin' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
