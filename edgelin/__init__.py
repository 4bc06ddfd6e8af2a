"""edgelin: train linear-recurrent models in parallel form, run them in recurrent form anywhere.

Importing this package costs nothing: torch, onnx and triton are loaded by the parts that use them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgelin.runtimes import load as load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from edgelin.runtimes import load

        return load
    raise AttributeError(f"module 'edgelin' has no attribute {name!r}")
