"""Load a model as it is exported: every mixer that has a ``step_form`` replaced by it.

Some layers compute their weights in a way that a graph can't, or shouldn't at every call: a dense
state-space layer is exported in the basis of its eigenvectors. Whatever an export or a check of one
reads of a checkpoint comes from here, so that all of it is one model with one set of states.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from edgelin import checkpoint as checkpoints
from edgelin.model import Block, SequenceModel


def load(folder: Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> SequenceModel:
    """Read a checkpoint folder; arguments and errors as of :func:`edgelin.checkpoint.load`.

    Raises:
        EdgelinError: A mixer has no form to export; the line names its layer.
    """
    model, _ = checkpoints.load(folder, device=device, dtype=dtype)
    return step_form(model)


def step_form(model: SequenceModel) -> SequenceModel:
    """Replace the mixers of a model in place; returns the model."""
    for block in cast(list[Block], list(model.blocks)):
        if hasattr(block.mixer, "step_form"):
            block.mixer = block.mixer.step_form()
    return model.eval()
