"""Run a bundle with numpy, onnxruntime and tokenizers; torch is never imported.

``edgelin.load(bundle)`` gives a :class:`~edgelin.runtimes.session.Bundle`; its streams read and
write tokens in constant memory. The contract that this code follows is ``runtimes/README.md``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle

__all__ = ["load"]


def load(bundle: str | Path, *, variant: str | None = None, threads: int | None = None) -> Bundle:
    """Open a bundle written by ``edgelin export``.

    Args:
        bundle: Folder with ``edgelin.json``.
        variant: Name of a variant in the manifest; None takes the default one.
        threads: Threads of onnxruntime, at most 8 a logical core; None takes the number of
            physical cores.

    Raises:
        EdgelinError: The bundle is damaged, or the installed onnxruntime cannot run it.
    """
    from edgelin.runtimes.session import Bundle

    return Bundle(Path(bundle), variant=variant, threads=threads)
