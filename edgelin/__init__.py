"""edgelin: train linear-recurrent models in parallel form, run them in recurrent form anywhere.

Importing this package costs nothing: torch, onnx, triton and onnxruntime are loaded by the parts
that use them.
"""

from __future__ import annotations

import os as _os
import typing as _typing

from edgelin.errors import EdgelinError

if _typing.TYPE_CHECKING:
    from edgelin.runtimes import load as load

# onnxruntime's native builds report usage unless this stands before the library is loaded. Every
# part of edgelin that loads it lies below this package, whose first act this is.
_os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
__all__ = ["EdgelinError", "__version__", "load"]


def __getattr__(name: str) -> _typing.Any:
    if name == "load":
        from edgelin.runtimes import load

        return load
    raise AttributeError(f"module 'edgelin' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
