"""Arrays in a temporary file: in memory only while they are used.

An export reads every weight a few times and needs few of them at once. So its weights lie in a file
that the process maps, and :func:`release` takes the pages of all such arrays out of its memory when
a layer is done; what is read again comes back from the file, or from the system's cache of it.
The file has no name and is gone with the process, however that ends.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

# Makes an array whose content is not set: np.empty, or MappedFile.empty.
Empty = Callable[[tuple[int, ...], DTypeLike], NDArray[Any]]

_LEAST = 1 << 16  # smaller arrays are not worth a mapping
_PIECE = 1 << 22
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class MappedFile:
    """Where :meth:`empty` makes arrays; they outlive it.

    Args:
        folder: Of the temporary file; has to hold all arrays.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._end = 0

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array whose content is not set.

        Raises:
            OSError: The disk is full.
        """
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size < _LEAST:
            return np.empty(shape, kind)
        start = self._end
        self._end += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._reserve(start)
        region = mmap.mmap(self._file.fileno(), size, offset=start)
        _maps.add(region)
        return np.frombuffer(region, kind).reshape(shape)

    def _reserve(self, start: int) -> None:
        """Have the disk keep the space now: later, a full one would end the process."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), start, self._end - start)
            return
        self._file.seek(start)
        for place in range(start, self._end, _PIECE):
            self._file.write(bytes(min(_PIECE, self._end - place)))
        self._file.flush()


def release() -> None:
    """Take the pages of all mapped arrays out of memory, where the system can; no array changes."""
    if hasattr(mmap, "MADV_DONTNEED"):
        for region in list(_maps):
            region.madvise(mmap.MADV_DONTNEED)
