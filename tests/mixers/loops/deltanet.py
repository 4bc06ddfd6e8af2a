"""Loop of the mixer ``deltanet``."""

from __future__ import annotations

from typing import Any

from loops.common import LINEAR
from loops.gated_deltanet import loop

CASES: dict[str, dict[str, Any]] = {
    "deltanet": {"type": "deltanet", **LINEAR},
    "deltanet, no gate": {"type": "deltanet", **LINEAR, "output_gate": False},
}

__all__ = ["CASES", "loop"]
