"""Whether the model is being traced for ONNX, asked by the few places where the graph differs."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """True under ``torch.export`` (as ``torch.onnx.export`` calls it), false under torch.compile.

    ``torch.compiler.is_exporting`` alone is also true while Dynamo traces for torch.compile in
    torch 2.11.
    """
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
