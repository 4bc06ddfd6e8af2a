"""The same random models whichever tests ran before."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Model classes draw their initial convolutions and biases from torch's own generator."""
    torch.manual_seed(0)
